"""LoRA adapters: what a folder of PEFT's holds, and whether it was made for the model that it is put on.

Nothing is loaded here: configurations and headers of safetensors are read, and no other format is accepted.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from engine.config.yaml import shown
from engine.errors import LoadError
from engine.weights.safety import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_safetensors, read_config

# Of vLLM: an adapter of another rank takes the room of the next one.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_NUMBER_BYTES = 2
# What changes more than two small matrices of each module; vLLM has none of it.
_UNSUPPORTED = ("use_dora", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens")
# Number formats in which a weight has the shape that its module computes with; packed ones have others.
_PLAIN = {"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """What a checked folder holds. `modules`: numbers in and out of each, by `_key`."""

    folder: Path
    rank: int
    modules: Mapping[str, tuple[int, int]]
    made_for: str
    """The model that it names as its base: a repository, or a folder of whoever made it."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raise `LoadError`, saying what is wrong, unless it is an adapter that vLLM can put on a model."""
        if not folder.is_dir():
            raise LoadError(f"there is no folder {folder.name!r} in the weights directory. Put the adapter there.")
        config = read_config(folder / ADAPTER_CONFIG)
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise LoadError(f"{folder.name}/{ADAPTER_CONFIG} is not of a LoRA adapter: `peft_type` must be LORA.")
        rank = _rank(folder, config)
        used = [name for name in _UNSUPPORTED if config.get(name)]
        used += ["bias"] if config.get("bias", "none") != "none" else []
        used += ["modules_to_save"] if config.get("modules_to_save") else []
        if used:
            raise LoadError(
                f"{folder.name}/{ADAPTER_CONFIG} uses {', '.join(used)}, which is not supported. Train the adapter "
                "without."
            )
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise LoadError(
                f"{folder.name} has no {ADAPTER_WEIGHTS}. Other formats can run code and are refused: save the "
                "adapter with `safe_serialization=True`."
            )
        modules = _modules(check_safetensors(folder / ADAPTER_WEIGHTS))
        if not modules:
            raise LoadError(f"{folder.name}/{ADAPTER_WEIGHTS} has no pair of matrices `lora_A` and `lora_B`.")
        return cls(folder, rank, modules, shown(str(config.get("base_model_name_or_path"))))

    @property
    def targets(self) -> set[str]:
        """Names of the modules that it changes, without their layers."""
        names = {key.rpartition(".")[2] for key in self.modules}
        return names | ({"experts"} if any("experts" in key for key in self.modules) else set())

    def check_base(self, base: Path) -> None:
        """Raise `LoadError` unless the chat model in the folder `base` has the modules that it changes."""
        shapes = _shapes_of(base)
        told = f"it says that it was made for {self.made_for}"
        if shapes and shapes.keys().isdisjoint(self.modules):
            raise LoadError(f"{self.folder.name} changes modules that its base does not have; {told}.")
        for key, (width, height) in self.modules.items():
            known = shapes.get(key)
            if known and (height, width) not in known:
                needs = " or ".join(f"{shape[1]} x {shape[0]}" for shape in sorted(known))
                raise LoadError(
                    f"{self.folder.name} was made for another model than its base: its {shown(key)} is {width} x "
                    f"{height} and the base's {needs}; {told}."
                )


def room_for_rank(rank: int) -> int:
    return next(each for each in RANKS if each >= rank)


def room_bytes(adapters: Collection[LoraAdapter]) -> int:
    """Return what vLLM takes beside a model for these, on each of its devices at most.

    It keeps one place for each, with room for the largest rank in all modules that any of them changes.
    """
    modules = {key: sum(size) for one in adapters for key, size in one.modules.items()}
    rank = room_for_rank(max((one.rank for one in adapters), default=1))
    return len(adapters) * rank * sum(modules.values()) * _NUMBER_BYTES


def _rank(folder: Path, config: Mapping[str, Any]) -> int:
    patterns = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else [None])]
    if not all(type(rank) is int and 1 <= rank <= RANKS[-1] for rank in ranks):
        raise LoadError(f"{folder.name}/{ADAPTER_CONFIG} has no rank `r` from 1 to {RANKS[-1]}.")
    return max(map(int, ranks))


def _modules(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    first = {name: each["shape"] for name, each in tensors.items() if name.endswith(".lora_A.weight")}
    found = {}
    for name, shape in first.items():
        module = name.removesuffix(".lora_A.weight")
        second = tensors.get(f"{module}.lora_B.weight", {}).get("shape")
        if second and len(shape) == len(second) == 2:
            found[_key(module)] = (int(shape[1]), int(second[0]))
    return found


def _shapes_of(base: Path) -> dict[str, set[Shape]]:
    """Return the shapes of each module's weight; none where it is packed."""
    found: dict[str, set[Shape]] = {}
    for file in base.glob("*.safetensors"):
        for name, tensor in check_safetensors(file).items():
            module, _, kind = name.rpartition(".")
            shapes = found.setdefault(_key(module), set())
            if kind == "weight" and tensor["dtype"] in _PLAIN and len(tensor["shape"]) == 2:
                shapes.add(tuple(tensor["shape"]))
    return found


def _key(module: str) -> str:
    """Return the name of a module from its layer on: before that, adapters and models of one family differ."""
    _, layers, rest = module.partition("layers.")
    return rest if layers else module.rpartition(".")[2]
