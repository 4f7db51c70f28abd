"""Writes small files whole: a reader, or a restart after a crash, finds the old content or the new one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | str, *, durable: bool = False) -> None:
    """Replace a small file in one moment; `durable`: it survives a power cut from then on. Blocks.

    One process at a time writes a file. Raises `OSError`, and then the old content stays and nothing is left over.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder written to the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_folders(folder: Path) -> None:
    """Have the names in a folder and in all folders below it written to the disk."""
    for inside, _, _ in os.walk(folder):
        sync_folder(folder / inside)
