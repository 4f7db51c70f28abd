r"""The progress of a batch: one record for each line that has an answer or an error, appended and synced in groups.

A journal is a folder of segments, one for each time that a process took the batch up. No process appends to a segment
of another, so a segment that a kill or a full disk cut off inside a record is read up to there. If two processes wrote
a record for one line, the first counts, in the order of segments.

A record: `<line> <o|e> <input> <output> <cached> <reasoning> <crc32> <JSON>\n`, tokens between kind and checksum.
"""

import asyncio
import logging
import os
import re
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self
from zlib import crc32

from engine.files import sync_folder
from server.batches.folder import Folder

_log = logging.getLogger("hearth.batches")
_HEAD = re.compile(rb"([0-9]{1,10}) ([oe]) ([0-9]{1,12}) ([0-9]{1,12}) ([0-9]{1,12}) ([0-9]{1,12}) ([0-9a-f]{8}) ")
_SEGMENT = re.compile(r"[0-9]{6}(-[0-9a-f]{8})?")  # a mark of the process where several might write one
_NOT_THERE = -1
_SYNC_SECONDS = 1.0
_WRITE_SECONDS = 0.1
_MOST_WAITING_BYTES = 16 * 2**20  # of records that the disk does not take
_RETRY_SECONDS = 5.0


@dataclass(slots=True)
class Tally:
    """Sums over the records."""

    completed: int = 0
    failed: int = 0
    tokens: list[int] = field(default_factory=lambda: [0, 0, 0, 0])

    def add(self, *, ok: bool, tokens: tuple[int, ...]) -> None:
        if ok:
            self.completed += 1
        else:
            self.failed += 1
        self.tokens = [sum(pair) for pair in zip(self.tokens, tokens, strict=True)]

    def usage(self) -> dict[str, int]:
        return dict(
            zip(("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens"), self.tokens, strict=True)
        )


def encode(line: int, data: bytes, *, ok: bool, tokens: tuple[int, ...] = (0, 0, 0, 0)) -> bytes:
    """Return the record of a line. `data` is JSON without a line's end in it."""
    kind = b"o" if ok else b"e"
    return b"%d %b %b %08x %b\n" % (line, kind, b" ".join(b"%d" % count for count in tokens), crc32(data), data)


class Index:
    """The place of each line's record. Reads segments; blocks."""

    def __init__(self, folder: Path, lines: int) -> None:
        self._folder = folder
        self._segments: list[str] = []
        self._segment = array("i", [_NOT_THERE]) * (lines + 1)
        self._offset = array("q", [0]) * (lines + 1)
        self._open: dict[int, BinaryIO] = {}
        self.tally = Tally()
        with suppress(FileNotFoundError):
            for name in sorted(entry.name for entry in os.scandir(folder) if _SEGMENT.fullmatch(entry.name)):
                self._read(name)

    @property
    def next_segment(self) -> str:
        return f"{int(self._segments[-1][:6]) + 1 if self._segments else 0:06d}"

    def has(self, line: int) -> bool:
        return line < len(self._segment) and self._segment[line] != _NOT_THERE

    def record(self, line: int) -> tuple[bool, bytes] | None:
        """Return whether a line has an answer, and its JSON; None: it has no record."""
        if not self.has(line):
            return None
        number = self._segment[line]
        if number not in self._open:
            self._open[number] = (self._folder / self._segments[number]).open("rb", 2**16)
        file = self._open[number]
        file.seek(self._offset[line])
        head = _HEAD.match(text := file.readline())
        if head is None:
            raise OSError(f"the journal {self._folder.name} has changed while it was read")
        return head[2] == b"o", text[head.end() : -1]

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _read(self, name: str) -> None:
        """Take in a segment, up to the first record that is not whole."""
        number, offset = len(self._segments), 0
        self._segments.append(name)
        with (self._folder / name).open("rb", 2**20) as file:
            for text in file:
                head = _HEAD.match(text)
                if head is None or not text.endswith(b"\n") or crc32(text[head.end() : -1]) != int(head[7], 16):
                    return
                line = int(head[1])
                if line < len(self._segment) and not self.has(line):
                    self._segment[line], self._offset[line] = number, offset
                    tokens = tuple(int(head[group]) for group in (3, 4, 5, 6))
                    self.tally.add(ok=head[2] == b"o", tokens=tokens)
                offset += len(text)


class Journal:
    """Appends records to a segment of its own. Use as `async with`; at its end all of them are synced.

    Records are written within 0.1 s, and synced once a second. While the disk is full they wait, and `room` with them.
    """

    _writer: asyncio.Task[None]

    def __init__(self, folder: Folder, batch: str, segment: str) -> None:
        self._folder = folder
        self._path = folder.journal(batch)
        self._number = int(segment)
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._came = asyncio.Event()
        self._written = asyncio.Event()
        self._fd: int | None = None
        self._closing = False

    def append(self, record: bytes) -> None:
        """Write it soon. Never waits or fails."""
        self._waiting.append(record)
        self._waiting_bytes += len(record)
        self._came.set()

    async def room(self) -> None:
        """Wait until what is not written yet fits in memory."""
        while self._waiting_bytes > _MOST_WAITING_BYTES:
            self._written.clear()
            await self._written.wait()

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._write_all())
        return self

    async def __aexit__(self, *error: object) -> None:
        """Wait until everything is on disk; if it cannot be written now, only after a block without an error."""
        self._closing = True
        self._came.set()
        try:
            if error[0] is None:
                await self._writer
            else:
                await asyncio.wait({self._writer}, timeout=_RETRY_SECONDS)
        finally:
            self._writer.cancel()
            await asyncio.wait({self._writer})
            await self._folder.run(self._close_now)

    async def _write_all(self) -> None:
        now = asyncio.get_running_loop().time
        unsynced: list[bytes] = []
        synced_at = now()
        while self._waiting or unsynced or not self._closing:
            if not self._waiting and not unsynced:
                await self._came.wait()
            self._came.clear()
            if not self._closing:
                await asyncio.sleep(_WRITE_SECONDS)  # what comes meanwhile is written with it
            records, self._waiting = self._waiting, []
            unsynced += records
            sync = self._closing or now() - synced_at >= _SYNC_SECONDS
            try:
                await self._folder.run(self._write_now, b"".join(records), sync)
            except OSError as failure:
                _log.warning("The progress of a batch cannot be written, and waits: %s.", failure.strerror)
                self._waiting[:0] = unsynced
                unsynced = []
                self._number += 1  # a reader stops at a partial record
                await self._folder.run(self._close_now)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if sync:
                synced_at = now()
                self._waiting_bytes -= sum(map(len, unsynced))
                unsynced = []
                self._written.set()

    def _write_now(self, data: bytes, sync: bool) -> None:  # noqa: FBT001  # called on a thread, by position
        segment = self._path / f"{self._number:06d}"
        if self._fd is None:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(segment, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            sync_folder(self._path)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        if sync:
            os.fsync(self._fd)
            self._folder.synced_now(self._path.name, segment)
            if os.fstat(self._fd).st_size > self._folder.most_segment_bytes:
                self._close_now()
                self._number += 1

    def _close_now(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
