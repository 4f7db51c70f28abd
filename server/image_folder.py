"""The folder of generated images: files appear whole or not at all, and go by age and by their bytes together.

Everything here blocks and runs on a thread; image_files.py calls it from the event loop.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_PART = ".part"
_NAME = re.compile(r"[0-9a-f]{32}\.(png|jpeg|webp)")
_ROOM = 15 / 16  # of the bytes allowed: what is left after a sweep, so that not every new file needs one


class ImageFolder:
    """One folder, for one server. Files of other names are left alone. Everything raises OSError."""

    def __init__(
        self, path: Path, *, retention_seconds: float, max_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self.retention_seconds = retention_seconds
        self.max_bytes = max_bytes
        self.clock = clock

    def open(self) -> None:
        """Make the folder, for us alone, and delete what a killed process had half written."""
        self._make()
        self.path.chmod(0o700)
        for file in self.path.glob(f"*{_PART}"):
            if _NAME.fullmatch(file.name.removesuffix(_PART)):
                file.unlink(missing_ok=True)

    def write(self, name: str, data: bytes) -> None:
        """Store a file. Where that fails nothing is left of it."""
        part = self.path / f"{name}{_PART}"
        try:
            with os.fdopen(self._create(part), "wb", buffering=0) as file:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
            part.replace(self.path / name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def read(self, name: str) -> bytes | None:
        """Return the file's bytes; None if there is no such file of ours."""
        if not _NAME.fullmatch(name):
            return None
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Delete what is too old, then the oldest as long as there is too much. Returns the bytes that are left."""
        files = sorted(self._stored())
        kept = sum(size for _, size, _ in files)
        wanted = self.max_bytes * _ROOM if kept > self.max_bytes else self.max_bytes
        expired = self.clock() - self.retention_seconds
        for modified, size, name in files:
            if modified > expired and kept <= wanted:
                break
            self.delete(name)
            kept -= size
        return kept

    def _stored(self) -> Iterator[tuple[float, int, str]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        yield found.st_mtime, found.st_size, entry.name

    def _create(self, part: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(part, flags, 0o600)
        except FileNotFoundError:  # somebody has cleared the whole folder away
            self._make()
            return os.open(part, flags, 0o600)

    def _make(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
