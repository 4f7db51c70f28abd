"""Carries model folders to a host without internet: copied file by file, hashed on the way, renamed at the end."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from engine.hub import selection
from engine.hub.errors import WeightsError, disk_error
from engine.hub.listing import ListedFile, Listing
from engine.hub.manifest import MANIFEST, Manifest, is_complete, read_manifest
from engine.hub.partial import locked
from engine.hub.paths import check_folder_name, is_there
from engine.hub.pull import Pull, Wanted, check_room
from engine.hub.verify import required_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine.hub.listing import Report
    from engine.hub.patience import Patience

_CHUNK_BYTES = 2**20
_DEEPEST = 3


class FolderSource:
    """The files of a folder that may come from anywhere: no link is followed, nothing but plain files is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, file: ListedFile, start: int) -> Iterator[bytes]:
        """As `Source.read`."""
        with os.fdopen(self._open(file), "rb") as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise WeightsError(f"{self._folder.name}/{file.path} is no plain file. Copy the folder again.")
            if found.st_size != file.size_bytes:
                raise WeightsError(
                    f"{self._folder.name}/{file.path} has {found.st_size} bytes instead of {file.size_bytes}: it did "
                    "not arrive whole. Copy the folder again."
                )
            stream.seek(start)
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk

    def _open(self, file: ListedFile) -> int:
        """Step by step from the folder, so that a link in between is noticed as well."""
        *folders, name = file.path.split("/")
        place = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in folders:
                inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
                os.close(place)
                place = inner
            # A pipe would wait for its writer.
            return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
        except OSError as error:
            raise WeightsError(
                f"{self._folder.name}/{file.path} is missing, is a link, or cannot be read ({error.strerror}). Copy "
                "the folder again; links are never followed."
            ) from error
        finally:
            os.close(place)


def found_below(folder: Path) -> dict[str, Path]:
    """Return the model folders in a directory, by their names below it; under "" if it is one itself."""
    if (folder / MANIFEST).exists():
        return {"": folder}
    if not folder.is_dir():
        raise WeightsError(f"{folder} is not there, or is no folder.")
    found: dict[str, Path] = {}
    for inside, folders, files in os.walk(folder):
        place = folder / os.path.relpath(inside, folder)
        name = place.relative_to(folder).as_posix()
        if MANIFEST in files:
            found[name] = place
        deep = len(place.relative_to(folder).parts) >= _DEEPEST
        folders[:] = [] if MANIFEST in files or deep else sorted(one for one in folders if not one.startswith("."))
    if not found:
        raise WeightsError(
            f"{folder} holds no model with a {MANIFEST}. Name the folder that `hearth weights export` wrote."
        )
    return found


def carry(source: Path, root: Path, name: str, report: Report, patience: Patience) -> tuple[Manifest, bool]:
    """Copy a verified folder to `root`/`name`; False if it was there already. Raises `WeightsError` or `LoadError`."""
    manifest = _trustworthy(source)
    target = root / check_folder_name(name)
    if is_there(target):
        if read_manifest(target) == manifest and is_complete(target):
            return manifest, False
        raise WeightsError(f"{target} is there already and is not the same. Remove it first, or use another name.")
    listing = Listing.of(manifest)
    wanted = Wanted(manifest.repository, name, manifest.revision, manifest.subfolder, patience=patience)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root, name) as partial:
            partial.begin(listing)
            work = Pull(wanted, listing, listing.files, partial, FolderSource(source))
            check_room(root, [work])
            return work.run(report), True
    except OSError as error:
        raise disk_error(error, root) from error


def _trustworthy(source: Path) -> Manifest:
    """A manifest may have been written by anybody: it can only name what a pull would have fetched."""
    manifest = required_manifest(source)
    for file in manifest.files:
        if not selection.may_be_carried(file.path):
            raise WeightsError(
                f"{source.name} lists {file.path}, which is neither weights in safetensors nor text that belongs to a "
                "model: other kinds of files can run code and are refused."
            )
    return manifest
