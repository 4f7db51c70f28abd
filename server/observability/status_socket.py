"""A socket in the data directory, for its owner alone: it answers each connection with the server's status.

No key is needed for what the directory's owner may know anyway, and it answers also while HTTP is closed to new work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from server.observability.status import Status
from server.terminal import HEARTH

FILE = "status.sock"
_MOST_BYTES = 2**24

_log = logging.getLogger("hearth.status")


class StatusError(Exception):
    """A server runs and does not answer; the message says what to do."""


class StatusSocket:
    """The server's end. `open` makes it; its caller closes it."""

    def __init__(self, path: Path, read: Callable[[], Awaitable[Status]]) -> None:
        self._path = path
        self._read = read
        self._server: asyncio.AbstractServer | None = None

    @classmethod
    async def open(cls, data_dir: Path, read: Callable[[], Awaitable[Status]]) -> Self:
        """Listen. A file system without sockets costs a log line: the server is there for others."""
        opened = cls(data_dir / FILE, read)
        try:
            opened._server = await asyncio.start_unix_server(opened._answer, sock=_bound(data_dir))
        except OSError as error:
            _log.warning("`hearth status` will get no answer: %s cannot be made (%s).", opened._path, error.strerror)
        return opened

    async def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):  # it did not wait
                writer.write((await self._read()).model_dump_json().encode())
                await writer.drain()
        finally:
            writer.close()


def ask(data_dir: Path, seconds: float) -> Status | None:
    """Return how the server of this directory stands, None if none listens there. Blocks.

    Raises `StatusError` when one is there and does not answer, or may not be asked.
    """
    try:
        with _near(data_dir) as address, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect(address)
            with connection.makefile("rb") as stream:
                said = stream.read(_MOST_BYTES)
        return Status.model_validate_json(said)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        return None
    except TimeoutError as error:
        raise StatusError(
            f"The server of {data_dir} has not answered for {seconds:.0f} s: its event loop does not move, or it is "
            "stopped. Its log may say why; restart it if it stays so."
        ) from error
    except PermissionError as error:
        raise StatusError(
            f"The data directory {data_dir} is not yours. Run this as the user that runs the server, like: "
            f"sudo -u hearth {HEARTH} ..."
        ) from error
    except (OSError, ValidationError) as error:
        raise StatusError(
            f"The server of {data_dir} says something else than expected. It is ending, or of another release: run "
            "the `hearth` that belongs to it, or restart it."
        ) from error


def _bound(data_dir: Path) -> socket.socket:
    (data_dir / FILE).unlink(missing_ok=True)  # of a server that was killed: we hold the directory's lock
    listener = socket.socket(socket.AF_UNIX)
    try:
        with _near(data_dir) as address:
            listener.bind(address)
        (data_dir / FILE).chmod(0o600)  # before it listens, so that no other user ever gets in
        listener.listen(16)
        listener.settimeout(0)
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _near(data_dir: Path) -> Iterator[str]:
    """Name the socket by way of an open directory: an address has room for 107 bytes, a path may be longer."""
    folder = os.open(data_dir, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{FILE}"
    finally:
        os.close(folder)
