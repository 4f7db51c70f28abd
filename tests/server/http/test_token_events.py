"""Each step of an answer is encoded once, whether it is written at once or left to the request's task."""

import asyncio
import time

from engine.stream import TokenStream
from engine.types import ChatDelta, ChatStep, Usage
from server.http.streaming import TokenEvents
from server.observability.access_log import RequestRecord

WORDS = ("one ", "two ", "three ", "four ", "five ")


class Numbered:
    """An encoder that keeps state."""

    def __init__(self) -> None:
        self.steps = 0

    def start(self) -> bytes:
        return b""

    def step(self, step: ChatStep) -> bytes:
        self.steps += 1
        return b"%d:%b" % (self.steps, step.deltas[0].content.encode())

    def end(self, usage: Usage) -> bytes:
        return b"end %d" % usage.completion_tokens


class Slow:
    """A connection that is full now and then."""

    def __init__(self) -> None:
        self.full = False
        self.written: list[bytes] = []

    def can_write(self) -> bool:
        return not self.full

    def write_at_once(self, data: bytes) -> None:
        self.written.append(data)


async def test_an_encoder_that_keeps_state_sees_each_step_once_however_slowly_the_client_reads():
    stream, encoder, body = TokenStream(), Numbered(), Slow()

    async def opened() -> TokenStream:
        return stream

    record = RequestRecord("r", "POST", None, started=time.monotonic())
    events = TokenEvents(opened, encoder, record)
    sent: list[bytes] = []

    async def read() -> None:
        async for data in events:
            sent.append(data)
            events.body = body  # type: ignore[assignment]

    reader = asyncio.create_task(read())
    for number, word in enumerate(WORDS, 1):
        body.full = number % 2 == 0
        for _ in range(5):
            await asyncio.sleep(0)
        stream.put(ChatStep((ChatDelta(0, word),), Usage(1, number)))
    for _ in range(5):
        await asyncio.sleep(0)
    stream.finish()
    await reader
    assert encoder.steps == len(WORDS)
    texts = {int(data.split(b":")[0]): data.split(b":")[1].decode() for data in [*body.written, *sent[:-1]]}
    assert [texts[number] for number in sorted(texts)] == list(WORDS)
    assert body.written
    assert sent[-1] == b"end 5"
