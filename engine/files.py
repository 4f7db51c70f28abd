"""Small files that are read again after a restart, and that nobody misses: whole or as before, whatever happens."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def replace_file(file: Path, text: str) -> None:
    """Write a file anew, in one moment for whoever reads it. Raises `OSError`, and leaves nothing half-written then.

    It need not survive a power cut; see weights/manifest.py for what has to.
    """
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
