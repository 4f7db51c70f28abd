"""Which files of a repository are fetched: one set of safetensors, and the text around it. No pickle, no code."""

import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

from engine.weights.errors import WeightsError
from engine.weights.safety import (
    LEFT_OUT,
    PIPELINES,
    check_file,
    check_folder,
    check_pipeline_folder,
    read_config,
    shards,
)

_TEXT = {".json", ".txt", ".jinja", ".model", ".tiktoken"}  # the last two are vocabularies of tokenizers
_PAPERS = ("license", "licence", "notice", "readme", "model_card", "use_policy")
_SINGLE = ("model.safetensors", "diffusion_pytorch_model.safetensors")
_INDEX = ".safetensors.index.json"
# Like model.fp16.safetensors and model.fp16-00001-of-00002.safetensors
_MARK = re.compile(r"\.(fp16|bf16|non_ema)(?:-\d{5}-of-\d{5})?\.safetensors$")
_MARKED_INDEX = re.compile(r"\.(fp16|bf16|non_ema)\.safetensors\.index\.json$")
# Beside the weights that are loaded, the same once more in another layout, or a part of other weights.
_OTHER_LAYOUTS = ("consolidated", "adapter_model")
_FOLDERS = {"additional_chat_templates": ".jinja", "voices": ".safetensors"}


def may_be_carried(path: str) -> bool:
    """Whether a file is of a kind that belongs to a model here."""
    return _is_text(path) or path.endswith((".safetensors", ".onnx"))


def descriptions(paths: Collection[str]) -> list[str]:
    """Return what is looked at before anything large is fetched: configurations and lists of weights."""
    deepest = 1 if "model_index.json" in paths else 0
    return sorted(
        path
        for path in paths
        if path.count("/") <= deepest and path.endswith(("config.json", "model_index.json", _INDEX)) and _is_text(path)
    )


def chosen(paths: Collection[str], folder: Path) -> list[str]:
    """Return what is fetched of `paths`; the `descriptions` lie in `folder`. Raises `WeightsError` or `LoadError`."""
    if "model_index.json" in paths:
        found = _of_pipeline(paths, folder)
    elif "config.json" in paths:
        found = _of_model(paths, folder)
    elif any(path.endswith(".onnx") for path in paths if "/" not in path):
        found = _of_voice(paths)
    else:
        folders = sorted({path.rsplit("/", 1)[0] for path in paths if path.endswith(("/config.json", ".onnx.json"))})
        hint = f" It has models in folders, like {folders[0]}: name one with --subfolder." if folders else ""
        raise WeightsError(
            "The repository has neither config.json nor model_index.json, nor a voice (X.onnx with X.onnx.json) at its "
            f"top: it is no model that Hearth loads.{hint}"
        )
    missing = sorted(set(found) - set(paths))
    if missing:
        raise WeightsError(f"The repository lacks {missing[0]}, which its own list of weights names. Use another one.")
    return sorted(set(found))


def check_loadable(folder: Path) -> None:
    """Raise `LoadError` unless the finished folder is one that the loaders take."""
    if (folder / "model_index.json").exists():
        check_pipeline_folder(folder)
        return
    if (folder / "config.json").exists():
        check_folder(folder)
    for file in folder.rglob("*"):
        check_file(folder, file)


def _of_pipeline(paths: Collection[str], folder: Path) -> list[str]:
    index: Any = read_config(folder / "model_index.json")
    if not isinstance(index, dict) or index.get("_class_name") not in PIPELINES:
        raise WeightsError(f"The repository is no pipeline that Hearth runs. It runs: {', '.join(PIPELINES)}.")
    found = _texts(paths, "")
    for name, origin in index.items():
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
            "that offers safetensors; 2. convert it on a machine that may be lost. Pickles (.bin, .pt) can run code "
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
    indexes = [path for path in paths if _is_in(path, start, _INDEX) and not _MARKED_INDEX.search(path)]
    if indexes:
        return indexes + [f"{start}{name}" for path in indexes for name in shards(folder / path)]
    files = [path for path in paths if _is_in(path, start, ".safetensors")]
    singles = [path for path in files if path.removeprefix(start) in _SINGLE]
    marks = {path: _MARK.search(path) for path in files if not path.removeprefix(start).startswith(_OTHER_LAYOUTS)}
    plain = [path for path, mark in marks.items() if mark is None]
    if singles or plain or not marks:
        return singles or plain
    # Offered in 16 bits only: one such set, with its index.
    kind = min(mark[1] for mark in marks.values() if mark)
    of_kind = [path for path, mark in marks.items() if mark and mark[1] == kind]
    return of_kind + [path for path in paths if _is_in(path, start, f".safetensors.index.{kind}.json")]


def _texts(paths: Collection[str], start: str) -> list[str]:
    # Lists of weights are `_weights`' business: one whose files are not fetched would make the folder look unfinished.
    return [path for path in paths if _is_in(path, start, "") and _is_text(path) and ".index." not in path]


def _is_in(path: str, start: str, ending: str) -> bool:
    return path.startswith(start) and "/" not in path[len(start) :] and path.endswith(ending)


def _is_text(path: str) -> bool:
    name = PurePosixPath(path)
    if name.name.startswith("."):
        return False
    return name.suffix in _TEXT or (name.suffix in {"", ".md"} and name.name.lower().startswith(_PAPERS))
