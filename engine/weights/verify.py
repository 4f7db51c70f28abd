"""Reads a downloaded folder from beginning to end and says what is no longer as it was."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from engine.weights.errors import WeightsError, disk_error
from engine.weights.manifest import MANIFEST, ListedFile, Manifest, ManifestFile, read_manifest, size_problem

_CHUNK_BYTES = 2**20
# A stranger's file of such a kind would be loaded, or tried. Notes of the owner, like voices.yaml, are welcome.
_LOADED = (".safetensors", ".json", ".jinja", ".py", ".onnx", ".bin", ".pt", ".pth", ".ckpt", ".pkl")

Report = Callable[[str, int, int], None]
"""Told of a file: its path, how many bytes of it are there, and how many there will be."""


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
    digest = Digest(file)
    with (folder / file.path).open("rb") as stream:
        hash_stream(stream, digest, lambda done: report(file.path, done, file.size_bytes))
    return None if digest.matches() else f"{file.path} is damaged: its content has changed"


def _strangers(folder: Path, manifest: Manifest) -> list[str]:
    known = {file.path for file in manifest.files} | {MANIFEST}
    found = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(folder).as_posix() for path in found)
    return [f"{name} does not belong to the model" for name in names if name not in known and name.endswith(_LOADED)]


class Digest:
    """The hash of a file while it goes by, and whether it is the one that the file should have."""

    def __init__(self, file: ManifestFile | ListedFile) -> None:
        self._expected = file.sha256
        self._hash = hashlib.sha256()
        if file.sha256 is None:
            self._expected = file.git_sha1
            # Git hashes a header of its own first: "blob", the size in decimal, a zero byte.
            self._hash = hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
        self.update = self._hash.update

    def matches(self) -> bool:
        return self._hash.hexdigest() == self._expected


def hash_stream(stream: BinaryIO, digest: Digest, report: Callable[[int], None] = lambda _: None) -> None:
    """Hash the rest of a file. `report` is told how many bytes have been read."""
    done = 0
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
        done += len(chunk)
        report(done)
