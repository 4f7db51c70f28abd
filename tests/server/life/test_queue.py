"""More work than a model has places: who waits, who is refused, who goes first, and what a dying engine costs."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import psutil
import pytest
from chat_parts import CHAT, HELLO, assert_error, events
from serving import Server, async_poll_until

pytestmark = pytest.mark.engine

PLACES = 4
WAITING = 6
MODELS = f"""
models:
  small:
    task: chat
    tier: all
    capabilities: [chat, streaming]
    weights: nothing-here
    demo: chat
    aliases: [gpt-4o-mini, openai/gpt-4o]
    engine: {{context_length: 2048, max_num_seqs: {PLACES}, max_queued_requests: {WAITING}, kept_for_newcomers: 1}}
tiers:
  all: {{models: [all]}}
"""


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with few places and a short queue."""
    folder = tmp_path_factory.mktemp("crowded")
    (folder / "models.yaml").write_text(MODELS, encoding="utf-8")
    with Server(
        folder,
        environment={"HEARTH_MODELS": str(folder / "models.yaml"), "HEARTH_KEEP_ALIVE_SECONDS": "0.2"},
    ) as running:
        yield running


@pytest.fixture
async def flooder(crowded: Server) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(crowded, "flooder") as client:
        yield client


@pytest.fixture
async def newcomer(crowded: Server) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(crowded, "newcomer") as client:
        yield client


def client_of(server: Server, name: str) -> httpx2.AsyncClient:
    key = server.make_key(name, tier="all")
    headers = {"Authorization": f"Bearer {key.text}"}
    return httpx2.AsyncClient(base_url=server.root_url, headers=headers, timeout=60)


def asking(max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {
        "model": "small",
        "messages": HELLO,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }


async def test_a_model_answers_to_its_other_names(flooder: httpx2.AsyncClient):
    for alias in ("gpt-4o-mini", "openai/gpt-4o"):
        answer = await flooder.post(CHAT, json=asking(1, model=alias))
        assert (answer.status_code, answer.json()["model"]) == (200, "small")
        assert (await flooder.get(f"/v1/models/{alias}")).json()["id"] == "small"
        response = await flooder.post("/v1/responses", json={"model": alias, "input": "Hello", "max_output_tokens": 16})
        assert (response.status_code, response.json()["model"]) == (200, "small")
        text = await flooder.post("/v1/completions", json={"model": alias, "prompt": "Hello", "max_tokens": 1})
        assert (text.status_code, text.json()["model"]) == (200, "small")
    assert_error(await flooder.post(CHAT, json=asking(1, model="gpt-4o")), 404, "model_not_found", "model")
    assert [model["id"] for model in (await flooder.get("/v1/models")).json()["data"]] == ["small"]


async def flood(client: httpx2.AsyncClient, count: int, max_tokens: int) -> list[asyncio.Task[httpx2.Response]]:
    """Send `count` requests at once."""
    return [asyncio.create_task(client.post(CHAT, json=asking(max_tokens))) for _ in range(count)]


async def test_a_newcomer_is_answered_while_a_flood_waits(
    flooder: httpx2.AsyncClient, newcomer: httpx2.AsyncClient
) -> None:
    tasks = await flood(flooder, PLACES + WAITING - 1, 400)
    await async_poll_until(lambda: any(task.done() for task in tasks), 60)
    answer = await newcomer.post(CHAT, json=asking())
    assert answer.status_code == 200, answer.text
    assert not all(task.done() for task in tasks)
    assert [task.result().status_code for task in await finished(tasks)] == [200] * len(tasks)


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(flooder: httpx2.AsyncClient) -> None:
    tasks = await flood(flooder, PLACES + 3 * WAITING, 200)
    answers = [task.result() for task in await finished(tasks)]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(answers) - len(refused) >= WAITING
    assert refused
    for answer in refused:
        assert_error(answer, 503, "server_overloaded")
        assert 1 <= int(answer.headers["retry-after"]) <= 120


async def test_a_stream_that_waits_says_so(crowded: Server, flooder: httpx2.AsyncClient) -> None:
    tasks = await flood(flooder, PLACES + 2, 1000)
    await async_poll_until(lambda: cpu_seconds(engine_of(crowded)) > 0.1, 30)
    async with flooder.stream("POST", CHAT, json=asking(stream=True)) as stream:
        data = b"".join([chunk async for chunk in stream.aiter_bytes()])
    assert data.startswith(b": keep-alive\n\n")
    assert events(data.replace(b": keep-alive\n\n", b""))[-1]["choices"][0]["finish_reason"] == "length"
    await finished(tasks)


async def test_who_leaves_the_queue_frees_the_place(crowded: Server, flooder: httpx2.AsyncClient) -> None:
    tasks = await flood(flooder, PLACES + WAITING - 1, 600)
    await async_poll_until(lambda: any(task.done() for task in tasks), 60)
    before = len(crowded.access_lines())
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    answer = await flooder.post(CHAT, json=asking())
    assert answer.status_code == 200
    await async_poll_until(lambda: len(crowded.access_lines()) > before + len(left), 10)
    statuses = [line["status"] for line in crowded.access_lines()[before:]]
    assert statuses.count(499) >= len(left) - PLACES  # those that ran may just have been done


async def test_an_engine_that_dies_in_the_middle_of_a_batch_costs_what_was_running(
    crowded: Server, newcomer: httpx2.AsyncClient
) -> None:
    items = [asking(120, messages=[{"role": "user", "content": f"{i}. Say hello."}]) for i in range(30)]
    batch = asyncio.create_task(newcomer.post("/v1/chat/completions/batch", json={"requests": items}))
    await async_poll_until(lambda: cpu_seconds(engine_of(crowded)) > 0.3 or batch.done(), 30)
    engine_of(crowded).kill()
    answer = (await batch).json()
    failed = [response for response in answer["responses"] if "error" in response]
    assert len(failed) <= PLACES
    assert {response["error"]["code"] for response in failed} <= {"engine_unavailable"}
    assert answer["counts"]["succeeded"] == len(items) - len(failed)


async def finished(tasks: list[asyncio.Task[httpx2.Response]]) -> list[asyncio.Task[httpx2.Response]]:
    await asyncio.wait(tasks)
    return tasks


def engine_of(server: Server) -> psutil.Process:
    children = psutil.Process(server.pid).children(recursive=True)
    return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))


def cpu_seconds(process: psutil.Process) -> float:
    """Since the warm-up, which takes far less than what is waited for here."""
    times = process.cpu_times()
    started = _STARTED.setdefault(process.pid, times.user + times.system)
    return times.user + times.system - started


_STARTED: dict[int, float] = {}
