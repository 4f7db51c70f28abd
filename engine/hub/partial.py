"""`.partial/<name>` below the weights directory: where a model is put together, by one process at a time.

`parts/` holds files on their way, `model/` only whole ones whose hash was right, `listing.json` what is being fetched.
The model's folder appears by one rename at the end, so what is half there is never loaded.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pydantic import ValidationError

from engine.hub.durable import sync_folder, sync_folders, write_durably
from engine.hub.errors import WeightsError
from engine.hub.listing import Digest, ListedFile, Listing
from engine.hub.manifest import ManifestFile, write_manifest
from engine.hub.paths import check_folder_name, is_there

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    from engine.hub.listing import Report, Source

FOLDER = ".partial"
_CHUNK_BYTES = 2**20


class Partial:
    """Made by `locked`. `OSError` passes through: the caller knows which disk it speaks of."""

    def __init__(self, weights_dir: Path, name: str) -> None:
        self.target = weights_dir / check_folder_name(name)
        self.root = weights_dir / FOLDER / name.replace("%", "%25").replace("/", "%2F")
        self.model = self.root / "model"
        self.parts = self.root / "parts"
        self._record = self.root / "listing.json"
        self._sha256: dict[str, str] = {}

    def recorded(self) -> Listing | None:
        """Return what an earlier process was fetching."""
        try:
            return Listing.model_validate_json(self._record.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def begin(self, listing: Listing) -> None:
        """From now on this is what is fetched: files of anything else are dropped."""
        before = self.recorded()
        same = set(listing.files) & set(before.files) if before else set()
        self.keep_only(same)
        self.model.mkdir(parents=True, exist_ok=True)
        self.parts.mkdir(exist_ok=True)
        write_durably(self._record, listing.model_dump_json().encode())

    def keep_only(self, files: Iterable[ListedFile]) -> None:
        """Drop every other file."""
        kept = {place / file.path for file in files for place in (self.model, self.parts)}
        for place in (self.model, self.parts):
            for path in place.rglob("*") if place.is_dir() else ():
                if (path.is_symlink() or not path.is_dir()) and path not in kept:
                    path.unlink()

    def missing_bytes(self, files: Iterable[ListedFile]) -> int:
        """Return how much is still to be fetched and written."""
        return sum(file.size_bytes - self._there(file) for file in files)

    def is_whole(self, file: ListedFile) -> bool:
        path = self.model / file.path
        return path.is_file() and path.stat().st_size == file.size_bytes

    def borrow(self, folder: Path, file: ListedFile, report: Report) -> None:
        """Take a file over from an older folder of the model, without a second copy, if it is the same."""
        path = folder / file.path
        if self.is_whole(file) or path.is_symlink() or not path.is_file() or path.stat().st_size != file.size_bytes:
            return
        digest = Digest(file)
        _hash(path, digest, lambda done: report(file.path, done, file.size_bytes))
        if digest.matches():
            self._place(file).unlink(missing_ok=True)
            self._place(file).hardlink_to(path)
            self._sha256[file.path] = digest.sha256

    def fetch(self, file: ListedFile, source: Source, report: Report) -> None:
        """Have the file whole in `model/`, going on with what is there. Raises `WeightsError`."""
        if self.is_whole(file):
            report(file.path, file.size_bytes, file.size_bytes)
            return
        # What an earlier process left may be damaged, by a power cut: then the file is fetched once more from zero.
        for _ in range(2):
            digest = self._fill(file, source, report)
            if digest.matches():
                self.parts.joinpath(file.path).replace(self._place(file))
                self._sha256[file.path] = digest.sha256
                return
            self.parts.joinpath(file.path).unlink()
        raise WeightsError(
            f"{file.path} arrived twice with another content than its hash says, and was thrown away. Something "
            "between here and the source changes files, or the source is damaged: use another network or HF_ENDPOINT."
        )

    def finish(self, listing: Listing, files: Collection[ListedFile]) -> None:
        """Write the manifest, last, and put the model in its place."""
        found = tuple(
            ManifestFile(path=file.path, size_bytes=file.size_bytes, sha256=self._sha256_of(file)) for file in files
        )
        self.keep_only(files)
        write_manifest(self.model, listing.manifest(found))
        sync_folders(self.model)
        old = self.root / "old"
        if old.exists():
            shutil.rmtree(old)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        if is_there(self.target):
            self.target.rename(old)
        self.model.rename(self.target)
        sync_folder(self.target.parent)

    def _fill(self, file: ListedFile, source: Source, report: Report) -> Digest:
        digest = Digest(file)
        path = self.parts / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > file.size_bytes:
            path.unlink()
        with path.open("ab", buffering=0) as part:
            _hash(path, digest, lambda _: None)
            done = part.tell()
            report(file.path, done, file.size_bytes)
            for chunk in source.read(file, done):
                _write(part.fileno(), chunk)
                digest.update(chunk)
                done += len(chunk)
                report(file.path, done, file.size_bytes)
            os.fsync(part.fileno())
        return digest

    def _there(self, file: ListedFile) -> int:
        if self.is_whole(file):
            return file.size_bytes
        part = self.parts / file.path
        return min(part.stat().st_size, file.size_bytes) if part.is_file() else 0

    def _place(self, file: ListedFile) -> Path:
        path = self.model / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _sha256_of(self, file: ListedFile) -> str:
        known = file.sha256 or self._sha256.get(file.path)
        if known is None:  # a small file, fetched by an earlier process
            digest = Digest(file)
            _hash(self.model / file.path, digest, lambda _: None)
            known = digest.sha256
        return known


@contextmanager
def locked(weights_dir: Path, name: str) -> Iterator[Partial]:
    """Work on one model's folder; nobody else does meanwhile. Raises `WeightsError`. Removed when nothing is left."""
    partial = Partial(weights_dir, name)
    while True:
        partial.root.mkdir(parents=True, exist_ok=True)
        with (partial.root / "lock").open("a", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise WeightsError(f"Another process works on {name} right now. Wait until it has ended.") from error
            if not _is_still(file.fileno(), partial.root / "lock"):
                continue  # the one before has just removed it
            try:
                yield partial
            finally:
                _tidy(partial)
            return


def _tidy(partial: Partial) -> None:
    """Nothing stays of a pull that came to its end, nor of one that never had a list of files."""
    if any(not path.is_dir() for place in (partial.model, partial.parts) for path in place.rglob("*")):
        return
    shutil.rmtree(partial.root, ignore_errors=True)
    if partial.root.parent.is_dir() and not any(partial.root.parent.iterdir()):
        partial.root.parent.rmdir()


def _is_still(number: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False


def _hash(path: Path, digest: Digest, report: Callable[[int], None]) -> None:
    with path.open("rb") as stream:
        done = 0
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report(done)


def _write(number: int, chunk: bytes) -> None:
    """A disk that is nearly full takes a part; the next write then says so."""
    view = memoryview(chunk)
    while view:
        view = view[os.write(number, view) :]
