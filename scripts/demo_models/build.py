"""Trains the demo models again and replaces their weights: `scripts/build-demo-models [--check] [NAME ...]`.

A recipe is a folder NAME beside this file with a module `recipe` that has `build(target)`. A model is trained into a
temporary folder and then moved into place, with a manifest.json that ties the weights to the recipe that made them, by
the SHA-256 of both. The tests in tests/engine/demo examine what was made.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path

from engine.demo import WEIGHTS

RECIPES = Path(__file__).parent
# The files and folders beside this one that decide what a model becomes.
MADE_OF = {
    "chat": ("training.py", "chat"),
    "image": ("training.py", "vision/pictures.py", "image"),
    "vision": ("training.py", "chat", "vision"),
    "voices": ("training.py", "voices"),
}
MANIFEST = "manifest.json"
AGAIN = "Run scripts/build-demo-models."

_log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Build or check the models named in `arguments`, all of them by default. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/build-demo-models", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which models (default all: {', '.join(MADE_OF)})")
    parser.add_argument("--check", action="store_true", help="build nothing, only see that weights and recipes fit")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in MADE_OF:
            parser.error(f"there is no demo model named {name!r}, only: {', '.join(MADE_OF)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    work = _check if options.check else _build
    return max(work(name) for name in options.names or MADE_OF)


def problems(name: str, recipes: Path = RECIPES, weights: Path = WEIGHTS) -> list[str]:
    """What does not fit together, in sentences; empty when the weights are the ones that this recipe made."""
    path = weights / name / MANIFEST
    if not path.is_file():
        return [f"The demo model {name} has no {MANIFEST}, so it was never built. {AGAIN}"]
    manifest = json.loads(path.read_text(encoding="utf-8"))
    found = []
    if manifest["recipe_sha256"] != recipe_sha256(name, recipes):
        found.append(f"The recipe of {name} changed after its weights were made. {AGAIN}")
    known, actual = manifest["files"], _weights_sha256(weights / name)
    found += [f"{name}/{file} is missing. {AGAIN}" for file in sorted(known.keys() - actual.keys())]
    found += [
        f"{name}/{file} was altered after it was made, or does not belong to the model. {AGAIN}"
        for file in sorted(actual.keys())
        if known.get(file) != actual[file]
    ]
    return found


def recipe_sha256(name: str, recipes: Path = RECIPES) -> str:
    """One hash over the names and contents of all files of a recipe."""
    digest = hashlib.sha256()
    for part in MADE_OF[name]:
        for path in [recipes / part] if (recipes / part).is_file() else _files(recipes / part):
            if path.suffix != ".pyc":
                digest.update(f"{path.relative_to(recipes).as_posix()} {_sha256(path)}\n".encode())
    return digest.hexdigest()


def write_manifest(name: str, weights: Path) -> None:
    """For the weights in the folder `weights`, just made."""
    manifest = {"recipe_sha256": recipe_sha256(name), "files": _weights_sha256(weights)}
    (weights / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _check(name: str) -> int:
    found = problems(name)
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
        importlib.import_module(f"demo_models.{name}.recipe").build(made)
        for path in _files(made):
            path.chmod(0o644)  # safetensors writes for its owner only
        write_manifest(name, made)
        shutil.rmtree(WEIGHTS / name, ignore_errors=True)
        made.rename(WEIGHTS / name)
    size = sum(path.stat().st_size for path in _files(WEIGHTS / name))
    _log.info("Wrote %s: %.2f MiB in %.0f seconds.", name, size / 2**20, time.monotonic() - started)
    _log.info("Now examine it: scripts/test tests/engine/demo")
    return 0


def _weights_sha256(weights: Path) -> dict[str, str]:
    """By their paths below the folder; a pipeline has folders of its own."""
    return {path.relative_to(weights).as_posix(): _sha256(path) for path in _files(weights) if path.name != MANIFEST}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
