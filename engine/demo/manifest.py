"""Ties the weights of a demo model to the recipe that made them: manifest.json holds the SHA-256 of both.

Reads files only. Making weights is the recipes' business, and when to make them is build.py's.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "manifest.json"
BUILDS_ON = "builds-on.txt"
"""In a recipe's folder: the recipes beside it, one a line, whose parts it uses."""


def recipe_sha256(recipe: Path) -> str:
    """One hash over the names and contents of all files of a recipe folder, and over the recipes it builds on."""
    digest = hashlib.sha256()
    others = recipe / BUILDS_ON
    for name in others.read_text(encoding="utf-8").split() if others.is_file() else []:
        digest.update(f"{name} {recipe_sha256(recipe.parent / name)}\n".encode())
    for path in sorted(recipe.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"{path.relative_to(recipe).as_posix()} {_sha256(path)}\n".encode())
    return digest.hexdigest()


def write_manifest(recipe: Path, weights: Path) -> None:
    manifest = {"recipe_sha256": recipe_sha256(recipe), "files": _files(weights)}
    (weights / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def problems(recipe: Path, weights: Path) -> list[str]:
    """What does not fit together, in sentences; empty when the weights are the ones this recipe made."""
    again = "Run scripts/build-demo-models."
    path = weights / MANIFEST
    if not path.is_file():
        return [f"The demo model {weights.name} has no {MANIFEST}, so it was never built. {again}"]
    manifest = json.loads(path.read_text(encoding="utf-8"))
    found = []
    if manifest["recipe_sha256"] != recipe_sha256(recipe):
        found.append(f"The recipe of {weights.name} changed after its weights were made. {again}")
    actual = _files(weights)
    for name in sorted(manifest["files"].keys() | actual.keys()):
        if name not in actual:
            found.append(f"{weights.name}/{name} is missing. {again}")
        elif name not in manifest["files"]:
            found.append(f"{weights.name}/{name} does not belong to the model. Remove it, or: {again}")
        elif manifest["files"][name] != actual[name]:
            found.append(f"{weights.name}/{name} was altered after it was made. {again}")
    return found


def _files(weights: Path) -> dict[str, str]:
    """By their paths below the folder; a pipeline has folders of its own."""
    found = (path for path in sorted(weights.rglob("*")) if path.is_file() and path != weights / MANIFEST)
    return {path.relative_to(weights).as_posix(): _sha256(path) for path in found}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
