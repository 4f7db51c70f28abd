"""Voices with their worker: the queue, a reader that does not read, dying. Real processes and the demo voices."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
import pytest_asyncio
from serving import async_poll_until

from engine import EngineDiedError, GenerationError, SpeechRequest
from engine.backends.tts.model import SpeechModel
from engine.config.models import SpeechEngineSpec, SpeechModelSpec
from engine.demo import weights_dir
from engine.stream import BoundedStream, SpeechStream
from engine.voices.catalogue import read_catalogue

pytestmark = pytest.mark.engine

LONG = "It speaks and speaks and has no end in sight. " * 20
VOICE = read_catalogue(None, weights_dir("voices")).find("emma")


@pytest_asyncio.fixture
async def model() -> AsyncIterator[SpeechModel]:
    """With one place, so that whoever holds it keeps others waiting."""
    engine = SpeechEngineSpec(max_parallel_requests=1)
    spec = SpeechModelSpec(id="v", tier="t", weights="v", task="speech", capabilities=("speech",), engine=engine)
    assert VOICE is not None
    it = await SpeechModel.load(spec, [VOICE], threads=1, mark=True, on_cpu=True, report=lambda *_: None)
    yield it
    await it.shutdown()


def request(text: str, owner: str = "a") -> SpeechRequest:
    return SpeechRequest(request_id="r", model="v", voice="emma", text=text, response_format="pcm", seed=1, owner=owner)


def speech(model: SpeechModel, asked: SpeechRequest) -> SpeechStream:
    stream = SpeechStream()
    model.speech(asked, VOICE, stream)
    return stream


async def spoken(model: SpeechModel, asked: SpeechRequest) -> bytes:
    assert VOICE is not None
    return b"".join([chunk.data async for chunk in speech(model, asked)])


async def test_who_does_not_read_keeps_nobody_waiting_and_loses_nothing(model: SpeechModel):
    assert VOICE is not None
    whole = await spoken(model, request(LONG))
    async with aclosing(speech(model, request(LONG))) as unread:
        first = await anext(unread)
        assert await spoken(model, request("Hello.", owner="b"))
        rest = [chunk.data async for chunk in unread]
    assert b"".join([first.data, *rest]) == whole


async def test_who_leaves_gives_the_place_back(model: SpeechModel):
    assert VOICE is not None
    async with aclosing(speech(model, request(LONG))) as left:
        await anext(left)
    assert (model.admission.running, model.admission.waiting) == (0, 0)


async def test_a_killed_worker_ends_what_is_spoken_and_what_waits(model: SpeechModel):
    os.kill(model.worker.pid, signal.SIGSTOP)  # none of them ends before
    texts = [asyncio.create_task(spoken(model, request(LONG, owner))) for owner in "ab"]
    await async_poll_until(lambda: bool(model.worker.jobs and model.admission.waiting), 60)
    os.kill(model.worker.pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*texts, return_exceptions=True)
    assert all(isinstance(outcome, EngineDiedError) for outcome in outcomes)


async def test_what_nobody_reads_is_given_up_at_a_bound():
    stream: BoundedStream[bytes] = BoundedStream(10, len)
    stream.put(b"12345678")
    assert await anext(stream) == b"12345678"
    stream.put(b"123456789")
    with pytest.raises(GenerationError, match="not read"):
        stream.put(b"12")
    stream.finish(GenerationError("over"))
    assert [await anext(stream) for _ in range(2)] == [b"123456789", b"12"]
    with pytest.raises(GenerationError, match="over"):
        await anext(stream)
