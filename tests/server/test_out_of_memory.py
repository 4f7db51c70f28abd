"""A model for which there is not enough memory: it fails with a reason, and the others serve."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil
import pytest
from chat_parts import CHAT, HELLO
from key_clients import client_with
from serving import Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    import httpx2

pytestmark = pytest.mark.engine

_GIB = 2**30
YAML = """\
models:
  service-plus: {task: chat, tier: standard, capabilities: [chat, streaming], weights: service-plus, demo: chat}
tiers:
  standard: {models: [standard]}
"""
HUNGRY = """\
  hungry:
    task: chat
    tier: standard
    capabilities: [chat]
    weights: hungry
    demo: chat
    engine: {kv_cache_gib: %s}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("memory")
    (folder / "models.yaml").write_text(YAML)
    with Server(folder, environment={"HEARTH_MODELS": str(folder / "models.yaml")}) as running:
        running.wait_until_ready(250)
        yield running
        assert running.stop() == 0, running.log()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    assert server.admin_key is not None
    async with client_with(server, server.admin_key.text) as client:
        yield client


async def failed(server: Server, client: httpx2.AsyncClient, kv_cache_gib: float) -> str:
    """Add the hungry model, and return the reason with which it failed."""
    file = server.data_dir.parent / "models.yaml"
    file.write_text(YAML.replace("tiers:", HUNGRY % kv_cache_gib + "tiers:"))
    assert (await client.post("/v1/admin/reload")).status_code == 200
    deadline = time.monotonic() + 240
    while (model := (await client.get("/health/ready")).json()["models"]["hungry"])["status"] != "failed":
        assert time.monotonic() < deadline, model
    assert (await client.post(CHAT, json={"model": "service-plus", "messages": HELLO})).status_code == 200
    assert (await client.post(CHAT, json={"model": "hungry", "messages": HELLO})).status_code == 503
    reason: str = model["reason"]
    return reason


async def test_a_cache_larger_than_the_machine_is_refused_with_the_numbers(server: Server, client: httpx2.AsyncClient):
    assert "cannot be loaded as it is configured" in await failed(server, client, 4000)
    assert "`kv_cache_gib` is 4000, and this machine has" in server.log()


async def test_memory_that_ends_while_it_loads_fails_that_model_alone(server: Server, client: httpx2.AsyncClient):
    children = psutil.Process(server.pid).children(recursive=True)
    (forks,) = [child for child in children if "forkserver" in " ".join(child.cmdline())]
    forks.rlimit(psutil.RLIMIT_AS, (6 * _GIB, 6 * _GIB))  # what it forks from now on inherits that
    assert "did not start, 3 times in a row" in await failed(server, client, 8)
