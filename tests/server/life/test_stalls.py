"""Engines and workers that are stopped or die again and again, and models that cannot be served at all. Real signals."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from chat_parts import assert_error
from key_clients import client_with
from serving import Server, async_poll_until, poll_until
from small_models import VOICE_ENTRY, models_yaml
from speech_parts import HELLO_EMMA, LONGEST, SPEECH, VOICE_MODEL, seconds, spoken

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHAT_THAT_STALLS = """\
  service-plus:
    task: chat
    tier: standard
    capabilities: [chat, streaming]
    weights: service-plus
    demo: chat
    engine: {stall_seconds: 4, kv_cache_gib: 0.0625}
"""
YAML = models_yaml(CHAT_THAT_STALLS, VOICE_ENTRY + "    engine: {stall_seconds: 4}\n")
NOT_THERE = """\
    task: chat
    tier: standard
    capabilities: [chat]
    weights: not-there
"""
CHAT_MODEL, CHAT = "service-plus", "/v1/chat/completions"
LONG: dict[str, Any] = {
    "model": CHAT_MODEL,
    "messages": [{"role": "user", "content": "Count from 1 to 100."}],
    "temperature": 0,
    "max_tokens": 1900,
    "ignore_eos": True,
}
ENGINE, WORKER = "EngineCore", "engine.backends.tts.service:open_service"
BACK_SECONDS = 240


def server_of(folder: Path, text: str) -> Server:
    (folder / "models.yaml").write_text(text)
    return Server(folder, environment={"HEARTH_MODELS": str(folder / "models.yaml")})


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = server_of(tmp_path_factory.mktemp("guarded"), YAML)
    try:
        server.start()
        stop_the_engine_while_it_loads(server)
        server.wait_until_ready(BACK_SECONDS)
        yield server
        assert server.stop() == 0, server.log()
    finally:
        server.kill()


def stop_the_engine_while_it_loads(server: Server) -> None:
    """The first of all engines: it never comes further than this."""
    poll_until(lambda: bool(processes(server, ENGINE)), 120, describe=server.log)
    os.kill(processes(server, ENGINE)[0].pid, signal.SIGSTOP)


@pytest.fixture
async def admin(guarded: Server) -> AsyncIterator[httpx2.AsyncClient]:
    assert guarded.admin_key is not None
    async with client_with(guarded, guarded.admin_key.text) as client:
        yield client


def processes(server: Server, name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server.pid).children(recursive=True):
        try:
            if name in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def state(server: Server, model: str) -> dict[str, Any]:
    answer = httpx2.get(f"{server.root_url}/health/ready", timeout=60).json()
    return dict(answer["models"][model])


async def until_back(server: Server, model: str, restarts: int) -> None:
    def back() -> bool:
        now = state(server, model)
        return bool(now["status"] == "ready" and now["restarts"] == restarts)

    await async_poll_until(back, BACK_SECONDS, describe=server.log)


async def test_an_engine_that_was_stopped_while_it_loaded_was_started_anew(guarded: Server, admin: httpx2.AsyncClient):
    assert f"{CHAT_MODEL}: its engine process does not respond and is killed: while it loads" in guarded.log()
    assert state(guarded, CHAT_MODEL)["restarts"] == 0
    assert (await admin.post(CHAT, json=LONG | {"max_tokens": 8})).status_code == 200


async def test_an_engine_that_is_stopped_in_an_answer_ends_it_and_is_started_anew(
    guarded: Server, admin: httpx2.AsyncClient
):
    (engine,) = processes(guarded, ENGINE)
    async with asyncio.timeout(240), admin.stream("POST", CHAT, json=LONG | {"stream": True}) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        await anext(lines)
        engine.suspend()
        rest = [line async for line in lines if line]
    assert '"code":"engine_unavailable"' in rest[-1]
    assert "stopped by a signal" in guarded.log()
    await until_back(guarded, CHAT_MODEL, 1)
    assert (await admin.post(CHAT, json=LONG | {"max_tokens": 8})).status_code == 200
    assert state(guarded, VOICE_MODEL)["restarts"] == 0


async def test_an_engine_that_was_stopped_with_nothing_to_do_keeps_nobody_waiting(
    guarded: Server, admin: httpx2.AsyncClient
):
    (engine,) = processes(guarded, ENGINE)
    engine.suspend()
    async with asyncio.timeout(240):
        assert_error(await admin.post(CHAT, json=LONG), 503, "engine_unavailable")
    await until_back(guarded, CHAT_MODEL, 2)


async def test_a_worker_that_is_stopped_in_its_work_ends_it_and_is_started_anew(
    guarded: Server, admin: httpx2.AsyncClient
):
    (worker,) = processes(guarded, WORKER)
    body = HELLO_EMMA | {"input": LONGEST, "speed": 0.25, "stream_format": "sse"}
    async with asyncio.timeout(240), admin.stream("POST", SPEECH, json=body) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        await anext(lines)
        worker.suspend()
        rest = [line async for line in lines if line]
    assert "engine_unavailable" in rest[-1]
    await until_back(guarded, VOICE_MODEL, 1)
    assert seconds(await spoken(admin), "mp3") > 0.3


@pytest.mark.rounds
async def test_a_model_that_dies_again_and_again_is_left_alone_until_somebody_reloads_it(
    guarded: Server, admin: httpx2.AsyncClient
):
    before = state(guarded, VOICE_MODEL)["restarts"]
    for deaths in range(1, 6):
        await until_back(guarded, VOICE_MODEL, before + deaths - 1)
        for worker in processes(guarded, WORKER):
            worker.kill()
        await async_poll_until(lambda: state(guarded, VOICE_MODEL)["status"] != "ready", 60, describe=guarded.log)
        if state(guarded, VOICE_MODEL)["status"] == "failed":  # the worker of the test before counts, if it was quick
            break
    else:
        pytest.fail(str(state(guarded, VOICE_MODEL)))
    assert deaths >= 4
    assert "5 times in a row" in state(guarded, VOICE_MODEL)["reason"]
    refused = await admin.post(SPEECH, json=HELLO_EMMA)
    assert_error(refused, 503, "engine_unavailable")
    assert "failed 5 times in a row" in refused.json()["error"]["message"]
    assert 500 < int(refused.headers["retry-after"]) <= 600
    assert (await admin.post(CHAT, json=LONG | {"max_tokens": 8})).status_code == 200
    guarded.hearth("reload")
    await async_poll_until(guarded.is_ready, BACK_SECONDS, describe=guarded.log)
    assert seconds(await spoken(admin), "mp3") > 0.3


def test_a_server_none_of_whose_models_can_be_served_ends_and_says_so(tmp_path: Path):
    tier = "tiers:\n  standard: {models: [standard]}\n"
    server = server_of(tmp_path, f"models:\n  one:\n{NOT_THERE}  two:\n{NOT_THERE}{tier}")
    try:
        server.start()
        assert server.wait() == os.EX_UNAVAILABLE
    finally:
        server.kill()
    assert "no folder 'not-there'" in server.log()
    assert "None of the models can be served" in server.log()
