"""Thousands of inputs beside a chat: who asks waits hardly longer for the first token, and the queue costs little."""

import asyncio
import json
import logging
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from chat_parts import HELLO
from pooling_parts import EMBEDDING, EMBEDDING_ENTRY
from serving import ROOT, Server
from small_models import CHAT_ENTRY, models_yaml

pytestmark = [pytest.mark.engine, pytest.mark.rounds]

_log = logging.getLogger(__name__)
ASKED = 60
MANY = [f"number {number} of a long list of short texts" for number in range(2048)]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    (tmp_path / "models.yaml").write_text(models_yaml(CHAT_ENTRY, EMBEDDING_ENTRY))
    with Server(tmp_path, environment={"HEARTH_MODELS": str(tmp_path / "models.yaml")}) as server:
        key = server.make_key("one", tier="standard")
        headers = {"Authorization": f"Bearer {key.text}"}
        async with httpx2.AsyncClient(base_url=server.root_url, headers=headers, timeout=120) as opened:
            yield opened


async def first_token_seconds(client: httpx2.AsyncClient) -> float:
    body = {"model": "service-plus", "messages": HELLO, "max_tokens": 8, "stream": True}
    began = time.monotonic()
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if '"content":"' in line and '"content":""' not in line:
                return time.monotonic() - began
    raise AssertionError("no token came")


async def p95(client: httpx2.AsyncClient) -> float:
    took = sorted([await first_token_seconds(client) for _ in range(ASKED)])
    return took[int(0.95 * ASKED)]


async def test_the_first_token_of_a_chat_comes_beside_2048_inputs(client: httpx2.AsyncClient):
    await p95(client)  # warm
    alone = await p95(client)
    asked, done = 0, False

    async def embed() -> None:
        nonlocal asked
        while not done:
            answer = await client.post("/v1/embeddings", json={"model": EMBEDDING, "input": MANY})
            assert answer.status_code == 200
            asked += 1

    at_work = asyncio.create_task(embed())
    beside = await p95(client)
    done = True
    await at_work
    _log.info("first token p95: alone %.1f ms, beside %.1f ms, %d lists", alone * 1000, beside * 1000, asked)
    assert asked >= 1
    assert beside <= max(1.5 * alone, alone + 0.05)


def test_the_queue_costs_less_than_a_fifth_of_a_bare_loop():
    bench = ["scripts/bench/run", "vectors", "--json", "-"]
    done = subprocess.run(bench, cwd=ROOT, capture_output=True, text=True, timeout=400, check=True)
    (row,) = json.loads(done.stdout)["rows"]
    _log.info("texts/s: %s", {name: one["texts_per_second"] for name, one in row["medians"].items()})
    assert row["ratios"]["bare encode"]["texts_per_second"] >= 0.8
