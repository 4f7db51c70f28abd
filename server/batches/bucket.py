"""The folder of files and journals where they lie in a bucket: what is being worked on is copied to this machine.

Files are objects. A journal is one object for each of its segments, written again whole whenever it is synced: segments
are kept small. What is below `path` serves one process, and may be lost with it.
"""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from server.batches.folder import Folder, is_id
from server.store.objects import Bucket, Stored

_SEGMENT_BYTES = 2**20


class BucketFolder(Folder):
    """Like `Folder`, for all servers that use the same bucket. `path` is for copies, on a disk of this machine."""

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
