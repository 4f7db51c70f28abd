"""Reads the files of a model folder, which may be hostile: bounded, and never through a link out of it."""

import errno
import itertools
import json
import os
import stat
from pathlib import Path
from typing import Any

from engine.config.yaml import shown
from engine.errors import LoadError
from engine.weights.safety import check_safetensors

LIMIT_BYTES = 1 << 20
LIMIT_ENTRIES = 10_000
_LFS = b"version https://git-lfs"


class MetadataError(Exception):
    """A model folder's metadata cannot be used. The message is for the operator and names the file."""


class ModelFolder:
    """One TTS model's folder. Names of files are relative to it, and come from `names`, never from metadata."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self._root = path.resolve()

    def names(self, part: str = "") -> list[str]:
        """List a folder inside, sorted; nothing if it is not there. Raises `MetadataError`."""
        try:
            place = self._inside(part) if part else self.path
            if place is None or not place.is_dir():
                return []
            with os.scandir(place) as entries:
                found = [entry.name for entry in itertools.islice(entries, LIMIT_ENTRIES + 1)]
        except OSError as error:
            raise unreadable(part or "the folder", error) from error
        if len(found) > LIMIT_ENTRIES:
            raise MetadataError(f"{part or 'the folder'} has more than {LIMIT_ENTRIES} files: that is not a TTS model")
        return sorted(found)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in a file, None if there is no such file. Raises `MetadataError`."""
        content = self.read(name)
        if content is None:
            return None
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise MetadataError(f"{shown(name)} cannot be read as JSON: download the model again") from error
        if not isinstance(value, dict):
            raise MetadataError(f"{shown(name)} is not a JSON object: download the model again")
        return value

    def read(self, name: str, *, limit_bytes: int = LIMIT_BYTES) -> bytes | None:
        """Return the content of a file, None if there is no such file. Raises `MetadataError`."""
        content = self.read_start(name, limit_bytes + 1)
        if content is not None and len(content) > limit_bytes:
            raise MetadataError(
                f"{shown(name)} is larger than {limit_bytes >> 10} KiB: that is not the description of a model"
            )
        return content

    def read_start(self, name: str, size: int) -> bytes | None:
        """Return at most the first `size` bytes of a file, None if there is no such file. Raises `MetadataError`."""
        try:
            place = self._inside(name)
            if place is None:
                return None
            # A pipe would wait for its writer; the file may have become one since it was checked.
            number = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(number, "rb") as file:  # noqa: PTH123 - an open file, not a path
                if not stat.S_ISREG(os.fstat(number).st_mode):
                    raise MetadataError(f"{shown(name)} is not a regular file: remove it")
                return file.read(size)
        except OSError as error:
            raise unreadable(name, error) from error

    def weights_problem(self, name: str) -> str | None:
        """Say why weights cannot be loaded; None if their first bytes look well."""
        try:
            start = self.read_start(name, 64)
            place = self._inside(name)
            if place is None or not start:
                return f"{shown(name)} is empty: download it again"
            if start.startswith(_LFS):
                return f"{shown(name)} is a pointer of Git LFS, not the file itself: run `git lfs pull`"
            if name.endswith(".safetensors"):
                if int.from_bytes(start[:8], "little") > LIMIT_BYTES:
                    return f"{shown(name)} is damaged: download it again"
                check_safetensors(place)
        except MetadataError as error:
            return str(error)
        except (LoadError, OSError):
            return f"{shown(name)} is cut off or damaged: download it again"
        return None

    def _inside(self, name: str) -> Path | None:
        """Resolve a name; None if nothing is there. Raises `MetadataError` if it leads out, or to no file or folder."""
        try:
            place = (self.path / name).resolve(strict=True)
        except FileNotFoundError:
            return None
        except RuntimeError as error:  # what Python below 3.13 says of links in a circle
            raise MetadataError(f"{shown(name)} is a link to itself: remove it") from error
        if not place.is_relative_to(self._root):
            raise MetadataError(
                f"{shown(name)} is a link that leads out of the folder, and such links are not followed: put the file "
                "itself there"
            )
        mode = place.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise MetadataError(f"{shown(name)} is not a regular file: remove it")
        return place


def unreadable(name: str, error: OSError) -> MetadataError:
    """Return the error for a file or folder that cannot be read."""
    if error.errno in {errno.EACCES, errno.EPERM}:
        return MetadataError(f"{shown(name)} may not be read by the user who runs the server: change who may read it")
    return MetadataError(f"{shown(name)} cannot be read ({error.strerror or 'input/output error'})")
