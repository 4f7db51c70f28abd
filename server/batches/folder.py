"""The folder of files and journals, on a disk or in a bucket: written whole or not at all, readable by our user only.

What no row names is deleted. A folder has a name of its own, its place, which the rows of its files have: a server
runs the batches of its place.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from anyio import CapacityLimiter, to_thread

from engine.files import sync_folder
from server.store.objects import Bucket, Stored

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_T = TypeVar("_T")
_THREADS = 4  # of their own: a slow disk holds up nothing else
_NAME = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_PIECE_BYTES = 256 * 2**10
_LOOK_EVERY_BYTES = 16 * 2**20  # at the free space, and sync: a sync of a GiB would hold up all others
_ORPHAN_SECONDS = 3600.0  # then what has no row is deleted; before, its row may be about to be written
_UPLOAD_SECONDS = 24 * 3600.0
_SEGMENT_BYTES = 2**20  # in a bucket, where each is written again whole


def is_id(text: str) -> bool:
    """Whether it has the form of our ids, and may be looked up in the database and on the disk."""
    return _NAME.fullmatch(text) is not None


class Folder:
    """Files and journals below `path`. Make it with `open`. What is named `..._now` blocks, and raises OSError.

    `kept_free_bytes` of the disk stay free: beyond that, writing fails as on a full disk. `shared`: other servers may
    use it at the same time.
    """

    most_segment_bytes = 2**62  # of a journal: it is appended to

    def __init__(self, path: Path, *, kept_free_bytes: int = 0, shared: bool = False) -> None:
        self.path = path
        self.shared = shared
        self.place = ""
        self._kept_free_bytes = kept_free_bytes
        self._threads = CapacityLimiter(_THREADS)

    async def open(self) -> None:
        """Make what is missing, and read the folder's name."""
        await self.run(self._open_now)

    async def run(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Do it on a thread of ours."""
        return await to_thread.run_sync(work, *arguments, limiter=self._threads)

    def file(self, id_: str) -> Path:
        """Return the path of the file with this id. Raises ValueError for what is not an id."""
        return self._below("files", id_)

    def journal(self, id_: str) -> Path:
        """Return the folder of a batch's journal. Raises ValueError for what is not an id."""
        return self._below("journals", id_)

    async def read(self, id_: str) -> AsyncIterator[bytes]:
        """Yield what is in a file, in pieces. Raises OSError."""
        file: BinaryIO = await self.run(lambda: self.file(id_).open("rb"))
        try:
            while piece := await self.run(file.read, _PIECE_BYTES):
                yield piece
        finally:
            file.close()

    async def delete(self, id_: str) -> None:
        """Delete a file or a batch's journal, if it is there. Does not fail."""
        with suppress(OSError):  # the next sweep tries again
            await self.run(self.delete_now, id_)

    def delete_now(self, id_: str) -> None:
        if id_.startswith("file-"):
            self.file(id_).unlink(missing_ok=True)
        else:
            shutil.rmtree(self.journal(id_))

    def input_now(self, batch: str, file: str) -> Path:  # noqa: ARG002  # a copy is this batch's own
        """Return where a file can be read for a batch, until `leave_now`."""
        return self.file(file)

    def journal_now(self, batch: str) -> Path:
        """Return where the segments of a batch's journal can be read."""
        return self.journal(batch)

    def leave_now(self, batch: str) -> None:
        """Another process may run the batch from now on."""

    def synced_now(self, batch: str, segment: Path) -> None:
        """Let other processes see a segment that has been synced."""

    def keep_now(self, part: Path, id_: str) -> None:
        """Give a synced file its name."""
        target = self.file(id_)
        part.replace(target)
        sync_folder(target.parent)

    def has_room(self, more_bytes: int) -> bool:
        """Whether `more_bytes` may be written. Blocks, for microseconds on a local disk."""
        return shutil.disk_usage(self.path).free - more_bytes >= self._kept_free_bytes

    def writer_now(self) -> "FileWriter":
        return FileWriter(self, self.path / "uploads" / secrets.token_hex(16))

    def old_now(self) -> list[str]:
        """Delete uploads that were broken off; return the ids of what is older than an hour."""
        for path in self._older_now("uploads", time.time() - _UPLOAD_SECONDS):
            path.unlink(missing_ok=True)
        return self._lasting_now(time.time() - _ORPHAN_SECONDS)

    def _lasting_now(self, before: float) -> list[str]:
        """Return the ids of files and journals that were written before a moment."""
        paths = (path for kind in ("files", "journals") for path in self._older_now(kind, before))
        return [path.name for path in paths if is_id(path.name)]

    def _older_now(self, kind: str, before: float) -> Iterator[Path]:
        for path in (self.path / kind).iterdir():
            with suppress(FileNotFoundError):
                if path.lstat().st_mtime < before:
                    yield path

    def _below(self, kind: str, id_: str) -> Path:
        if not is_id(id_):
            raise ValueError("this is not an id of this server")
        return self.path / kind / id_

    def _open_now(self) -> None:
        for kind in ("", "files", "uploads", "journals"):
            (self.path / kind).mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.shared:
            self.path.chmod(0o700)
            for left in (self.path / "uploads").iterdir():  # by a process that was killed
                left.unlink(missing_ok=True)
        named = self.path / "place"
        with suppress(FileExistsError):  # of several servers, the first names it
            fresh = self.path / f"place.{secrets.token_hex(8)}"
            fresh.write_text(secrets.token_hex(16), encoding="ascii")
            try:
                named.hardlink_to(fresh)
            finally:
                fresh.unlink()
        self.place = named.read_text(encoding="ascii")[:64]


class FileWriter:
    """A file that is not there yet: it comes with `commit_now`, whole and on disk, or goes with `discard_now`."""

    def __init__(self, folder: Folder, part: Path) -> None:
        self._folder = folder
        self._part = part
        self._file: BinaryIO = os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", 2**20)
        self._looked_at = -_LOOK_EVERY_BYTES
        self.bytes = 0

    def write_now(self, data: bytes) -> None:
        if self.bytes - self._looked_at >= _LOOK_EVERY_BYTES:
            self._looked_at = self.bytes
            os.fdatasync(self._file.fileno())
            if not self._folder.has_room(_LOOK_EVERY_BYTES):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._file.write(data)
        self.bytes += len(data)

    def close_now(self) -> Path:
        """End writing, and return the path, valid until `discard_now`: for what needs no name."""
        self._file.close()
        return self._part

    def commit_now(self, id_: str) -> None:
        """Give it its name. After an error it is gone."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._folder.keep_now(self._part, id_)
        except BaseException:
            self.discard_now()
            raise

    def discard_now(self) -> None:
        with suppress(OSError):  # what is left in the buffer has no room either
            self._file.close()
        with suppress(OSError):
            self._part.unlink(missing_ok=True)


class BucketFolder(Folder):
    """Like `Folder`, for all servers that use the same bucket. What is being worked on is copied to this machine.

    Files are objects. A journal is one object for each of its segments, written again whole whenever it is synced:
    segments are kept small. What is below `path` serves one process, and may be lost with it.
    """

    most_segment_bytes = _SEGMENT_BYTES

    def __init__(self, path: Path, bucket: Bucket, *, kept_free_bytes: int = 0) -> None:
        super().__init__(path, kept_free_bytes=kept_free_bytes, shared=True)
        self.bucket = bucket
        self._mark = secrets.token_hex(4)  # of segments: two processes never write the same object

    async def read(self, id_: str) -> AsyncIterator[bytes]:
        self.file(id_)
        pieces = self.bucket.pieces(f"files/{id_}")
        while (piece := await self.run(next, pieces, b"")) != b"":
            yield piece

    def delete_now(self, id_: str) -> None:
        if id_.startswith("file-"):
            self.bucket.delete(f"files/{self.file(id_).name}")
            return
        self.bucket.delete(*(one.name for one in self.bucket.list(f"journals/{self.journal(id_).name}")))
        self.leave_now(id_)

    def input_now(self, batch: str, file: str) -> Path:
        copy = self.journal(batch) / "input"
        if not copy.exists():
            self._copy_now(f"files/{self.file(file).name}", copy)
        return copy

    def journal_now(self, batch: str) -> Path:
        """Copy its segments anew: what only this machine has was not synced."""
        journal = self.journal(batch)
        journal.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in journal.iterdir():
            if old.name != "input":
                old.unlink()
        for one in self.bucket.list(f"journals/{batch}"):
            self._copy_now(one.name, journal / one.name.rpartition("/")[2])
        return journal

    def leave_now(self, batch: str) -> None:
        shutil.rmtree(self.journal(batch), ignore_errors=True)

    def synced_now(self, batch: str, segment: Path) -> None:
        self.bucket.put_file(f"journals/{self.journal(batch).name}/{segment.name}-{self._mark}", segment)

    def keep_now(self, part: Path, id_: str) -> None:
        self.bucket.put_file(f"files/{self.file(id_).name}", part)
        part.unlink()

    def _open_now(self) -> None:
        if self.path.exists():
            shutil.rmtree(self.path)
        for kind in ("", "uploads", "journals"):
            (self.path / kind).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.place = hashlib.sha256(self.bucket.url.encode()).hexdigest()[:32]

    def _lasting_now(self, before: float) -> list[str]:
        files = [one.name.removeprefix("files/") for one in self.bucket.list("files") if one.modified < before]
        newest: dict[str, Stored] = {}
        for one in self.bucket.list("journals"):
            batch = one.name.split("/")[1]
            newest[batch] = max(one, newest.get(batch, one), key=lambda stored: stored.modified)
        journals = [batch for batch, one in newest.items() if one.modified < before]
        return [id_ for id_ in (*files, *journals) if is_id(id_)]

    def _copy_now(self, name: str, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        if not self.has_room(self.bucket.size(name)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            self.bucket.get_file(name, part)
            part.replace(path)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
