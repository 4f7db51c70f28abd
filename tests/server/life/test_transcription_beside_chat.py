"""Ten minutes of sound beside a chat: memory hardly grows, and who asks hardly waits longer for the first token."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import psutil
import pytest
from chat_parts import HELLO
from demo_models.transcription.sentences import fixed_sentences
from serving import Server
from small_models import CHAT_ENTRY, VOICE_ENTRY, models_yaml
from sound_parts import heard, needs_espeak, one_after_another, spoken, wav

pytestmark = [pytest.mark.engine, pytest.mark.rounds, needs_espeak]

_log = logging.getLogger(__name__)
TRANSCRIPTION_ENTRY = """\
  service-transcription:
    task: transcription
    tier: standard
    capabilities: [transcription]
    weights: service-transcription
    demo: transcription
"""
ASKED = 60
PAUSE = 2  # seconds: the demo reads one sentence at a time, and a pause of more than 1.5 s ends a piece


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "models.yaml").write_text(
        models_yaml(CHAT_ENTRY, f"{VOICE_ENTRY}    espeak: true\n", TRANSCRIPTION_ENTRY)
    )
    with Server(tmp_path, environment={"HEARTH_MODELS": str(tmp_path / "models.yaml")}) as started:
        yield started


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Authorization": f"Bearer {server.make_key('one', tier='standard').text}"}
    async with httpx2.AsyncClient(base_url=server.root_url, headers=headers, timeout=300) as opened:
        yield opened


@contextmanager
def watched(pid: int) -> Iterator[dict[str, int]]:
    """Give the bytes that the server and its processes hold at first and at most, shared ones counted once."""
    ended, held = threading.Event(), {"first": _held(pid), "most": 0}

    def look() -> None:
        while not ended.wait(0.1):
            held["most"] = max(held["most"], _held(pid))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield held
    finally:
        ended.set()
        watcher.join()


def _held(pid: int) -> int:
    held = 0
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # a decoder that has ended
            held += process.memory_full_info().pss
    return held


async def first_token_p95(http: httpx2.AsyncClient) -> float:
    body, took = {"model": "service-plus", "messages": HELLO, "max_tokens": 8, "stream": True}, []
    for _ in range(ASKED):
        began = time.monotonic()
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if '"content":"' in line and '"content":""' not in line:
                    took.append(time.monotonic() - began)
                    break
    return sorted(took)[int(0.95 * ASKED)]


async def test_ten_minutes_of_sound_take_little_memory_and_a_chat_goes_on(server: Server, http: httpx2.AsyncClient):
    sentences = fixed_sentences()[:8]
    said = [await spoken(http, one) for one in sentences]
    once = one_after_another(said, PAUSE)
    times = int(600 * 16_000 / len(once)) + 1
    sound = wav(one_after_another(said * times, PAUSE)[: 600 * 16_000])
    await heard(http, wav(once))  # warm
    await first_token_p95(http)
    alone = await first_token_p95(http)

    with watched(server.pid) as held:
        answer = await heard(http, sound)
    starts = [segment["start"] for segment in answer["segments"]]
    _log.info("+%d MiB, %d segments", (held["most"] - held["first"]) // 2**20, len(starts))
    assert answer["duration"] == pytest.approx(600, abs=1)
    assert starts == sorted(starts)
    assert answer["segments"][-1]["end"] <= 601
    assert answer["text"].startswith(" ".join(sentences))
    assert held["most"] - held["first"] < 150 * 2**20

    at_work = asyncio.create_task(heard(http, sound))
    beside = await first_token_p95(http)
    _log.info("p95: alone %.1f, beside %.1f ms, ended %s", alone * 1000, beside * 1000, at_work.done())
    assert (await at_work)["text"] == answer["text"]
    assert beside <= max(2 * alone, alone + 0.05)
