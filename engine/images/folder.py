"""What may be loaded from the folder of an image pipeline, and which pipeline it says it is. Nothing is loaded here.

Like engine/weights.py for the folder of one model: safetensors only, and no code from the folder.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from engine.config_document import shown
from engine.errors import LoadError
from engine.weights import check_no_code, check_safetensors, read_config, shards

if TYPE_CHECKING:
    from pathlib import Path

PIPELINES = (
    "Flux2KleinPipeline",
    "FluxPipeline",
    "QwenImagePipeline",
    "StableDiffusion3Pipeline",
    "StableDiffusionPipeline",
    "StableDiffusionXLPipeline",
    "ZImagePipeline",
)
# Never loaded: backends/diffusers/load.py leaves them out of the pipeline.
LEFT_OUT = ("safety_checker",)
# Components that the pipeline does without where its index says [null, null]; each only with those before it.
_MAY_LACK = {"StableDiffusion3Pipeline": ("text_encoder_3", "tokenizer_3")}
# Number formats in which repositories offer weights, with these words in the names of files.
_VARIANT = re.compile(r"\.(fp16|bf16)(?:-\d{5}-of-\d{5})?\.safetensors")
_LIBRARIES = ("diffusers", "transformers")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WITHOUT_WEIGHTS = ("Tokenizer", "TokenizerFast", "Scheduler", "Processor", "ProcessorFast", "FeatureExtractor")


def check_pipeline_folder(folder: Path) -> str:
    """Return the pipeline's class. Raises `LoadError`, naming the file, unless the folder is safe and complete."""
    index = _read_index(folder)
    for file in sorted(folder.rglob("*")):
        _check_file(folder, file)
    for name, origin in index.items():
        if isinstance(origin, list) and name not in LEFT_OUT and origin != [None, None]:
            _check_component(folder, name, origin)
    return str(index["_class_name"])


def lacking(folder: Path) -> list[str]:
    """Return the components that a checked folder leaves out on purpose, and its pipeline knows to do without."""
    index = _read_index(folder)
    found: list[str] = []
    for name in _MAY_LACK.get(index["_class_name"], ()):
        if index.get(name) not in (None, [None, None]):
            break
        found.append(name)
    return found


def variant(folder: Path) -> str | None:
    """Return like `fp16` if a component of a checked folder has its weights in such files only, else None."""
    for part in sorted(folder.iterdir()):
        files = [file.name for file in part.glob("*.safetensors")] if part.is_dir() else []
        kinds = {found[1] if (found := _VARIANT.search(name)) else None for name in files}
        if kinds and None not in kinds:
            return min(kind for kind in kinds if kind)
    return None


def _read_index(folder: Path) -> dict[str, Any]:
    index = read_config(folder / "model_index.json")
    if not isinstance(index, dict):
        raise LoadError(f"{folder.name}/model_index.json is no JSON object. Download the model again.")
    if index.get("_class_name") not in PIPELINES:
        raise LoadError(
            f"{folder.name}/model_index.json names the pipeline {shown(str(index.get('_class_name')))}, which is not "
            f"supported. Use a model for one of: {', '.join(PIPELINES)}."
        )
    return index


def _check_file(folder: Path, file: Path) -> None:
    if file.suffix == ".py":
        raise LoadError(
            f"{file.relative_to(folder)} is code, and code from a model folder is never run here. Remove the file if "
            "the pipeline works without it, or use another model."
        )
    if file.name.endswith(("config.json", "model_index.json")):
        check_no_code(file)
    if file.suffix == ".safetensors":
        check_safetensors(file)


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
        raise LoadError(f"{part.name} holds no config.json: it is no complete model folder. Finish the download.")
    for file in part.glob("*.index*.json"):
        for shard in shards(file):
            if not (part / shard).is_file():
                raise LoadError(f"{part.name}/{shard} is missing, which {file.name} names. Finish the download.")
    if any(part.glob("*.safetensors")):
        return
    pickles = [file.name for file in sorted(part.iterdir()) if file.suffix in _PICKLES]
    if pickles:
        raise LoadError(
            f"{part.name} holds {pickles[0]} and no .safetensors file: pickle formats can run code and are refused. "
            "Use a repository that offers safetensors, or convert the file on a machine that may be lost."
        )
    raise LoadError(f"{part.name} holds no .safetensors file. Finish the download.")
