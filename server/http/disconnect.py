"""Cancels work when its client has left or the server ends, so that no answer is made without a receiver.

`Drain` ends a server: it takes no new requests, lets the running ones finish, then cuts off what is left.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from server.errors import ApiError, overloaded
from server.http.protocol import Connection

_T = TypeVar("_T")
_LAST_WRITES_SECONDS = 2.0


class ClientDisconnectedError(Exception):
    """The client has left. The access log says 499."""


def shutting_down() -> ApiError:
    """Return the 503 for a request that comes during a drain, or is cut off at its end."""
    sentence = "This server is shutting down. Try again in a few seconds."
    return overloaded(sentence, limit="shutting_down", Connection="close")


class CancelOnDisconnect:
    """`async with`: cancels the block when the client leaves or the drain expires.

    The block runs in the same task: under load, each further step of the event loop costs as much as a token.
    The body must have been read. Raises `ClientDisconnectedError`, or the `ApiError` of a server that shuts down.
    """

    def __init__(self, scope: Scope) -> None:
        self._connection = Connection.of(scope)
        self._drain: Drain = scope["app"].state.drain
        self._task: asyncio.Task[Any] | None = None
        # The error is made when it is raised: a kept one would keep its frames, and thereby this block, in memory.
        self._reason: Callable[[], Exception] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None  # noqa: S101  # we are in a coroutine
        self._cancelling = self._task.cancelling()
        self._connection.watch(self._client_left)
        self._drain.watch(self._cut_off)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task, self._task = self._task, None  # later interruptions have no effect
        self._connection.watch(None)
        self._drain.forget(self._cut_off)
        if self._reason is None or task is None or task.uncancel() > self._cancelling:
            return
        if kind is asyncio.CancelledError:
            raise self._reason() from None

    def _client_left(self) -> None:
        self._interrupt(ClientDisconnectedError)

    def _cut_off(self) -> None:
        self._interrupt(shutting_down)

    def _interrupt(self, reason: Callable[[], Exception]) -> None:
        if self._task is not None and self._reason is None:
            self._reason = reason
            self._task.cancel()


async def until_disconnect(work: Coroutine[Any, Any, _T], request: Request) -> _T:
    """Await `work` in a `CancelOnDisconnect` block, and return its result."""
    async with CancelOnDisconnect(request.scope):
        return await work


@contextmanager
def cut_off_as_error(drain: "Drain") -> Iterator[None]:
    """Raise the `ApiError` of a server that shuts down if the end of a drain has cancelled the block."""
    try:
        yield
    except asyncio.CancelledError:
        if drain.is_cut:
            raise shutting_down() from None
        raise


async def client_disconnected(_: Request, __: Exception) -> Response:
    """Return the 499 that is recorded for a request whose client has left. Nobody receives it."""
    return Response(status_code=499)


class Drain:
    """Counts running requests and says when they must stop. Belongs to one event loop."""

    def __init__(self) -> None:
        self.draining = False
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_cut = False
        self._on_cut: set[Callable[[], None]] = set()

    @contextmanager
    def request(self) -> Iterator[None]:
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if self.running == 0:
                self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Take no new requests, wait up to `seconds` for the running ones, then `cut` the rest."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            self.cut()
            with suppress(TimeoutError):  # a client that does not read must not delay the end
                await asyncio.wait_for(self._idle.wait(), _LAST_WRITES_SECONDS)

    def cut(self) -> None:
        """End all running requests now, with an error to their clients."""
        self.draining = True
        self.is_cut = True
        for on_cut in tuple(self._on_cut):
            on_cut()

    def watch(self, on_cut: Callable[[], None]) -> None:
        """Call `on_cut` at the cut; in the next step of the event loop, if that has been."""
        self._on_cut.add(on_cut)
        if self.is_cut:
            asyncio.get_running_loop().call_soon(on_cut)

    def forget(self, on_cut: Callable[[], None]) -> None:
        self._on_cut.discard(on_cut)
