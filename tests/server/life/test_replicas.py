"""Two engines of one model behind its name: both answer, a key stays with one, and one goes on without the other."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import psutil
import pytest
from chat_parts import CHAT, assert_error
from key_clients import client_with
from serving import Server, async_poll_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

YAML = """\
models:
  service-plus:
    task: chat
    tier: standard
    capabilities: [chat, streaming]
    weights: service-plus
    demo: chat
    replicas: 2
tiers:
  standard: {models: [standard]}
"""
NAMES = ["service-plus", "service-plus#2"]
BACK_SECONDS = 240


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "models.yaml").write_text(YAML)
    with Server(folder, environment={"HEARTH_MODELS": str(folder / "models.yaml")}) as started:
        yield started
        assert started.stop() == 0, started.log()


@pytest.fixture
async def client(twins: Server) -> AsyncIterator[httpx2.AsyncClient]:
    assert twins.admin_key is not None
    async with client_with(twins, twins.admin_key.text) as client:
        await until(twins, are_ready)
        yield client


def model(server: Server) -> dict[str, Any]:
    assert server.admin_key is not None
    key = {"Authorization": f"Bearer {server.admin_key.text}"}
    (found,) = httpx2.get(f"{server.root_url}/v1/admin/status", headers=key, timeout=60).json()["models"]
    return dict(found)


async def until(server: Server, true: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Ask for the state of the engines until it is as it should be."""
    await async_poll_until(lambda: true(model(server)["engines"]), BACK_SECONDS, describe=server.log)


def are_ready(engines: list[dict[str, Any]]) -> bool:
    return [one["status"] for one in engines] == ["ready", "ready"]


async def counted(client: httpx2.AsyncClient, total: int) -> list[int]:
    """How many answers each engine has completed, as its vLLM counts them: asked until it is so many together."""
    found: list[int] = []
    async with asyncio.timeout(60):  # the page is kept for a second
        while sum(found) < total or not found:
            page = (await client.get("/metrics")).text
            rows = re.findall(r'vllm:request_success_total\{.*model_name="([^"]+)"\} (\S+)', page)
            found = [int(sum(float(number) for name, number in rows if name == engine)) for engine in NAMES]
    return found


async def answers(client: httpx2.AsyncClient, count: int) -> None:
    question = [{"role": "user", "content": "Count from one to ten."}]  # known by heart: any engine says the same
    body = {"model": "service-plus", "messages": question, "max_tokens": 8, "temperature": 0}
    done = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(count)))
    assert {one.status_code for one in done} == {200}, [one.text for one in done]
    assert len({one.json()["choices"][0]["message"]["content"] for one in done}) == 1


async def test_requests_of_one_key_stay_with_one_engine_until_it_has_clearly_more_to_do(
    twins: Server, client: httpx2.AsyncClient
):
    listed = (await client.get("/v1/models")).json()["data"]
    assert [(one["id"], one["status"]) for one in listed] == [("service-plus", "ready")]
    state = model(twins)
    assert [one["id"] for one in state["engines"]] == NAMES
    assert sorted(pid for one in state["engines"] for pid in one["pids"]) == sorted(state["pids"])
    each = [one["ram_bytes"] for one in state["engines"]]
    assert min(each) > 20 * 2**20
    assert sum(each) == state["memory"]["ram_bytes"]
    assert await counted(client, 2) == [1, 1]  # each has been warmed up
    for _ in range(5):
        await answers(client, 1)
    assert sorted(await counted(client, 7)) == [1, 6]
    with suspended(state["pids"]):  # none is answered before all have been given an engine
        asking = asyncio.create_task(answers(client, 40))
        await until(twins, lambda engines: sum(map(load, engines)) == 40)
        loads = sorted(map(load, model(twins)["engines"]))
    assert loads == [18, 22]
    await asking
    assert sorted(await counted(client, 47)) == [19, 28]


def load(engine: dict[str, Any]) -> int:
    return int(engine["running"] + engine["waiting"])


@contextlib.contextmanager
def suspended(pids: list[int]) -> Iterator[None]:
    processes = [psutil.Process(pid) for pid in pids]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


async def test_an_engine_is_no_model_of_its_own(client: httpx2.AsyncClient):
    body = {"model": "service-plus#2", "messages": [{"role": "user", "content": "Hello"}]}
    assert_error(await client.post(CHAT, json=body), 404, "model_not_found", "model")
    assert_error(await client.get("/v1/models/service-plus%232"), 404, "model_not_found", "model")


@pytest.mark.parametrize("killed", [0, 1])
async def test_one_goes_on_while_the_other_is_killed_and_comes_back(
    twins: Server, client: httpx2.AsyncClient, killed: int
):
    engine = model(twins)["engines"][killed]
    process = psutil.Process(engine["pids"][0])
    process.suspend()  # its answers are begun when those of the other engine have been read
    begun = [asyncio.Event() for _ in range(12)]  # more than one engine gets before the other has its share
    streams = [asyncio.create_task(stream(client, each)) for each in begun]

    def others_ended() -> bool:
        return sum(each.done() for each in streams) == len(streams) - load(model(twins)["engines"][killed])

    await async_poll_until(others_ended, 120, describe=twins.log)
    process.resume()
    rest = [asyncio.create_task(each.wait()) for each in begun if not each.is_set()]
    await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)
    process.kill()
    ends = await asyncio.gather(*streams)
    assert {*ends} == {"engine_unavailable", "length"}  # those of the other engine were answered to their end
    for _ in range(5):  # whatever engine this key had
        await answers(client, 4)
    assert (await client.get("/health/ready")).json()["models"]["service-plus"]["status"] == "ready"
    await until(twins, lambda engines: engines[killed]["restarts"] == engine["restarts"] + 1 and are_ready(engines))


async def stream(client: httpx2.AsyncClient, begun: asyncio.Event) -> str:
    """Return how a long answer ended: its finish_reason, or the code of the error. Its first line goes into `begun`."""
    body = {
        "model": "service-plus",
        "messages": [{"role": "user", "content": "Count from one to fifty."}],
        "stream": True,
        "max_tokens": 1200,
        "ignore_eos": True,
    }
    end = ""
    async with client.stream("POST", CHAT, json=body) as response:
        if response.status_code != 200:  # it was not begun when its engine was killed
            return str(json.loads(await response.aread())["error"]["code"])
        async for line in response.aiter_lines():
            begun.set()
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                end = event["error"]["code"] if "error" in event else event["choices"][0]["finish_reason"] or end
    return end


async def test_a_reload_with_fewer_ends_one_and_with_more_starts_one(twins: Server, client: httpx2.AsyncClient):
    file = twins.data_dir.parent / "models.yaml"
    for number in (1, 2):
        file.write_text(YAML.replace("replicas: 2", f"replicas: {number}"))
        assert (await client.post("/v1/admin/reload")).status_code == 200

        def as_said(number: int = number) -> bool:
            page = httpx2.get(f"{twins.root_url}/metrics", headers=client.headers, timeout=60).text
            return f'hearth_model_engines{{model="service-plus",state="ready"}} {number}.0' in page

        await async_poll_until(as_said, BACK_SECONDS, describe=twins.log)
        await answers(client, 3)
