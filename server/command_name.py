"""How to type the command `hearth` where this process runs: what every remedy that is copied and pasted begins with."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.settings import Settings


def typed(script: Path, found: str | None, here: Path) -> str:
    """Return `hearth` if that is what the shell finds, else the path of `script`, as seen from the folder `here`."""
    if found is not None and Path(found).resolve() == script.resolve():
        return "hearth"
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))


HEARTH = typed(Path(sys.prefix, "bin", "hearth"), shutil.which("hearth"), Path.cwd())


def keys_command(settings: Settings, rest: str) -> str:
    """Return the line that begins with `hearth keys`; a data directory that was given is part of it."""
    given = "data_dir" in settings.model_fields_set
    where = f" --data-dir {shlex.quote(str(settings.data_dir))}" if given else ""
    return f"{HEARTH} keys{where} {rest}"
