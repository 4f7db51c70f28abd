"""What lies in the weights directory: fetched folders, folders of the owner's own, and what is half there."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine.hub.errors import WeightsError, disk_error
from engine.hub.manifest import MANIFEST, Manifest, is_complete, read_manifest
from engine.hub.partial import FOLDER, Partial, locked

if TYPE_CHECKING:
    from pathlib import Path

State = Literal["complete", "damaged", "own", "partial"]
_DEEPEST = 3
_MODEL_FILES = (".safetensors", ".onnx")


@dataclass(frozen=True, slots=True)
class Shelved:
    """One folder; `repository` and `revision` as far as they are known."""

    folder: str
    state: State
    size_bytes: int
    """On this disk."""
    repository: str | None = None
    revision: str | None = None
    subfolder: str = ""


def shelved(weights_dir: Path) -> list[Shelved]:
    """List the folders, by name. Raises `WeightsError`."""
    try:
        return sorted([*_folders(weights_dir), *_unfinished(weights_dir)], key=lambda one: (one.folder, one.state))
    except OSError as error:
        raise disk_error(error, weights_dir) from error


def remove(weights_dir: Path, folder: str) -> int:
    """Remove a folder and what is unfinished of it; returns the bytes freed. Raises `WeightsError`."""
    target = Partial(weights_dir, folder).target
    begun = Partial(weights_dir, folder).root
    if not target.is_symlink() and not target.exists() and not begun.exists():
        raise WeightsError(f"There is no folder {folder}. `hearth weights list` shows the folders.")
    try:
        size = _size(begun) + (0 if target.is_symlink() else _size(target))
        with locked(weights_dir, folder) as partial:
            if partial.target.is_symlink():
                partial.target.unlink()
            elif partial.target.exists():
                # One rename, so that nothing half removed is ever loaded.
                gone = partial.root / "gone"
                shutil.rmtree(gone, ignore_errors=True)
                partial.target.rename(gone)
            for unfinished in (partial.model, partial.parts):
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, weights_dir) from error
    return size


def _folders(weights_dir: Path) -> list[Shelved]:
    found = []
    for inside, folders, files in os.walk(weights_dir):
        place = weights_dir / os.path.relpath(inside, weights_dir)
        name = place.relative_to(weights_dir).as_posix()
        deep = len(place.relative_to(weights_dir).parts) >= _DEEPEST
        is_model = name != "." and (
            any(file == MANIFEST or file.endswith(_MODEL_FILES) or file == "config.json" for file in files)
            or "model_index.json" in files
        )
        if is_model:
            found.append(_one(place, name))
        else:
            # Links are the owner's own, and are not walked into: what lies there may be anything.
            links = [one for one in folders if (place / one).is_symlink() and not one.startswith(".")]
            found += [Shelved((place / one).relative_to(weights_dir).as_posix(), "own", 0) for one in links]
        folders[:] = [] if is_model or deep else sorted(one for one in folders if not one.startswith("."))
    return found


def _one(place: Path, name: str) -> Shelved:
    try:
        manifest: Manifest | None = read_manifest(place)
    except WeightsError:
        return Shelved(name, "damaged", _size(place))
    if manifest is None:
        return Shelved(name, "own", _size(place))
    state: State = "complete" if is_complete(place) else "damaged"
    return Shelved(name, state, _size(place), manifest.repository, manifest.revision, manifest.subfolder)


def _unfinished(weights_dir: Path) -> list[Shelved]:
    root = weights_dir / FOLDER
    found = []
    for place in sorted(root.iterdir()) if root.is_dir() else ():
        name = place.name.replace("%2F", "/").replace("%25", "%")
        try:
            listing = Partial(weights_dir, name).recorded()
        except WeightsError:
            continue
        known = (listing.repository, listing.revision, listing.subfolder) if listing else (None, None, "")
        found.append(Shelved(name, "partial", _size(place), *known))
    return found


def _size(place: Path) -> int:
    """Bytes of the files below, each counted once."""
    return sum(path.lstat().st_size for path in place.rglob("*") if not path.is_dir() or path.is_symlink())
