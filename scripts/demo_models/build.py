"""Trains the demo models again and replaces their weights: `scripts/build-demo-models [NAME ...]`.

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
from pathlib import Path
from typing import Any

from engine.demo import WEIGHTS

RECIPES = Path(__file__).parent
# The files and folders beside this one that decide what a model becomes.
MADE_OF = {
    "chat": ("training.py", "chat"),
    "embedding": ("training.py", "chat/corpus.py", "chat/corpus.yaml", "chat/english.txt", "embedding"),
    "image": ("training.py", "vision/pictures.py", "image"),
    "rerank": ("training.py", "chat/corpus.py", "chat/corpus.yaml", "chat/english.txt", "embedding", "rerank"),
    "transcription": ("training.py", "transcription"),
    "vision": ("training.py", "chat", "vision"),
    "voices": ("training.py", "voices"),
}
MANIFEST = "manifest.json"

_log = logging.getLogger(__name__)


def main() -> None:
    """Build the models named on the command line, all of them by default."""
    parser = argparse.ArgumentParser(prog="scripts/build-demo-models", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", choices=[*MADE_OF, "all"], default="all", help="default: all")
    names = parser.parse_args().names
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    for name in MADE_OF if "all" in names else names:
        _build(name)
    _log.info("Now examine what was made: scripts/test tests/engine/demo")


def _build(name: str) -> None:
    _log.info("Building the demo model %s.", name)
    with tempfile.TemporaryDirectory(dir=WEIGHTS, prefix=f".{name}-") as folder:
        made = Path(folder) / name
        made.mkdir()
        importlib.import_module(f"demo_models.{name}.recipe").build(made)
        for path in _files(made):
            path.chmod(0o644)  # safetensors writes for its owner only
        text = json.dumps(manifest(name, RECIPES, made), indent=2)
        (made / MANIFEST).write_text(text + "\n", encoding="utf-8")
        shutil.rmtree(WEIGHTS / name, ignore_errors=True)
        made.rename(WEIGHTS / name)


def manifest(name: str, recipes: Path, weights: Path) -> dict[str, Any]:
    """One hash over the names and contents of all files of a recipe, and one of each file of its weights."""
    recipe = [path for part in MADE_OF[name] for path in _files(recipes / part) if path.suffix != ".pyc"]
    named = "".join(f"{path.relative_to(recipes).as_posix()} {_sha256(path)}\n" for path in recipe)
    files = {path.relative_to(weights).as_posix(): _sha256(path) for path in _files(weights) if path.name != MANIFEST}
    return {"recipe_sha256": hashlib.sha256(named.encode()).hexdigest(), "files": files}


def _files(path: Path) -> list[Path]:
    """The file itself, or all below the folder."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
