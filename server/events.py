"""One streamed answer from the engine's steps to bytes, whatever the convention: its encoder says what they look like.

Also fills the request's record on the way. The HTTP answer around the bytes is sse.py's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from engine import ChatStep, Usage
    from server.access_log import RequestRecord


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
                data = head + encoder.step(step)
                head = b""
                for delta in step.deltas:
                    record.finish_reason = delta.finish_reason or record.finish_reason
                if data:
                    yield data
    finally:
        if step is not None:
            record.used(step.usage)
        await steps.aclose()
    if step is not None:
        yield encoder.end(step.usage)
