"""What a folder of an embedding model says about its vectors, in the layout of sentence-transformers.

vLLM would take another way than the model was trained for where it finds none, and its vectors would be wrong without a
word: what is not known here is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.config.yaml import shown
from engine.errors import LoadError
from engine.weights.safety import check_chat_folder, is_plain, read_config, read_object, saved_in

Pooling = Literal["mean", "cls", "last"]

_MODULES = {"Transformer", "Pooling", "Normalize"}
_WAY = re.compile(r"^pooling_mode_|_tokens?$")
_POOLINGS: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
# Positions of these begin behind the one of padding, so that the last ones of their tables are no tokens' own.
_SHIFTED = {"camembert", "roberta", "xlm-roberta", "xlm-roberta-xl"}


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """How tokens become a vector, whether it has the length 1, and what stands before inputs of each type.

    `prefixes` has "query", "document" and, for inputs that do not say what they are, "".
    """

    pooling: Pooling
    normalised: bool = True
    prefixes: Mapping[str, str] = field(default_factory=dict)


def read_layout(folder: Path, said: Pooling | None) -> VectorLayout:
    """Read what the folder says; `said` is models.yaml's word on pooling. Raises `LoadError`."""
    if not (folder / "modules.json").exists():
        if said is None:
            raise LoadError(
                f"{folder.name} has no modules.json, so it does not say how tokens become a vector. Finish the "
                "download, or write `pooling` of the model in models.yaml, as its model card says: mean, cls or last."
            )
        return VectorLayout(said)
    modules = dict(_module(folder, entry) for entry in _listed(folder))
    unknown = sorted(modules.keys() - _MODULES)
    if unknown or modules.get("Transformer") != "" or "Pooling" not in modules:
        what = f"has the module {shown(unknown[0])}" if unknown else "lacks a module Transformer at its top, or Pooling"
        raise LoadError(
            f"{folder.name}/modules.json {what}: only models of a Transformer, Pooling and Normalize are served. Use "
            "another model."
        )
    return VectorLayout(said or _pooling(folder / modules["Pooling"]), "Normalize" in modules, _prefixes(folder))


def check_pooling_folder(folder: Path) -> tuple[int | None, str | None]:
    """Return how many tokens an input may have at most, and the number format, each where the folder says it.

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


def _listed(folder: Path) -> list[Any]:
    listed = read_config(folder / "modules.json")
    if not isinstance(listed, list) or len(listed) > 64:
        raise LoadError(f"{folder.name}/modules.json is not a list of modules. Download the model again.")
    return listed


def _module(folder: Path, entry: Any) -> tuple[str, str]:
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
