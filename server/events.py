"""One streamed answer from the engine's steps to bytes, whatever the convention: its encoder says what they look like.

Also fills the request's record on the way. The HTTP answer around the bytes is sse.py's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from engine import ChatStep, Usage
    from server.access_log import RequestRecord


class AtOnce:
    """Takes steps from the engine to the connection at the moment at which they are made.

    To wake the request's task for each token, through all the layers around it, costs as much as the rest of a token.
    What cannot be written so is left to the task: the first step, the last, and all while the client reads too slowly.
    """

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self.encoder: Encoder | None = None
        self.write: Callable[[bytes], bool] | None = None  # from when on the answer has begun

    def on_step(self, step: ChatStep) -> bool:
        """Write a step of an encoder that keeps no state; False: it has to be yielded. See `ChatRequest.on_step`."""
        if self.write is None or self.encoder is None:
            return False
        data = self.encoder.step(step)
        if data and not self.write(data):
            return False
        self._record.used(step.usage)
        return True


class Encoder(Protocol):
    """Makes the events of one answer; each call returns all that is to be written at once, perhaps nothing."""

    def step(self, step: ChatStep) -> bytes:
        """Return what one engine step brought."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return what closes a complete answer."""
        ...


async def events_of(
    steps: AsyncGenerator[ChatStep, None],
    encoder: Encoder,
    record: RequestRecord,
    *,
    head: bytes = b"",
    naming: AbstractContextManager[object] | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of one answer, `head` together with the first token.

    Errors pass through `naming`, which gives fields the names that the client sent. Closing it closes `steps`.
    """
    step = None
    try:
        with naming or nullcontext():
            async for step in steps:
                record.first_token()
                record.used(step.usage)
                data = head + encoder.step(step)
                head = b""
                for delta in step.deltas:
                    record.finish_reason = delta.finish_reason or record.finish_reason
                if data:
                    yield data
    finally:
        await steps.aclose()
    if step is not None:
        yield encoder.end(step.usage)
