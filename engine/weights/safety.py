"""What may be loaded or fetched. Models may be hostile: safetensors only, no code, no name that leads elsewhere.

Nothing is loaded here. `check_folder` is for the folder of one model, `check_chat_folder` for a chat model's,
`check_pipeline_folder` for an image pipeline's.
`chosen` returns the files of a repository to fetch: one set of safetensors, and the text around it.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from engine.config.messages import Folder
from engine.config.yaml import shown
from engine.errors import LoadError, WeightsError

REPOSITORY = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?$"
COMMIT = r"^[0-9a-f]{40}$"
PIPELINES = (
    "Flux2KleinPipeline",
    "FluxPipeline",
    "QwenImagePipeline",
    "StableDiffusion3Pipeline",
    "StableDiffusionPipeline",
    "StableDiffusionXLPipeline",
    "ZImagePipeline",
)
# Never loaded: backends/diffusers/service.py leaves them out of the pipeline.
LEFT_OUT = ("safety_checker",)
# Components that a pipeline may leave out, by [null, null] in its index; each only with those before it.
_MAY_LACK = {"StableDiffusion3Pipeline": ("text_encoder_3", "tokenizer_3")}
_LIBRARIES = ("diffusers", "transformers")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WITHOUT_WEIGHTS = ("Tokenizer", "TokenizerFast", "Scheduler", "Processor", "ProcessorFast", "FeatureExtractor")
_INDEX = re.compile(r".*\.safetensors\.index(\.[a-z0-9]+)?\.json")  # the last part is a number format, like fp16
_CONFIG_LIMIT_BYTES = 4 * 2**20
# A mixture of experts has a line for each tensor of its experts, which may be tens of thousands.
_INDEX_LIMIT_BYTES = 64 * 2**20
_TEXT = {".json", ".txt", ".jinja", ".model", ".tiktoken"}  # the last two are vocabularies of tokenizers
_PAPERS = ("license", "licence", "notice", "readme", "model_card", "use_policy")
_SINGLE = ("model.safetensors", "diffusion_pytorch_model.safetensors")
_INDEX_ENDING = ".safetensors.index.json"
# Number formats in which repositories offer weights: model.fp16.safetensors and model.fp16-00001-of-00002.safetensors
_MARK = re.compile(r"\.(fp16|bf16|non_ema)(?:-\d{5}-of-\d{5})?\.safetensors$")
_MARKED_INDEX = re.compile(r"\.(fp16|bf16|non_ema)\.safetensors\.index\.json$")
# Files beside the weights that are loaded: the same weights in another layout, or a part of others.
_OTHER_LAYOUTS = ("consolidated", "adapter_model")
# Of LoRA adapters, as PEFT saves them.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TOKENIZERS = {"tokenizer.json", "tekken.json", "vocab.json", "vocab.txt"}
_MOST_DIMENSIONS = 16
# Bits of one number, by its name in a header. Unknown ones are not checked.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_FOLDERS: dict[str, tuple[str, ...]] = {
    "1_Pooling": (".json",),
    "additional_chat_templates": (".jinja",),
    "audio_tokenizer": (".json", ".safetensors", "LICENSE"),
    "voices": (".safetensors",),
}
_FOLDER: TypeAdapter[str] = TypeAdapter(Folder)


def is_plain(path: str) -> bool:
    """Whether a path of a file list stays below its folder, on every system and file system."""
    parts = path.split("/")
    return (
        path.isprintable()
        and "\\" not in path
        and len(path.encode()) <= 1024
        and all(part not in {"", ".", ".."} and len(part.encode()) <= 255 for part in parts)
    )


def check_folder_name(name: str) -> str:
    """Return the name of a folder below the weights directory. Raises `WeightsError` for any other."""
    try:
        return _FOLDER.validate_python(name)
    except ValidationError as error:
        raise WeightsError(
            f"{shown(name)!r} is not the name of a folder below the weights directory: it must be relative, like "
            "my-model or voices/my-voice, without `..` and without a part that starts with a dot or `~`."
        ) from error


def check_repository(name: str) -> str:
    """Return the name of a repository. Raises `WeightsError` for any other."""
    if re.fullmatch(REPOSITORY, name) is None or ".." in name or "--" in name:
        raise WeightsError(f"{shown(name)!r} is not a repository: it must be like owner/name.")
    return name


def is_there(folder: Path) -> bool:
    """Whether something other than an empty folder is there."""
    return folder.is_symlink() or (any(folder.iterdir()) if folder.is_dir() else folder.exists())


def check_folder(folder: Path) -> None:
    """Raise `LoadError`, naming the file, unless `folder` has a model in Hugging Face layout that is safe to load."""
    check_no_code(folder / "config.json")
    if (folder / "tokenizer_config.json").exists():
        check_no_code(folder / "tokenizer_config.json")
    if not any(folder.glob("*.safetensors")):
        raise LoadError(
            f"{folder.name} has no .safetensors file. Pick one: 1. finish the download; 2. use a repository that "
            "offers safetensors (pickle formats like .bin and .pt can run code and are refused)."
        )
    for file in folder.glob("*.safetensors"):
        check_safetensors(file)
    for file in folder.glob("*.index.json"):
        _check_shards(file)


def check_chat_folder(folder: Path) -> None:
    """Do the same for a chat model, which has a tokenizer beside its weights."""
    check_folder(folder)
    if not any(file.name in _TOKENIZERS or file.suffix in {".model", ".tiktoken"} for file in folder.iterdir()):
        raise LoadError(
            f"{folder.name} has no tokenizer: no tokenizer.json, tokenizer.model, or vocab.json with merges.txt. "
            "Finish the download, or save the tokenizer there, too (`tokenizer.save_pretrained`)."
        )


def _check_shards(index: Path) -> None:
    for shard in shards(index):
        if not (index.parent / shard).is_file():
            raise LoadError(
                f"{index.parent.name}/{shard} is missing, which {index.name} names. Finish the download, or copy the "
                "file there."
            )


def shards(file: Path) -> list[str]:
    """Return the names in an index of safetensors files. Raises `LoadError` for one that names anything else.

    An index of pickles, which a repository may also have, names nothing that is loaded here.
    """
    content = read_config(file, limit_bytes=_INDEX_LIMIT_BYTES)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise LoadError(f"{file.parent.name}/{file.name} is not an index of weights. Download the model again.")
    if not _INDEX.fullmatch(file.name):
        return []
    found = sorted(set(names.values()))
    if not all(name.endswith(".safetensors") and "/" not in name and "\\" not in name for name in found):
        raise LoadError(
            f"{file.parent.name}/{file.name} names files that are not safetensors beside it: other formats can run "
            "code and are refused. Download the model again, from a repository that you trust."
        )
    return found


def check_no_code(file: Path) -> None:
    """Raise `LoadError` if the JSON in `file` names code that the model brings itself."""
    # Serialised again there is one way to spell it, and within a text its quotes would be escaped
    if '"auto_map":' in json.dumps(read_config(file)):
        raise LoadError(
            f"{file.parent.name}/{file.name} has `auto_map`: the model wants to run code of its own, which is never "
            "done here. Use a model whose architecture needs no code of its own."
        )


def read_config(file: Path, *, limit_bytes: int = _CONFIG_LIMIT_BYTES) -> Any:
    """Return the content of a JSON file of limited size. Raises `LoadError`, naming the file, if it is not one."""
    try:
        if file.exists() and not file.is_file():
            raise LoadError(f"{file.parent.name}/{file.name} is not a file.")
        if file.stat().st_size > limit_bytes:
            limit = f"{limit_bytes >> 20} MiB"
            raise LoadError(f"{file.parent.name}/{file.name} is larger than {limit}: not a model configuration.")
        return json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise LoadError(f"{file.parent.name} has no {file.name}: it is not a complete model folder.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{file.parent.name}/{file.name} cannot be read as JSON. Download the model again.") from error


def read_object(file: Path) -> dict[str, Any]:
    """Do the same for a JSON object."""
    content = read_config(file)
    if not isinstance(content, dict):
        raise LoadError(f"{file.parent.name}/{file.name} is not a JSON object. Download the model again.")
    return content


def saved_in(config: Mapping[str, Any]) -> str | None:
    """Return the number format of a model's weights, if its config.json names one."""
    said = config.get("dtype") or config.get("torch_dtype")  # the second in older files
    return said if isinstance(said, str) else None


def check_safetensors(file: Path) -> dict[str, Any]:
    """Return what the header says of each tensor: `dtype`, `shape`, and its place.

    Raises `LoadError` if the file is cut off, or if a tensor's place in it is not as large as its shape says. A file
    has the length of its JSON header, the header, and the tensors, one after the other to its end. Source: the format's
    description in the safetensors repository.
    """
    if not file.is_file():
        raise LoadError(f"{file.parent.name}/{file.name} is not a file. Download it again.")
    size, end, cause, tensors = file.stat().st_size, -1, None, {}
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if 2 <= length <= min(size - 8, 100 * 2**20):
            try:
                header = json.loads(stream.read(length))
                tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
                end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
                wrong = next((name for name, tensor in tensors.items() if not _is_as_large_as_it_says(tensor)), None)
            except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
                end, cause = -1, error
    if end != size:
        raise LoadError(
            f"{file.parent.name}/{file.name} is cut off or damaged: its header does not match its size. Download it "
            "again."
        ) from cause
    if wrong is not None:
        raise LoadError(
            f"{file.parent.name}/{file.name} is damaged: its header gives the tensor {shown(wrong)} a place of another "
            "size than its shape and number format need. Download it again, or save the model again."
        )
    return tensors


def _is_as_large_as_it_says(tensor: Mapping[str, Any]) -> bool:
    (begin, end), shape = tensor["data_offsets"], tensor["shape"]
    # Huge numbers, or very many, would take hours to multiply.
    if begin < 0 or len(shape) > _MOST_DIMENSIONS or any(not 0 <= number < 2**63 for number in shape):
        return False
    bits = _BITS.get(tensor["dtype"])
    return bool(end >= begin if bits is None else 8 * (end - begin) == bits * math.prod(shape))


def check_pipeline_folder(folder: Path) -> str:
    """Return the pipeline's class. Raises `LoadError`, naming the file, unless the folder is safe and complete."""
    index = _read_index(folder)
    for file in sorted(folder.rglob("*")):
        check_file(folder, file)
    for name, origin in index.items():
        if isinstance(origin, list) and name not in LEFT_OUT and origin != [None, None]:
            _check_component(folder, name, origin)
    return str(index["_class_name"])


def pipeline_class(folder: Path) -> str:
    """Return the class of pipeline that a folder names. Raises `LoadError` for one that is not supported."""
    return str(_read_index(folder)["_class_name"])


def check_file(folder: Path, file: Path) -> None:
    """Raise `LoadError`, naming the file, for code, a configuration that names code, and a file that is cut off."""
    if file.suffix == ".py":
        raise LoadError(
            f"{file.relative_to(folder)} is code, and code from a model folder is never run here. Remove the file if "
            "the pipeline works without it, or use another model."
        )
    if file.name.endswith(("config.json", "model_index.json")):
        check_no_code(file)
    if file.suffix == ".safetensors":
        check_safetensors(file)


def lacking(folder: Path) -> list[str]:
    """Return the components that a checked folder leaves out on purpose, which its pipeline allows."""
    index = _read_index(folder)
    return list(
        takewhile(lambda name: index.get(name) in (None, [None, None]), _MAY_LACK.get(index["_class_name"], ()))
    )


def variant(folder: Path) -> str | None:
    """Return the variant, like `fp16`, if a component of a checked folder has only weights of that, else None."""
    for part in sorted(folder.iterdir()):
        files = [file.name for file in part.glob("*.safetensors")] if part.is_dir() else []
        kinds = {found[1] if (found := _MARK.search(name)) else None for name in files}
        if kinds and None not in kinds:
            return min(kind for kind in kinds if kind)
    return None


def _read_index(folder: Path) -> dict[str, Any]:
    index = read_object(folder / "model_index.json")
    if index.get("_class_name") not in PIPELINES:
        raise LoadError(
            f"{folder.name}/model_index.json names the pipeline {shown(str(index.get('_class_name')))}, which is not "
            f"supported. Use a model for one of: {', '.join(PIPELINES)}."
        )
    return index


def _check_component(folder: Path, name: str, origin: list[Any]) -> None:
    """A component is `[library, class]` in the index and a folder of the same name beside it."""
    known = len(origin) == 2 and origin[0] in _LIBRARIES and isinstance(origin[1], str) and origin[1].isidentifier()
    if not known or not name.isidentifier():
        raise LoadError(
            f"{folder.name}/model_index.json takes the component {shown(name)} from {shown(str(origin))}: only classes "
            "of diffusers and transformers are loaded here. Use a model whose pipeline needs no code of its own."
        )
    part = folder / name
    if part.is_symlink():
        raise LoadError(f"{folder.name}/{name} is a link, and links out of a model are not followed. Copy the folder.")
    if not part.is_dir():
        raise LoadError(f"{folder.name} has no folder {name}, which its model_index.json names. Finish the download.")
    if not origin[1].endswith(_WITHOUT_WEIGHTS):
        _check_weights(part)


def _check_weights(part: Path) -> None:
    if not (part / "config.json").is_file():
        raise LoadError(f"{part.name} has no config.json: it is not a complete model folder. Finish the download.")
    for file in part.glob("*.index*.json"):
        _check_shards(file)
    if any(part.glob("*.safetensors")):
        return
    pickles = [file.name for file in sorted(part.iterdir()) if file.suffix in _PICKLES]
    if pickles:
        raise LoadError(
            f"{part.name} contains {pickles[0]} and no .safetensors file: pickle formats can run code and are refused. "
            "Use a repository that offers safetensors, or convert the file on a disposable machine."
        )
    raise LoadError(f"{part.name} has no .safetensors file. Finish the download.")


def may_be_carried(path: str) -> bool:
    """Whether a file is of a kind that belongs to a model here."""
    return _is_text(path) or path.endswith((".safetensors", ".onnx"))


def descriptions(paths: Collection[str]) -> list[str]:
    """Return the files that are read before anything large is fetched: configurations and lists of weights."""
    deepest, endings = "model_index.json" in paths, ("config.json", "model_index.json", _INDEX_ENDING)
    return sorted(path for path in paths if path.count("/") <= deepest and path.endswith(endings) and _is_text(path))


def chosen(paths: Collection[str], folder: Path) -> list[str]:
    """Return the `paths` to fetch; `folder` has the `descriptions`. Raises `WeightsError` or `LoadError`."""
    if "model_index.json" in paths:
        found = _of_pipeline(paths, folder)
    elif "config.json" in paths:
        found = _of_model(paths, folder)
    elif ADAPTER_CONFIG in paths and ADAPTER_WEIGHTS in paths:
        found = [*_texts(paths, ""), ADAPTER_WEIGHTS]
    elif any(path.endswith(".onnx") for path in paths if "/" not in path):
        found = _of_voice(paths)
    else:
        folders = sorted({path.rsplit("/", 1)[0] for path in paths if path.endswith(("/config.json", ".onnx.json"))})
        hint = f" It has models in folders, like {folders[0]}: name one with --subfolder." if folders else ""
        raise WeightsError(
            "The repository has neither config.json nor model_index.json, nor a voice (X.onnx with X.onnx.json) at its "
            f"top: Hearth does not load such models.{hint}"
        )
    missing = sorted(set(found) - set(paths))
    if missing:
        raise WeightsError(f"The repository lacks {missing[0]}, which its own list of weights names. Use another one.")
    return sorted(set(found))


def convertible(paths: Collection[str], _folder: Path) -> list[str]:
    """Return the paths to fetch of a model whose weights are pickles. Raises `WeightsError`."""
    found = [path for path in paths if _is_in(path, "", ".pth") or _is_in(path, "voices/", ".pt")]
    if "config.json" not in paths or not found:
        raise WeightsError("The repository has no config.json with weights in .pth. Hearth cannot convert it.")
    return sorted([*_texts(paths, ""), *found])


def check_loadable(folder: Path) -> None:
    """Raise `LoadError` unless the loaders take the finished folder."""
    if (folder / "model_index.json").exists():
        check_pipeline_folder(folder)
        return
    if (folder / "config.json").exists():
        check_folder(folder)
    for file in folder.rglob("*"):
        check_file(folder, file)


def _of_pipeline(paths: Collection[str], folder: Path) -> list[str]:
    found = _texts(paths, "")
    for name, origin in _read_index(folder).items():
        if isinstance(origin, list) and any(origin) and name not in LEFT_OUT:
            found += _texts(paths, f"{name}/")
            found += _weights(paths, folder, f"{name}/")
    return found


def _of_model(paths: Collection[str], folder: Path) -> list[str]:
    weights = _weights(paths, folder, "")
    if not weights:
        pickles = sorted(path for path in paths if path.endswith((".bin", ".pt", ".pth", ".ckpt", ".gguf")))
        has = f"has {pickles[0]} and " if pickles else "has "
        raise WeightsError(
            f"The repository {has}no .safetensors file. Pick one: 1. another repository of the model, or --revision, "
            "that offers safetensors; 2. convert it on a disposable machine. Pickles (.bin, .pt) can run code "
            "and are never fetched; GGUF is not loaded here."
        )
    extra = [path for path in paths for start, ending in _FOLDERS.items() if _is_in(path, f"{start}/", ending)]
    return _texts(paths, "") + weights + extra


def _of_voice(paths: Collection[str]) -> list[str]:
    voices = [path for path in paths if _is_in(path, "", ".onnx") and f"{path}.json" in paths]
    if len(voices) != 1:
        raise WeightsError(
            f"The repository has {len(voices)} voices (X.onnx with X.onnx.json) at its top. One is loaded from one "
            "folder: take a repository or a --subfolder with one."
        )
    return [*_texts(paths, ""), *voices]


def _weights(paths: Collection[str], folder: Path, start: str) -> list[str]:
    """Return the safetensors of one folder that are loaded together, and their index."""
    indexes = [path for path in paths if _is_in(path, start, _INDEX_ENDING) and not _MARKED_INDEX.search(path)]
    if indexes:
        return indexes + [f"{start}{name}" for path in indexes for name in shards(folder / path)]
    files = [path for path in paths if _is_in(path, start, ".safetensors")]
    singles = [path for path in files if path.removeprefix(start) in _SINGLE]
    marks = {path: _MARK.search(path) for path in files if not path.removeprefix(start).startswith(_OTHER_LAYOUTS)}
    plain = [path for path, mark in marks.items() if mark is None]
    if singles or plain or not marks:
        return singles or plain
    # Only in 16 bits: one such set, with its index.
    kind = min(mark[1] for mark in marks.values() if mark)
    of_kind = [path for path, mark in marks.items() if mark and mark[1] == kind]
    return of_kind + [path for path in paths if _is_in(path, start, f".safetensors.index.{kind}.json")]


def _texts(paths: Collection[str], start: str) -> list[str]:
    # Not lists of weights, which `_weights` chooses: one whose files are not fetched would make the folder unfinished.
    return [path for path in paths if _is_in(path, start, "") and _is_text(path) and ".index." not in path]


def _is_in(path: str, start: str, ending: str | tuple[str, ...]) -> bool:
    return path.startswith(start) and "/" not in path[len(start) :] and path.endswith(ending)


def _is_text(path: str) -> bool:
    name = PurePosixPath(path)
    if name.name.startswith("."):
        return False
    return name.suffix in _TEXT or (name.suffix in {"", ".md"} and name.name.lower().startswith(_PAPERS))
