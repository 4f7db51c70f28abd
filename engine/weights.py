"""What may be loaded from a model folder. Model files are hostile: safetensors only, and no code from the folder."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from engine.errors import LoadError

if TYPE_CHECKING:
    from pathlib import Path

_INDEX = re.compile(r".*\.safetensors\.index(\.[a-z0-9]+)?\.json")  # the last part is a number format, like fp16
_CONFIG_LIMIT_BYTES = 4 * 2**20
# A mixture of experts has a line for each of its experts' tensors, and there are tens of thousands.
_INDEX_LIMIT_BYTES = 64 * 2**20


def check_folder(folder: Path) -> None:
    """Raise `LoadError`, naming the file, unless `folder` holds a model in Hugging Face layout that is safe to load."""
    for name in ("config.json", "tokenizer_config.json"):
        if name == "config.json" or (folder / name).exists():
            check_no_code(folder / name)
    if not any(folder.glob("*.safetensors")):
        raise LoadError(
            f"{folder.name} holds no .safetensors file. Pick one: 1. finish the download; 2. use a repository that "
            "offers safetensors (pickle formats like .bin and .pt can run code and are refused)."
        )
    for file in folder.glob("*.safetensors"):
        check_safetensors(file)
    for file in folder.glob("*.index.json"):
        shards(file)


def shards(file: Path) -> list[str]:
    """Return the names in an index of safetensors files. Raises `LoadError` for one that leads to anything else.

    An index of pickles, which a repository may offer beside, names nothing that is loaded here.
    """
    content = read_config(file, limit_bytes=_INDEX_LIMIT_BYTES)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise LoadError(f"{file.parent.name}/{file.name} is no index of weights. Download the model again.")
    if not _INDEX.fullmatch(file.name):
        return []
    found = sorted(set(names.values()))
    if not all(name.endswith(".safetensors") and "/" not in name and "\\" not in name for name in found):
        raise LoadError(
            f"{file.parent.name}/{file.name} leads to files that are no safetensors beside it: other formats can run "
            "code and are refused. Download the model again, from a repository that you trust."
        )
    return found


def check_no_code(file: Path) -> None:
    """Raise `LoadError` if the JSON in `file` names code that the model brings itself."""
    if _mentions(read_config(file), "auto_map"):
        raise LoadError(
            f"{file.parent.name}/{file.name} has `auto_map`: the model wants to run code of its own, which is never "
            "done here. Use a model whose architecture needs no code of its own."
        )


def read_config(file: Path, *, limit_bytes: int = _CONFIG_LIMIT_BYTES) -> Any:
    """Return what a JSON file of limited size holds. Raises `LoadError`, naming the file, if it is none."""
    try:
        if file.exists() and not file.is_file():
            raise LoadError(f"{file.parent.name}/{file.name} is no file.")
        if file.stat().st_size > limit_bytes:
            limit = f"{limit_bytes >> 20} MiB"
            raise LoadError(f"{file.parent.name}/{file.name} is larger than {limit}: that is no model configuration.")
        return json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise LoadError(f"{file.parent.name} holds no {file.name}: it is no complete model folder.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{file.parent.name}/{file.name} cannot be read as JSON. Download the model again.") from error


def _mentions(value: Any, key: str) -> bool:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if key in item:
                return True
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
    return False


def check_safetensors(file: Path) -> None:
    """Raise `LoadError` if the file is cut off: after the length of its JSON header and that, its tensors end with it.

    Source: the format's description in the safetensors repository.
    """
    if not file.is_file():
        raise LoadError(f"{file.parent.name}/{file.name} is no file. Download it again.")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(size - 8, 100 * 2**20):
            raise _broken(file)
        try:
            header = json.loads(stream.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
            complete = 8 + length + max(ends, default=0) == size
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise _broken(file) from error
    if not complete:
        raise _broken(file)


def _broken(file: Path) -> LoadError:
    return LoadError(
        f"{file.parent.name}/{file.name} is cut off or damaged: its header does not match its size. Download it again."
    )
