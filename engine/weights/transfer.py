"""Model folders on this machine and between machines: listing, removing, and carrying them to another host.

A folder is copied file by file, hashed meanwhile, and renamed into its place at the end, as after a download.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import WeightsError
from engine.weights import manifest
from engine.weights.download import FOLDER, Part, Pull, check_room, locked
from engine.weights.safety import check_folder_name, is_there, may_be_carried

State = Literal["complete", "damaged", "own", "partial"]
_DESCRIPTIONS = (manifest.MANIFEST, "config.json", "model_index.json")
_MODEL_FILES = (".safetensors", ".onnx")


def copy_rest(folder: Path, part: Part) -> None:
    """Write what a part lacks, from a folder of unknown origin: no link is followed, only plain files are read."""
    file = part.file
    with os.fdopen(_open(folder, file.path), "rb") as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise WeightsError(f"{folder.name}/{file.path} is not a regular file. Copy the folder again.")
        if found.st_size != file.size_bytes:
            raise WeightsError(
                f"{folder.name}/{file.path} has {found.st_size} bytes instead of {file.size_bytes}: it did not arrive "
                "whole. Copy the folder again."
            )
        stream.seek(part.done)
        while chunk := stream.read(2**20):
            part.write(chunk)


def _open(folder: Path, path: str) -> int:
    """Open a file step by step from the folder, so that links in between are noticed too."""
    *folders, name = path.split("/")
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for inner_name in folders:
            inner = os.open(inner_name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
            os.close(place)
            place = inner
        # Without this, a pipe would wait for its writer.
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    except OSError as error:
        raise WeightsError(
            f"{folder.name}/{path} is missing, is a link, or cannot be read ({error.strerror}). Copy the folder again; "
            "links are never followed."
        ) from error
    finally:
        os.close(place)


def found_below(folder: Path) -> dict[str, Path]:
    """Return the model folders in a directory, by their names below it; under "" if it is one itself."""
    if (folder / manifest.MANIFEST).exists():
        return {"": folder}
    if not folder.is_dir():
        raise WeightsError(f"{folder} does not exist, or is not a folder.")
    there = local_folders(folder)
    found = {one.folder: folder / one.folder for one in there if one.state in {"complete", "damaged"}}
    if not found:
        raise WeightsError(
            f"{folder} has no model with a {manifest.MANIFEST}. Name the folder that `hearth weights export` wrote; a "
            "folder of your own is copied into the weights directory with cp -r."
        )
    return found


def carry(source: Path, root: Path, name: str, report: manifest.Report) -> tuple[manifest.Manifest, bool]:
    """Copy a verified folder to `root`/`name`; False if it was there already. Raises `WeightsError` or `LoadError`."""
    listed = manifest.required_manifest(source)
    # Anybody may have written the manifest: it may only name what a pull would have fetched.
    other = next((file.path for file in listed.files if not may_be_carried(file.path)), None)
    if other is not None:
        raise WeightsError(
            f"{source.name} lists {other}, which is neither weights in safetensors nor text that belongs to a model: "
            "other kinds of files can run code and are refused."
        )
    target = root / check_folder_name(name)
    if is_there(target):
        if manifest.read_manifest(target) == listed and manifest.is_complete(target):
            return listed, False
        raise WeightsError(f"{target} exists already and is different. Remove it first, or use another name.")
    listing = manifest.Listing(**listed.origin(), files=listed.files)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root, name) as pull:
            pull.begin(listing, lambda part: copy_rest(source, part))
            check_room(root, [pull])
            return pull.run(report), True
    except OSError as error:
        raise manifest.disk_error(error, root) from error


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """One folder; `repository` and `revision` if known."""

    folder: str
    state: State
    size_bytes: int
    """On this disk."""
    repository: str | None = None
    revision: str | None = None
    subfolder: str = ""


def local_folders(weights_dir: Path) -> list[LocalFolder]:
    """List the folders, by name. Raises `WeightsError`."""
    try:
        return sorted([*_folders(weights_dir), *_unfinished(weights_dir)], key=lambda one: (one.folder, one.state))
    except OSError as error:
        raise manifest.disk_error(error, weights_dir) from error


def remove(weights_dir: Path, folder: str) -> int:
    """Remove a folder and its unfinished download; returns the bytes freed. Raises `WeightsError`."""
    begun = Pull(weights_dir, folder)
    if not os.path.lexists(begun.target) and not begun.root.exists():
        raise WeightsError(f"There is no folder {folder}. `hearth weights list` shows the folders.")
    try:
        size = _size(begun.root) + (0 if begun.target.is_symlink() else _size(begun.target))
        with locked(weights_dir, folder) as pull:
            if pull.target.is_symlink():
                pull.target.unlink()
            elif pull.target.exists():
                # One rename, so that a partly removed folder is never loaded.
                shutil.rmtree(pull.root / "gone", ignore_errors=True)
                pull.target.rename(pull.root / "gone")
            shutil.rmtree(pull.model, ignore_errors=True)
            shutil.rmtree(pull.parts, ignore_errors=True)
    except OSError as error:
        raise manifest.disk_error(error, weights_dir) from error
    return size


def _folders(weights_dir: Path) -> Iterator[LocalFolder]:
    for inside, folders, files in os.walk(weights_dir):
        place = Path(inside)
        name = place.relative_to(weights_dir).as_posix()
        if name != "." and any(file in _DESCRIPTIONS or file.endswith(_MODEL_FILES) for file in files):
            yield _one(place, name)
            folders.clear()
            continue
        for one in [one for one in folders if not one.startswith(".") and (place / one).is_symlink()]:
            # Links are the owner's own, and are not followed: anything may be there.
            yield LocalFolder((place / one).relative_to(weights_dir).as_posix(), "own", 0)
        deep = len(place.relative_to(weights_dir).parts) >= 3
        folders[:] = [] if deep else [one for one in folders if not one.startswith(".")]


def _one(place: Path, name: str) -> LocalFolder:
    try:
        found = manifest.read_manifest(place)
    except WeightsError:
        return LocalFolder(name, "damaged", _size(place))
    if found is None:
        return LocalFolder(name, "own", _size(place))
    state: State = "complete" if manifest.is_complete(place) else "damaged"
    return LocalFolder(name, state, _size(place), **found.origin())


def _unfinished(weights_dir: Path) -> Iterator[LocalFolder]:
    root = weights_dir / FOLDER
    for place in root.iterdir() if root.is_dir() else ():
        name = place.name.replace("%2F", "/").replace("%25", "%")
        with contextlib.suppress(WeightsError):
            listing = Pull(weights_dir, name).recorded()
            yield LocalFolder(name, "partial", _size(place), **(listing.origin() if listing else {}))


def _size(place: Path) -> int:
    return sum(path.lstat().st_size for path in place.rglob("*") if not path.is_dir() or path.is_symlink())
