"""Three models and memory for two of them: real processes take turns, and every request is answered.

HEARTH_TEST_TURNS_SECONDS is how long the mixed load lasts.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from chat_parts import CHAT, HELLO
from image_parts import GENERATE, SMALL
from key_clients import client_with
from serving import Server, async_poll_until
from small_models import IMAGE_ENTRY, models_yaml
from standstill import standstill

if TYPE_CHECKING:
    import httpx2

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

_SECONDS = float(os.environ.get("HEARTH_TEST_TURNS_SECONDS", "20"))
_SWAP_EVERY_SECONDS = 10.0
_MODELS = ("service-plus", "service-pro", "service-image")
YAML = models_yaml(
    """\
  service-plus: {task: chat, tier: standard, capabilities: [chat, streaming], weights: service-plus, demo: chat}
  service-pro:
    task: chat
    tier: standard
    capabilities: [chat, streaming, vision]
    weights: service-pro
    demo: vision
    engine: {stall_seconds: 240}
""",
    IMAGE_ENTRY,
)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on which two of the three demos fit: each counts 0.75 GiB."""
    folder: Path = tmp_path_factory.mktemp("turns")
    (folder / "models.yaml").write_text(YAML)
    running = Server(folder, environment={"HEARTH_MODELS": str(folder / "models.yaml"), "HEARTH_RAM_GIB": "1.6"})
    try:
        running.start()
        running.wait_until_ready(250)
        yield running
        assert running.stop() == 0, running.log()
    finally:
        running.kill()


@pytest.fixture
async def client(crowded: Server) -> AsyncIterator[httpx2.AsyncClient]:
    assert crowded.admin_key is not None
    async with client_with(crowded, crowded.admin_key.text) as client:
        yield client


async def states(client: httpx2.AsyncClient) -> dict[str, str]:
    models = (await client.get("/health/ready")).json()["models"]
    return {name: model["status"] for name, model in models.items()}


async def ask(client: httpx2.AsyncClient, model: str) -> httpx2.Response:
    if model == "service-image":
        return await client.post(GENERATE, json=SMALL | {"response_format": "b64_json"})
    return await client.post(CHAT, json={"model": model, "messages": HELLO, "max_tokens": 8, "temperature": 0})


def model_processes(server: Server) -> list[psutil.Process]:
    """Engines and workers, without what starts them."""
    found = []
    for process in psutil.Process(server.pid).children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "EngineCore" in line or "engine.process.child" in line:
            found.append(process)
    return found


async def test_at_the_start_two_are_loaded_and_the_server_is_ready(client: httpx2.AsyncClient):
    assert list((await states(client)).values()) == ["ready", "ready", "unloaded"]
    assert (await client.get("/health/ready")).status_code == 200


@pytest.mark.rounds
async def test_mixed_load_of_four_clients_is_answered_without_thrash_and_never_over_budget(
    crowded: Server, client: httpx2.AsyncClient
):
    ends = time.monotonic() + _SECONDS
    answers: list[tuple[str, int]] = []
    most_loaded = most_processes = 0

    async def one_client(number: int) -> None:
        turn = number
        while time.monotonic() < ends:
            model = _MODELS[turn % 3] if number else "service-plus"  # the first never wants anything else
            turn += 1
            answers.append((model, (await ask(client, model)).status_code))

    async def watch() -> None:
        nonlocal most_loaded, most_processes
        while True:
            now = await states(client)
            most_loaded = max(most_loaded, sum(state in {"loading", "ready"} for state in now.values()))
            most_processes = max(most_processes, len(await asyncio.to_thread(model_processes, crowded)))

    began = time.monotonic()
    watching = asyncio.create_task(watch())
    await asyncio.gather(*(one_client(number) for number in range(4)))
    watching.cancel()
    lasted = time.monotonic() - began
    swaps = crowded.log().count(" is evicted")
    said = {model: sum(asked == model for asked, _ in answers) for model in _MODELS}
    print(  # noqa: T201  # the numbers of a long run are worth seeing
        f"{lasted:.0f} s, {said}, {swaps} swaps, at most {most_loaded} loaded, {most_processes} processes"
    )
    assert {status for _, status in answers} == {200}
    assert all(said.values())
    assert 1 <= swaps <= lasted / _SWAP_EVERY_SECONDS + 1
    assert (most_loaded, most_processes) == (2, 2)


async def test_a_stream_that_runs_is_never_cut_by_a_turn(crowded: Server, client: httpx2.AsyncClient):
    """The first model stays; the others take turns."""
    await ask(client, "service-pro")
    loaded_by, evictions = time.monotonic(), crowded.log().count(" is evicted")
    long: dict[str, Any] = {"model": "service-pro", "messages": HELLO, "max_tokens": 1500, "ignore_eos": True}
    long |= {"stream": True, "stream_options": {"include_usage": True}}

    async def stream(begun: asyncio.Event) -> int:
        tokens = 0
        async with client.stream("POST", CHAT, json=long) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                begun.set()
                assert '"error"' not in line
                if '"completion_tokens"' in line:
                    tokens = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
        return tokens

    still = standstill(crowded, "service-pro")
    begun = [asyncio.Event() for _ in range(4)]
    streaming = [asyncio.create_task(stream(each)) for each in begun]
    await asyncio.gather(*(each.wait() for each in begun))
    with still:
        turn = asyncio.create_task(ask(client, "service-image"))
        settled = loaded_by + _SWAP_EVERY_SECONDS + 1  # from now on it might be evicted if it had nothing to do
        await async_poll_until(lambda: time.monotonic() > settled, 60)
        assert crowded.log().count(" is evicted") == evictions
        assert not turn.done()
    assert await asyncio.gather(*streaming) == [1500] * 4
    assert (await turn).status_code == 200
    assert "service-pro is evicted" in crowded.log()


async def test_a_client_that_waits_for_a_turn_may_leave(client: httpx2.AsyncClient):
    absent = next(name for name, state in (await states(client)).items() if state == "unloaded")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(client, absent), 0.2)
    assert (await ask(client, absent)).status_code == 200
