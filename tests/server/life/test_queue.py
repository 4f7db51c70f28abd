"""More work than a model has places: who waits, who is refused, who goes first, and what a dying engine costs."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import psutil
import pytest
from chat_parts import CHAT, HELLO, assert_error, events
from serving import Server, async_poll_until
from standstill import model_states, standstill, until_asked

pytestmark = pytest.mark.engine

PLACES = 4
WAITING = 6
KEPT = 1  # of the places, for newcomers
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
    return httpx2.AsyncClient(base_url=server.root_url, headers=headers, timeout=240)


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


def flood(client: httpx2.AsyncClient, count: int, max_tokens: int = 20) -> list[asyncio.Task[httpx2.Response]]:
    """Send `count` requests at once."""
    return [asyncio.create_task(client.post(CHAT, json=asking(max_tokens))) for _ in range(count)]


async def statuses(tasks: list[asyncio.Task[httpx2.Response]]) -> list[int]:
    return [answer.status_code for answer in await asyncio.gather(*tasks)]


def key_of(client: httpx2.AsyncClient) -> str:
    """The public id of its key, which no other test has."""
    return client.headers["Authorization"].split("_")[1]


async def chats_logged(server: Server, count: int, *clients: httpx2.AsyncClient) -> list[dict[str, Any]]:
    """Chats of these clients in the access log, in the order of their ends, once there are `count`."""
    keys = {key_of(client) for client in clients}

    def found() -> list[dict[str, Any]]:
        return [line for line in server.access_lines() if line.get("route") == CHAT and line.get("key") in keys]

    await async_poll_until(lambda: len(found()) >= count, 60)
    return found()


async def test_a_newcomer_is_answered_while_a_flood_waits(
    crowded: Server, flooder: httpx2.AsyncClient, newcomer: httpx2.AsyncClient
) -> None:
    with standstill(crowded, "small"):
        tasks = flood(flooder, PLACES + WAITING - 1, 400)
        await until_asked(crowded, "small", len(tasks))
        tasks += flood(newcomer, 1)
        await until_asked(crowded, "small", len(tasks))
    assert await statuses(tasks) == [200] * len(tasks)
    first, *others = [line["key"] for line in await chats_logged(crowded, len(tasks), flooder, newcomer)]
    assert first == key_of(newcomer)
    assert first not in others


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(
    crowded: Server, flooder: httpx2.AsyncClient
) -> None:
    room = PLACES - KEPT + WAITING
    with standstill(crowded, "small"):
        tasks = flood(flooder, 2 * room)
        await async_poll_until(lambda: sum(task.done() for task in tasks) >= room, 60)
        refused = [task.result() for task in tasks if task.done()]
    for answer in refused:
        assert_error(answer, 503, "server_overloaded")
        assert 1 <= int(answer.headers["retry-after"]) <= 120
    assert (await statuses(tasks)).count(200) == len(tasks) - len(refused) == room


async def test_a_stream_that_waits_says_so(crowded: Server, flooder: httpx2.AsyncClient) -> None:
    with ExitStack() as still:
        still.enter_context(standstill(crowded, "small"))
        tasks = flood(flooder, PLACES + 2)
        await until_asked(crowded, "small", len(tasks))
        async with flooder.stream("POST", CHAT, json=asking(stream=True)) as stream:
            pieces = stream.aiter_bytes()
            data = await anext(pieces)
            assert data.startswith(b": keep-alive\n\n")
            still.close()
            data += b"".join([piece async for piece in pieces])
    assert events(data.replace(b": keep-alive\n\n", b""))[-1]["choices"][0]["finish_reason"] == "length"
    assert await statuses(tasks) == [200] * len(tasks)


async def test_who_leaves_the_queue_frees_the_place(crowded: Server, flooder: httpx2.AsyncClient) -> None:
    with standstill(crowded, "small"):
        left = flood(flooder, PLACES - KEPT + WAITING)
        await until_asked(crowded, "small", len(left))
        for task in left:
            task.cancel()
        await until_asked(crowded, "small", 0)
        tasks = flood(flooder, len(left))
        await until_asked(crowded, "small", len(tasks))
    assert await statuses(tasks) == [200] * len(tasks)
    logged = [line["status"] for line in await chats_logged(crowded, len(left) + len(tasks), flooder)]
    assert logged == [499] * len(left) + [200] * len(tasks)


async def test_an_engine_that_dies_in_the_middle_of_a_batch_costs_what_was_running(
    crowded: Server, newcomer: httpx2.AsyncClient
) -> None:
    items = [asking(20, messages=[{"role": "user", "content": f"{i}. Say hello."}]) for i in range(30)]
    with standstill(crowded, "small"):
        batch = asyncio.create_task(newcomer.post(f"{CHAT}/batch", json={"requests": items}))
        await async_poll_until(lambda: model_states(crowded)["small"]["running"] > 0, 60)
        (engine,) = map(psutil.Process, model_states(crowded)["small"]["pids"])
        engine.kill()
    answer = (await batch).json()
    failed = [response for response in answer["responses"] if "error" in response]
    assert 1 <= len(failed) <= PLACES
    assert {response["error"]["code"] for response in failed} == {"engine_unavailable"}
    assert answer["counts"]["succeeded"] == len(items) - len(failed)
