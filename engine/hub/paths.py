"""Which names of files, folders and repositories are taken from strangers: nothing that leads out of a folder."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from engine.config_document import shown
from engine.config_words import Folder
from engine.hub.errors import WeightsError

if TYPE_CHECKING:
    from pathlib import Path

REPOSITORY = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?$"
COMMIT = r"^[0-9a-f]{40}$"

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
            f"{shown(name)!r} is no name of a folder below the weights directory: it must be relative, like my-model "
            "or voices/my-voice, without `..` and without a part that starts with a dot or `~`."
        ) from error


def check_repository(name: str) -> str:
    """Return the name of a repository. Raises `WeightsError` for any other."""
    if re.fullmatch(REPOSITORY, name) is None or ".." in name or "--" in name:
        raise WeightsError(f"{shown(name)!r} is no repository: it must be like owner/name.")
    return name


def is_there(folder: Path) -> bool:
    """Whether something is in the way of a new folder; an empty one is not."""
    if folder.is_symlink() or not folder.is_dir():
        return folder.is_symlink() or folder.exists()
    return any(folder.iterdir())
