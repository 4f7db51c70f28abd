"""Writes small files whole: a reader, or a restart after a crash, finds the old content or the new one.

Records are JSON: a missing or broken one counts as empty, and one that cannot be written is logged as a warning.
"""

import contextlib
import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec

_Record = TypeVar("_Record", bound=msgspec.Struct)
_log = logging.getLogger("hearth.records")


def read_record(file: Path | None, kind: type[_Record], consequence: str) -> _Record:
    """Return the record in a file, else an empty one. `consequence` is for the warning about a broken one."""
    try:
        return kind() if file is None else msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        _log.warning("%s cannot be read (%s): %s.", file, error, consequence)
    return kind()


def write_record(file: Path, record: msgspec.Struct, consequence: str) -> None:
    """Replace the file, whole or not at all. A failure is logged as a warning, with its `consequence`."""
    try:
        write_atomically(file, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    except OSError as error:
        _log.warning("%s cannot be written (%s): %s.", file, error, consequence)


def write_atomically(path: Path, content: bytes | str, *, durable: bool = False, private: bool = False) -> None:
    """Replace a small file in one step; `durable`: once this returns, it survives a power cut. Blocks.

    `private`: only we may read it. One process at a time writes a file. Raises `OSError`, and then the old content
    stays and nothing is left over.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    try:
        made = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(made, "wb") as file:
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
    """Sync a folder, so that the names in it are on the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sync_folders(folder: Path) -> None:
    """Sync a folder and all folders below it."""
    for inside, _, _ in os.walk(folder):
        sync_folder(folder / inside)
