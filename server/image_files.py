"""Generated images as files, from the event loop: stored under random names, read, discarded, swept now and then.

Blocks nothing: the work is image_folder.py's, on threads. Who may open a file is image_links.py's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from server.errors import ApiError
from server.side_tasks import SideTasks

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from engine import ImageFormat
    from server.image_folder import ImageFolder

_T = TypeVar("_T")
_log = logging.getLogger("hearth.images")

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_THREADS = 4  # of their own: a slow disk holds up nothing else


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A file and when it goes, in Unix seconds."""

    name: str
    expires_at: int


class ImageFiles:
    """The images in one folder. Use as `async with`, on one event loop.

    The folder is swept at the start, every `sweep_every_seconds`, and after a write that makes it too large.
    """

    def __init__(self, folder: ImageFolder, *, sweep_every_seconds: float = 600) -> None:
        self._folder = folder
        self._sweep_every_seconds = sweep_every_seconds
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="image-files")
        self._sweeping = asyncio.Lock()
        self._bytes = 0
        self._written_bytes = 0  # since the start
        self._timer: asyncio.Task[None] | None = None
        self._tasks = SideTasks()

    async def __aenter__(self) -> Self:
        await self._run(self._folder.open)
        await self.sweep()
        self._timer = asyncio.create_task(self._sweep_now_and_then())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish what has begun, and stop. The files stay."""
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.wait((self._timer,))
        await self._tasks.finish()
        self._executor.shutdown(wait=False)

    async def save(self, data: bytes, output_format: ImageFormat) -> StoredImage:
        """Store one image. Raises `ApiError` 507 when the disk is full; nothing is left of it then.

        A caller that is cancelled leaves nothing behind either.
        """
        name = f"{secrets.token_hex(16)}.{output_format}"
        expires_at = int(self._folder.clock() + self._folder.retention_seconds)
        writing = self._tasks.start(self._run(partial(self._folder.write, name, data)))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(lambda _: self.discard(name))
            raise
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            _log.error("an image could not be stored: no space is left for %s", self._folder.path)
            raise _no_space() from error
        self._bytes += len(data)
        self._written_bytes += len(data)
        if self._bytes > self._folder.max_bytes and not self._sweeping.locked():
            self._tasks.start(self.sweep())
        return StoredImage(name, expires_at)

    async def read(self, name: str) -> bytes | None:
        """Return the file's bytes; None if there is no such file of ours."""
        return await self._run(partial(self._folder.read, name))

    def discard(self, *names: str) -> None:
        """Delete files of an answer that nobody got. Does not wait or fail."""
        for name in names:
            self._tasks.start(self._run(partial(self._folder.delete, name)))

    async def sweep(self) -> None:
        """Delete what is too old or too much; where that fails it is tried again later."""
        async with self._sweeping:
            while True:
                before = self._written_bytes
                try:
                    kept = await self._run(self._folder.sweep)
                except OSError as error:
                    _log.warning("old images in %s could not be deleted: %s", self._folder.path, error.strerror)
                    return
                self._bytes = kept + self._written_bytes - before  # what came meanwhile may count twice, but never not
                if self._bytes <= self._folder.max_bytes:
                    return  # else nobody has started a sweep for what came

    async def _sweep_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_every_seconds)
            await self.sweep()

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _no_space() -> ApiError:
    return ApiError(
        507,
        "insufficient_storage",
        "The image was made but cannot be stored: the server's disk is full. Ask for `response_format` `b64_json`,"
        " which stores nothing, or tell whoever runs this server.",
        type="server_error",
        headers={"x-should-retry": "false"},  # the official clients would have it made again, for nothing
    )
