"""The metadata of LoRA adapters and of models for embeddings, reranking and transcription.

Nothing is loaded here, only configurations and headers of safetensors are read, in the layouts of PEFT,
sentence-transformers and transformers. No other format is accepted.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from engine.config.yaml import shown
from engine.errors import LoadError
from engine.weights.safety import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    check_chat_folder,
    check_safetensors,
    is_plain,
    read_config,
    read_object,
    saved_in,
)

Pooling = Literal["mean", "cls", "last"]

# Ranks of vLLM: an adapter of another rank takes the room of the next one.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_NUMBER_BYTES = 2
# Options that change more than two small matrices of each module; vLLM supports none.
_UNSUPPORTED = ("use_dora", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens")
# Number formats in which a weight has the shape of its module; packed ones differ.
_PLAIN = {"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}

_MODULES = {"Transformer", "Pooling", "Normalize"}
_WAY = re.compile(r"^pooling_mode_|_tokens?$")
_POOLINGS: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
# Positions of these begin after that of padding, so that tokens cannot use the last ones.
_SHIFTED = {"camembert", "roberta", "xlm-roberta", "xlm-roberta-xl"}

# Newer folders have the second, which contains the first.
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
_LONGEST_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter from a checked folder of PEFT's. `modules`: input and output size of each, by `_key`."""

    folder: Path
    rank: int
    modules: Mapping[str, tuple[int, int]]
    made_for: str
    """The model that it names as its base: a repository, or a folder of its maker."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a folder. Raises `LoadError` unless it has an adapter that vLLM can serve."""
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
        modules = _changed_modules(check_safetensors(folder / ADAPTER_WEIGHTS))
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
    """Return the most bytes that vLLM takes for these beside a model, on each of its devices.

    It has one slot for each, with room for the largest rank in all modules that any of them changes.
    """
    modules = {key: sum(size) for one in adapters for key, size in one.modules.items()}
    rank = room_for_rank(max((one.rank for one in adapters), default=1))
    return len(adapters) * rank * sum(modules.values()) * _NUMBER_BYTES


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """How tokens become a vector, whether it has the length 1, and the prefixes of inputs of each type.

    If vLLM finds no way of pooling it takes a default, which may be wrong for the model, silently: so unknown ones are
    refused.

    `prefixes` has "query", "document" and, for inputs without a type, "".
    """

    pooling: Pooling
    normalised: bool = True
    prefixes: Mapping[str, str] = field(default_factory=dict)


def read_layout(folder: Path, said: Pooling | None) -> VectorLayout:
    """Read the folder; `said` is the `pooling` in models.yaml. Raises `LoadError`."""
    if not (folder / "modules.json").exists():
        if said is None:
            raise LoadError(
                f"{folder.name} has no modules.json, so it does not say how tokens become a vector. Finish the "
                "download, or write `pooling` of the model in models.yaml, as its model card says: mean, cls or last."
            )
        return VectorLayout(said)
    modules = dict(_named_module(folder, entry) for entry in _listed_modules(folder))
    unknown = sorted(modules.keys() - _MODULES)
    if unknown or modules.get("Transformer") != "" or "Pooling" not in modules:
        what = f"has the module {shown(unknown[0])}" if unknown else "lacks a module Transformer at its top, or Pooling"
        raise LoadError(
            f"{folder.name}/modules.json {what}: only models of a Transformer, Pooling and Normalize are served. Use "
            "another model."
        )
    return VectorLayout(said or _pooling(folder / modules["Pooling"]), "Normalize" in modules, _prefixes(folder))


def check_pooling_folder(folder: Path) -> tuple[int | None, str | None]:
    """Return the most tokens of an input, and the number format, each if the folder says it.

    Raises `LoadError`, naming a file.
    """
    check_chat_folder(folder)
    config = read_object(folder / "config.json")
    known = []
    if config.get("model_type") in _SHIFTED:
        known = [_number(config.get("max_position_embeddings"), 514) - _number(config.get("pad_token_id"), 1) - 1]
    for file in sorted(folder.glob("sentence_*_config.json")):
        said = read_object(file).get("max_seq_length")
        known += [said] if isinstance(said, int) and said > 0 else []
    return min(known, default=None), saved_in(config)


@dataclass(frozen=True, slots=True)
class WhisperFolder:
    """What the folder of a model like Whisper says about the sound that it takes and the tokens that it writes.

    `piece_seconds`: the longest sound that it takes at once. `suppressed`: tokens that it must never write.
    """

    piece_seconds: float
    saved_in: str | None
    multilingual: bool
    suppressed: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a folder that is safe to load. Raises `LoadError`, naming a file."""
        check_chat_folder(folder)
        config = read_object(folder / "config.json")
        if config.get("model_type") != "whisper":
            raise LoadError(
                f"{folder.name}/config.json has the model_type {shown(str(config.get('model_type')))}: only Whisper is "
                "served for transcription. Use another model, or name the `task` of this one in models.yaml."
            )
        said = read_object(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
        suppressed = said.get("suppress_tokens", config.get("suppress_tokens"))
        tokens = suppressed if isinstance(suppressed, list) else []
        return cls(
            _piece_seconds(folder),
            saved_in(config),
            said.get("is_multilingual") is not False,
            tuple(token for token in tokens if type(token) is int and token >= 0),
        )


def _rank(folder: Path, config: Mapping[str, Any]) -> int:
    patterns = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else [None])]
    if not all(type(rank) is int and 1 <= rank <= RANKS[-1] for rank in ranks):
        raise LoadError(f"{folder.name}/{ADAPTER_CONFIG} has no rank `r` from 1 to {RANKS[-1]}.")
    return max(map(int, ranks))


def _changed_modules(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    first = {name: each["shape"] for name, each in tensors.items() if name.endswith(".lora_A.weight")}
    found = {}
    for name, shape in first.items():
        module = name.removesuffix(".lora_A.weight")
        second = tensors.get(f"{module}.lora_B.weight", {}).get("shape")
        if second and len(shape) == len(second) == 2:
            found[_key(module)] = (int(shape[1]), int(second[0]))
    return found


def _shapes_of(base: Path) -> dict[str, set[tuple[int, ...]]]:
    """Return the shapes of each module's weight; none if it is packed."""
    found: dict[str, set[tuple[int, ...]]] = {}
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


def _listed_modules(folder: Path) -> list[Any]:
    listed = read_config(folder / "modules.json")
    if not isinstance(listed, list) or len(listed) > 64:
        raise LoadError(f"{folder.name}/modules.json is not a list of modules. Download the model again.")
    return listed


def _named_module(folder: Path, entry: Any) -> tuple[str, str]:
    kind, path = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(path, str) or not (path == "" or is_plain(path)):
        raise LoadError(f"{folder.name}/modules.json is not a list of modules. Download the model again.")
    return kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind, path


def _pooling(folder: Path) -> Pooling:
    config = read_object(folder / "config.json")
    # Older ones have a key for each way, like `pooling_mode_mean_tokens: true`, newer ones `pooling_mode: "mean"`
    modes = [_WAY.sub("", name) for name, on in config.items() if on is True and name.startswith("pooling_mode_")]
    if isinstance(config.get("pooling_mode"), str):
        modes = [config["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in _POOLINGS or config.get("include_prompt") is False:
        raise LoadError(
            f"{folder.name}/config.json asks for a way of pooling that is not served: one of mean, cls and lasttoken "
            "is, of the whole text. Use another model."
        )
    return _POOLINGS[modes[0]]


def _prefixes(folder: Path) -> dict[str, str]:
    file = folder / "config_sentence_transformers.json"
    said = read_object(file) if file.exists() else {}
    prompts = said.get("prompts")
    prefixes = {}
    if isinstance(prompts, dict):
        prefixes = {name: text for name, text in prompts.items() if isinstance(text, str)}
    named = said.get("default_prompt_name")
    return {**prefixes, "": prefixes.get(named, "") if isinstance(named, str) else ""}


def _number(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def _piece_seconds(folder: Path) -> float:
    for name in _PREPROCESSORS:
        if (folder / name).exists():
            content = read_object(folder / name)
            content = content.get("feature_extractor", content)
            seconds = content.get("chunk_length", _LONGEST_SECONDS) if isinstance(content, dict) else None
            if not isinstance(seconds, int | float) or not 1 <= seconds <= _LONGEST_SECONDS:
                raise LoadError(f"{folder.name}/{name}: `chunk_length` must be from 1 to {_LONGEST_SECONDS:g} seconds.")
            return float(seconds)
    raise LoadError(f"{folder.name} has no {_PREPROCESSORS[0]}: not a complete model folder. Finish the download.")
