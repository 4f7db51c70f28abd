"""Cancels work whose client has left or whose server ends, so that no answer is made without a receiver.

`Drain` is the end of a server's life: take no more work, let what runs finish, then cut what is left.
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
    """What a request gets that the end of the server cuts off, or that comes too late."""
    sentence = "This server is shutting down. Try again in a few seconds."
    return overloaded(sentence, limit="shutting_down", Connection="close")


class CancelOnDisconnect:
    """`async with`: cancels what runs in the block when the client leaves or the drain expires, and waits for its end.

    It runs in the same task, without a step of the event loop between: under load each costs a token's time.
    The body must have been read. Raises `ClientDisconnectedError`, or the `ApiError` of a server that shuts down.
    """

    def __init__(self, scope: Scope) -> None:
        self._connection = Connection.of(scope)
        self._drain: Drain = scope["app"].state.drain
        self._task: asyncio.Task[Any] | None = None
        # Makes the error when it is raised: one that is kept would hold its frames, and they this block.
        self._reason: Callable[[], Exception] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None  # noqa: S101  # we are in a coroutine
        self._cancelling = self._task.cancelling()
        self._connection.watch(self._client_left)
        self._drain.watch(self._cut_off)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task, self._task = self._task, None  # an interruption that is on its way comes too late
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
    """Await `work` in such a block, and return what it returns."""
    async with CancelOnDisconnect(request.scope):
        return await work


@contextmanager
def cut_off_as_error(drain: "Drain") -> Iterator[None]:
    """Make the `ApiError` of a server that shuts down of a block's cancelling at the end of a drain."""
    try:
        yield
    except asyncio.CancelledError:
        if drain.is_cut:
            raise shutting_down() from None
        raise


async def client_disconnected(_: Request, __: Exception) -> Response:
    """Return what is recorded for a request whose client has left; it is not received."""
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
        """Take no more work, wait up to `seconds` for what runs, then make the rest stop."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            self.cut()
            with suppress(TimeoutError):  # a client that does not read must not hold us up
                await asyncio.wait_for(self._idle.wait(), _LAST_WRITES_SECONDS)

    def cut(self) -> None:
        """Make everything that runs stop now, with an error to its client."""
        self.draining = True
        self.is_cut = True
        for on_cut in tuple(self._on_cut):
            on_cut()

    def watch(self, on_cut: Callable[[], None]) -> None:
        """Have it called when what runs must stop; soon, if that is already so."""
        self._on_cut.add(on_cut)
        if self.is_cut:
            asyncio.get_running_loop().call_soon(on_cut)

    def forget(self, on_cut: Callable[[], None]) -> None:
        self._on_cut.discard(on_cut)
