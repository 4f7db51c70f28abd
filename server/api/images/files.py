"""Generated images as files under random names, and signed links to them: who has one needs no key.

Files are written whole or not at all, on threads, and deleted by age and total size. Nothing else is known of a link:
no row, no session.
"""

import asyncio
import base64
import hmac
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar
from urllib.parse import urlencode

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request

from engine import ImageFormat
from engine.files import write_atomically
from server.batches.folder import NO_SPACE
from server.errors import ApiError, storage_failed
from server.settings import Settings
from server.store.database import SideTasks
from server.store.objects import Bucket

_T = TypeVar("_T")
_log = logging.getLogger("hearth.images")
_THREADS = 4  # of their own: a slow disk holds up nothing else
_PART = ".part"
_PART_SECONDS = 3600.0
_NAME = re.compile(r"[0-9a-f]{32}\.(png|jpeg|webp)")
_KEY_FILE = "image-links.key"
_KEY_BYTES = 32
_MOMENT = re.compile(r"[0-9]{1,12}")
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")
_SWEEP_EVERY_SECONDS = 600.0
_SWEEP_TO = 15 / 16  # of the bytes allowed: what is left after a sweep, so that not every new file needs one


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A file and when it goes, in Unix seconds."""

    name: str
    expires_at: int


@dataclass(eq=False)
class ImageFiles:
    """The images in one folder, for one server, or `shared` by several. Use as `async with`, on one event loop.

    The folder is swept at the start, every `sweep_every_seconds`, and when it may be too large. Files of other names
    are left alone. What is named `..._now` blocks, and raises OSError.
    """

    path: Path
    retention_seconds: float
    max_bytes: int
    shared: bool = False
    sweep_every_seconds: float = _SWEEP_EVERY_SECONDS
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._threads = CapacityLimiter(_THREADS)
        self._sweeping = asyncio.Lock()
        self._bytes = 0
        self._timer, self._tasks = SideTasks(), SideTasks()

    async def __aenter__(self) -> Self:
        await self._run(self._open_now)
        await self.sweep()
        self._timer.every(self.sweep_every_seconds, self.sweep)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Finish what has begun, and stop. The files stay."""
        await self._timer.cancel()
        await self._tasks.finish()

    async def save(self, data: bytes, output_format: ImageFormat) -> StoredImage:
        """Store one image. Raises `ApiError` 507 when the disk is full; nothing is left of it then.

        A caller that is cancelled leaves nothing behind either.
        """
        name = f"{secrets.token_hex(16)}.{output_format}"
        expires_at = int(self.clock() + self.retention_seconds)
        writing = self._tasks.start(self._run(self._write_now, name, data))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(lambda _: self.discard(name))
            raise
        except OSError as error:
            if error.errno not in NO_SPACE:
                self._refuse(error)
            _log.error("an image could not be stored: no space is left for %s", self.path)
            raise ApiError(
                507,
                "insufficient_storage",
                "The image was made but cannot be stored: the server's disk is full. Ask for `response_format` "
                "`b64_json`, which stores nothing, or tell your administrator.",
                headers={"x-should-retry": "false"},  # the official clients would have it made again, for nothing
            ) from error
        self._bytes += len(data)
        if self._bytes > self.max_bytes and not self._sweeping.locked():
            self._tasks.start(self.sweep())
        return StoredImage(name, expires_at)

    async def read(self, name: str) -> bytes | None:
        """Return the file's bytes; None if there is no such file of ours."""
        try:
            return await self._run(self._read_now, name) if _NAME.fullmatch(name) else None
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(error)

    def _refuse(self, error: OSError) -> NoReturn:
        if self.shared:
            raise storage_failed() from error
        raise error

    def discard(self, *names: str) -> None:
        """Delete files of an answer that was not received. Does not wait or fail."""
        for name in names:
            self._tasks.start(self._run(self._delete_now, name))

    async def sweep(self) -> None:
        """Delete what is too old or too much; where that fails it is tried again later."""
        async with self._sweeping:
            while True:
                before, self._bytes = self._bytes, 0
                try:
                    kept = await self._run(self._sweep_now)
                except OSError as error:
                    self._bytes += before
                    _log.warning("old images in %s could not be deleted: %s", self.path, error.strerror)
                    return
                self._bytes += kept  # files stored meanwhile may count twice, but never not at all
                if self._bytes <= self.max_bytes:
                    return  # else sweep again: a file that was stored meanwhile started none

    async def _run(self, work: Callable[..., _T], *arguments: Any) -> _T:
        return await to_thread.run_sync(work, *arguments, limiter=self._threads)

    def _open_now(self) -> None:
        """Make the folder, for our user only, and delete what a killed process had partly written."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)
        newest = self.clock() - _PART_SECONDS if self.shared else math.inf  # others' unfinished files are younger
        for file in self.path.glob(f"*{_PART}"):
            with suppress(FileNotFoundError):
                if _NAME.fullmatch(file.name.removeprefix(".").removesuffix(_PART)) and file.stat().st_mtime <= newest:
                    file.unlink()

    def _write_now(self, name: str, data: bytes) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # the whole folder may have been deleted
        write_atomically(self.path / name, data, private=True)

    def _read_now(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def _delete_now(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def _sweep_now(self) -> int:
        """Delete what is too old, then the oldest as long as there is too much. Returns the bytes that are left."""
        files = sorted(self._stored())
        kept = sum(size for _, size, _ in files)
        target = self.max_bytes * _SWEEP_TO if kept > self.max_bytes else self.max_bytes
        oldest = self.clock() - self.retention_seconds
        for modified, size, name in files:
            if modified > oldest and kept <= target:
                break
            self._delete_now(name)
            kept -= size
        return kept

    def _stored(self) -> Iterator[tuple[float, int, str]]:
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        found = entry.stat()
                        yield found.st_mtime, found.st_size, entry.name


@dataclass(eq=False, kw_only=True)
class BucketImages(ImageFiles):
    """The same in a bucket that servers share; `path` is the folder of their names there."""

    bucket: Bucket

    def _open_now(self) -> None:
        """Leave it as it is: an object is there whole or not at all."""

    def _write_now(self, name: str, data: bytes) -> None:
        self.bucket.put(f"{self.path}/{name}", data)

    def _read_now(self, name: str) -> bytes:
        return self.bucket.get(f"{self.path}/{name}")

    def _delete_now(self, name: str) -> None:
        self.bucket.delete(f"{self.path}/{name}")

    def _stored(self) -> Iterator[tuple[float, int, str]]:
        for found in self.bucket.list(str(self.path)):
            if _NAME.fullmatch(name := found.name.rpartition("/")[2]):
                yield found.modified, found.bytes, name


@dataclass(frozen=True)
class ImageLinks:
    """Makes and checks links; every process with the same key makes and takes the same ones."""

    key: bytes = field(repr=False)
    _clock: Callable[[], float] = time.time

    @classmethod
    def open(cls, data_dir: Path) -> Self:
        """Use the key of the data directory, which one server has at a time; made once. Blocks. Raises OSError."""
        file = data_dir / _KEY_FILE
        with suppress(FileNotFoundError):
            if len(key := file.read_bytes()) == _KEY_BYTES:
                return cls(key)
        key = secrets.token_bytes(_KEY_BYTES)
        # A damaged one signs nothing; the links that it may have signed are lost.
        write_atomically(file, key, private=True)
        return cls(key)

    def path(self, name: str, expires_at: int) -> str:
        """Return the address of a file below the base address; `expires_at` in Unix seconds."""
        query = urlencode({"expires": expires_at, "signature": self._signature(name, str(expires_at))})
        return f"/images/files/{name}?{query}"

    def seconds_left(self, name: str, expires: str, signature: str) -> int | None:
        """How long this link still opens the file `name`; None if it does not, whatever the reason."""
        right = hmac.compare_digest(self._signature(name, expires).encode(), signature.encode("utf-8", "replace"))
        if not right or not _MOMENT.fullmatch(expires):
            return None
        seconds = int(expires) - self._clock()
        return int(seconds) if seconds > 0 else None

    def _signature(self, name: str, expires: str) -> str:
        signed = hmac.digest(self.key, f"{name}\n{expires}".encode("utf-8", "replace"), "sha256")
        return base64.urlsafe_b64encode(signed).rstrip(b"=").decode()


def public_base_url(request: Request, settings: Settings) -> str:
    """Return the base address, with `/v1`, under which this client can reach us.

    Without the setting it is the one that the client itself has called: no other client is ever shown it.
    """
    if settings.public_base_url is not None:
        return settings.public_base_url
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        name, port = request.scope["server"]
        host = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    return f"{request.scope['scheme']}://{host}{request.scope.get('root_path', '')}/v1"
