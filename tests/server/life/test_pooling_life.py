"""Embeddings under limits and faults: what a key may use, what leaving frees, and what a dead engine costs."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import psutil
import pytest
from pooling_parts import EMBEDDING, EMBEDDING_ENTRY
from serving import READY_SECONDS, Server, async_poll_until
from small_models import models_yaml
from standstill import model_states, standstill

pytestmark = pytest.mark.engine

PATH = "/v1/embeddings"
MANY = [f"number {number} of a long list of texts" + " that goes on and on" * 18 for number in range(2048)]
YAML = models_yaml(EMBEDDING_ENTRY, tiers="  small: {models: [standard], tokens_per_minute: 1000}\n")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One embedding model, and a tier with few tokens."""
    folder = tmp_path_factory.mktemp("embedder")
    (folder / "models.yaml").write_text(YAML)
    with Server(folder, environment={"HEARTH_MODELS": str(folder / "models.yaml")}) as running:
        yield running
        assert running.stop() == 0, running.log()


@pytest.fixture
async def client(embedder: Server) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(embedder, "standard") as opened:
        yield opened


def client_of(server: Server, tier: str) -> httpx2.AsyncClient:
    key = server.make_key(tier, tier=tier)
    headers = {"Authorization": f"Bearer {key.text}"}
    return httpx2.AsyncClient(base_url=server.root_url, headers=headers, timeout=240)


async def embed(client: httpx2.AsyncClient, given: Any, **fields: Any) -> httpx2.Response:
    return await client.post(PATH, json={"model": EMBEDDING, "input": given, **fields})


def load_of(server: Server) -> tuple[int, int]:
    """How many inputs run and wait; up to a second old."""
    state = model_states(server)[EMBEDDING]
    return state["running"], state["waiting"]


async def asked_for_many(server: Server, client: httpx2.AsyncClient) -> asyncio.Task[httpx2.Response]:
    """Ask for so many that all are still to do when this returns."""
    with standstill(server, EMBEDDING):
        large = asyncio.create_task(embed(client, MANY))
        await async_poll_until(lambda: load_of(server)[0] > 0, 60)
    return large


async def test_the_words_for_a_query_stand_before_it(client: httpx2.AsyncClient):
    asked = (await embed(client, "the kitchen", input_type="query")).json()["data"][0]["embedding"]
    written = (await embed(client, "find: the kitchen")).json()["data"][0]["embedding"]
    plain = (await embed(client, "the kitchen", input_type="document")).json()["data"][0]["embedding"]
    assert asked == pytest.approx(written, abs=1e-5)
    assert asked != pytest.approx(plain, abs=1e-2)


async def test_tokens_count_for_the_key(embedder: Server):
    async with client_of(embedder, "small") as client:
        first = await embed(client, MANY[:4])
        used = first.json()["usage"]["prompt_tokens"]
        assert used > 200
        assert first.headers["x-ratelimit-limit-tokens"] == "1000"
        assert 1000 - used <= int(first.headers["x-ratelimit-remaining-tokens"]) < 1000 - used / 2
        never = await embed(client, MANY)
        assert (never.status_code, never.json()["error"]["code"]) == (400, "invalid_value")
        assert "Send fewer or shorter texts at once" in never.json()["error"]["message"]
        answers = [await embed(client, MANY[:4]) for _ in range(5)]
        assert [answer.status_code for answer in answers][-1] == 429
        assert answers[-1].headers["retry-after"]


async def test_who_leaves_frees_what_they_had_within_a_second(embedder: Server, client: httpx2.AsyncClient):
    large = await asked_for_many(embedder, client)
    large.cancel()
    left_at = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await large
    while True:
        seen_at = time.monotonic() - 1  # of the state that an answer may show, which is a second old
        if load_of(embedder) == (0, 0):
            break
        assert seen_at - left_at < 1


async def test_a_dead_engine_costs_a_503_and_comes_back(embedder: Server, client: httpx2.AsyncClient):
    before = (await embed(client, "the kitchen")).json()["data"][0]["embedding"]
    large = await asked_for_many(embedder, client)
    children = psutil.Process(embedder.pid).children(recursive=True)
    engine = next(child for child in children if "EngineCore" in " ".join(child.cmdline()))
    assert engine.nice() == min(19, psutil.Process(embedder.pid).nice() + 10)  # on a CPU, chat goes first
    engine.kill()
    answer = await large
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert answer.headers["retry-after"]
    await async_poll_until(embedder.is_ready, READY_SECONDS, describe=embedder.log)
    assert (await embed(client, "the kitchen")).json()["data"][0]["embedding"] == pytest.approx(before, abs=1e-5)
