"""Retrains the demo models and replaces their weights: `python -m engine.demo.build [--check] [NAME ...]`.

A model is trained into a temporary folder and moved into place when it has passed its own examination. The
recipes are the folders beside this file: a package NAME with a module `recipe` that has `build(target)`.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path

from engine.demo import WEIGHTS
from engine.demo.manifest import problems, write_manifest

RECIPES = Path(__file__).parent

_log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Build or check the models named in `arguments`, all of them by default. Returns the exit status."""
    known = sorted(path.parent.name for path in RECIPES.glob("*/recipe.py"))
    parser = argparse.ArgumentParser(prog="scripts/build-demo-models", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which models (default all: {', '.join(known)})")
    parser.add_argument("--check", action="store_true", help="build nothing, only see that weights and recipes fit")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in known:
            parser.error(f"there is no demo model named {name!r}, only: {', '.join(known)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    work = _check if options.check else _build
    return max(work(name) for name in options.names or known)


def _check(name: str) -> int:
    found = problems(RECIPES / name, WEIGHTS / name)
    for problem in found:
        _log.error("%s", problem)
    if not found:
        _log.info("The demo model %s fits its recipe.", name)
    return int(bool(found))


def _build(name: str) -> int:
    started = time.monotonic()
    _log.info("Building the demo model %s.", name)
    WEIGHTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WEIGHTS, prefix=f".{name}-") as folder:
        made = Path(folder) / name
        made.mkdir()
        importlib.import_module(f"engine.demo.{name}.recipe").build(made)
        for path in _files(made):
            path.chmod(0o644)  # safetensors writes for its owner only
        write_manifest(RECIPES / name, made)
        shutil.rmtree(WEIGHTS / name, ignore_errors=True)
        made.rename(WEIGHTS / name)
    size = sum(path.stat().st_size for path in _files(WEIGHTS / name))
    _log.info("Wrote %s: %.2f MiB in %.0f seconds.", name, size / 2**20, time.monotonic() - started)
    return 0


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


if __name__ == "__main__":
    sys.exit(main())
