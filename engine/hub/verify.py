"""Reads a fetched folder from beginning to end and says what is no longer as it was."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from engine.hub.errors import WeightsError, disk_error
from engine.hub.manifest import MANIFEST, Manifest, ManifestFile, read_manifest, size_problem

if TYPE_CHECKING:
    from pathlib import Path

    from engine.hub.listing import Report

_CHUNK_BYTES = 2**20
# A stranger's file of such a kind would be loaded, or tried. Notes of the owner, like voices.yaml, are welcome.
_LOADED = (".safetensors", ".json", ".jinja", ".py", ".onnx", ".bin", ".pt", ".pth", ".ckpt", ".pkl")


def verify(folder: Path, report: Report = lambda _path, _done, _size: None) -> list[str]:
    """Return what is wrong, a sentence per file; nothing if all is well. Raises `WeightsError` without a manifest."""
    manifest = required_manifest(folder)
    try:
        found = [problem for file in manifest.files if (problem := _problem(folder, file, report)) is not None]
        return found + _strangers(folder, manifest)
    except OSError as error:
        raise disk_error(error, folder) from error


def required_manifest(folder: Path) -> Manifest:
    """Return the manifest. Raises `WeightsError` if there is none."""
    manifest = read_manifest(folder)
    if manifest is None:
        there = "has no manifest, so it was not pulled by Hearth" if folder.is_dir() else "is not there"
        raise WeightsError(f"{folder.name} {there}. `hearth weights list` shows the folders.")
    return manifest


def _problem(folder: Path, file: ManifestFile, report: Report) -> str | None:
    report(file.path, 0, file.size_bytes)
    problem = size_problem(folder, file)
    if problem is not None:
        return problem
    digest, done = hashlib.sha256(), 0
    with (folder / file.path).open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report(file.path, done, file.size_bytes)
    return None if digest.hexdigest() == file.sha256 else f"{file.path} is damaged: its content has changed"


def _strangers(folder: Path, manifest: Manifest) -> list[str]:
    known = {file.path for file in manifest.files} | {MANIFEST}
    found = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(folder).as_posix() for path in found)
    return [f"{name} does not belong to the model" for name in names if name not in known and name.endswith(_LOADED)]
