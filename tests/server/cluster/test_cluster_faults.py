"""What a cluster of Ray does when a machine dies, an engine is stuck, or a new models.yaml is deployed under load."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx2
import psutil
import pytest
import yaml
from cluster_parts import CHAT, SPEECH, RayCluster, missing_reason, models_yaml
from postgres_parts import Postgres
from serving import Key, async_poll_until

pytestmark = [pytest.mark.engine, pytest.mark.rounds, pytest.mark.timeout(900)]
ROLES: dict[str, Any] = {"chat": {"models": [CHAT], "replicas": 2}, "voices": {"models": [SPEECH]}}
BEHIND: dict[str, Any] = {
    "api": {"models": [], "resource": "a"},  # each machine has its name as a resource
    "chat": {"models": [CHAT], "replicas": 2, "replicas_per_node": 1},
}
HELLO = [{"role": "user", "content": "What is the capital of France?"}]
LONG = {"model": CHAT, "messages": HELLO, "stream": True, "max_tokens": 1500, "ignore_eos": True}
SHORT = {"model": CHAT, "messages": HELLO, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres: Postgres
) -> Iterator[RayCluster]:
    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cluster")
    with RayCluster(folder, postgres.new_schema()) as running:
        running.deploy(models_yaml(folder / "models.yaml", getattr(request, "param", ROLES)))
        for node in ("a", "b"):
            running.wait_until_ready(node)
        yield running


def client(cluster: RayCluster, node: str, key: Key) -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {key.text}"}
    return httpx2.AsyncClient(base_url=f"{cluster.root_url(node)}/v1", headers=headers, timeout=180)


async def stream(http: httpx2.AsyncClient, body: dict[str, Any], begun: asyncio.Event) -> str:
    """Read one to its end, and say how that was: done, an error event, or a cut connection."""
    last = ""
    try:
        async with http.stream("POST", "/chat/completions", json=body) as response:
            if response.status_code != 200:
                return f"status {response.status_code}"
            async for line in response.aiter_lines():
                begun.set()
                last = line or last
    except httpx2.HTTPError as error:
        return f"cut: {type(error).__name__}"
    return (
        "done"
        if last == "data: [DONE]"
        else f"event: {json.loads(last[6:])['error']['code']}"
        if "error" in last
        else last
    )


def nodes_of(cluster: RayCluster) -> dict[str, list[str]]:
    return {role: [one["replica"] for one in cluster.status()["replicas"] if one["role"] == role] for role in ROLES}


async def test_a_machine_that_dies_takes_its_own_streams_and_nothing_else(cluster: RayCluster):
    key = cluster.make_key()
    began = asyncio.Event(), asyncio.Event()
    async with client(cluster, "a", key) as first, client(cluster, "b", key) as second:
        dying = [asyncio.create_task(stream(second, LONG, began[1])) for _ in range(3)]
        staying = [asyncio.create_task(stream(first, LONG, began[0])) for _ in range(6)]
        await asyncio.gather(*(one.wait() for one in began))
        await asyncio.to_thread(cluster.remove, "b")
        assert (await first.post("/chat/completions", json=SHORT)).status_code == 200  # answered by the rest
        ends, others = await asyncio.gather(*dying), await asyncio.gather(*staying)
        print(f"streams of the machine that died: {ends}; of the other: {others}")  # noqa: T201
        assert all(one.startswith(("cut", "event")) for one in ends), ends
        # HAProxy of the other machine has sent some of its streams to the replica that died
        assert all(one == "done" or one.startswith(("cut", "event")) for one in others), others
        assert "done" in others
        answers = await asyncio.gather(*(first.post("/chat/completions", json=SHORT) for _ in range(20)))
        assert [one.status_code for one in answers] == [200] * 20
        await asyncio.to_thread(cluster.add, "c")
        await async_poll_until(lambda: len(nodes_of(cluster)["chat"]) == 2, 240)
        await asyncio.to_thread(cluster.wait_until_ready, "c")
        rows = (await first.get("/usage")).json()["data"]
        answered = 1 + len(answers) + others.count("done")
        assert sum(row["requests"] for row in rows) >= answered, "usage of what was answered is lost"


@pytest.mark.parametrize("cluster", [BEHIND], indirect=True)
async def test_streams_of_a_machine_that_dies_behind_the_first_role_end_with_an_error_event(cluster: RayCluster):
    key, begun = cluster.make_key(), [asyncio.Event() for _ in range(12)]
    async with client(cluster, "a", key) as http:
        # A conversation stays at one replica, so each is another.
        bodies = [LONG | {"messages": [{"role": "user", "content": f"Count from {at}."}]} for at in range(len(begun))]
        running = [asyncio.create_task(stream(http, body, one)) for body, one in zip(bodies, begun, strict=True)]
        await asyncio.gather(*(one.wait() for one in begun))
        await asyncio.to_thread(cluster.remove, "b")
        # Its replica lives on for a moment. Once it has gone, what comes is answered by the other at once.
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        short = [body | {"stream": False, "max_tokens": 4} for body in bodies]
        answers = await asyncio.gather(*(http.post("/chat/completions", json=body) for body in short))
        assert [one.status_code for one in answers] == [200] * len(short), [one.text for one in answers]
        ends = await asyncio.gather(*running)
        print(f"{ends}")  # noqa: T201
        assert set(ends) == {"done", "event: engine_unavailable"}


async def test_a_deploy_under_load_refuses_nothing(cluster: RayCluster):
    key, codes, ending = cluster.make_key(), list[int](), asyncio.Event()

    async def ask(node: str) -> None:
        async with client(cluster, node, key) as http:
            while not ending.is_set():
                codes.append((await http.post("/chat/completions", json=SHORT)).status_code)

    before = nodes_of(cluster)
    asking = [asyncio.create_task(ask(node)) for node in ("a", "b") for _ in range(2)]
    path, tiers = cluster.folder / "models.yaml", {"late": {"models": ["standard"]}}
    await asyncio.to_thread(cluster.deploy, models_yaml(path, ROLES, tiers=tiers))
    admin = {"Authorization": f"Bearer {cluster.make_key('admin', '--scope', 'admin').text}"}

    def knows() -> bool:
        tiers = httpx2.get(f"{cluster.root_url('a')}/v1/admin/tiers", headers=admin, timeout=60).json()["data"]
        return "late" in {tier["id"] for tier in tiers}

    await async_poll_until(knows, 60)
    assert nodes_of(cluster) == before, "no model is another"
    content = yaml.safe_load(path.read_text())
    content["models"][CHAT]["keep_loaded"] = True
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    await asyncio.to_thread(cluster.deploy, path)
    ending.set()
    await asyncio.gather(*asking)
    assert set(codes) == {200}, {code: codes.count(code) for code in set(codes)}
    assert len(codes) > 20
    after = nodes_of(cluster)
    assert not {*before["chat"]} & {*after["chat"]}
    assert after["voices"] == before["voices"]


async def test_a_deploy_that_cannot_be_served_leaves_what_there_is(cluster: RayCluster):
    key = cluster.make_key()
    text = (cluster.folder / "models.yaml").read_text()
    broken = cluster.folder / "broken.yaml"
    broken.write_text(text.replace("demo: chat", "demo: null").replace("weights: service-plus", "weights: absent"))
    done = await asyncio.to_thread(
        cluster.hearth, "cluster", "deploy", "--models", str(broken), "--address", cluster.address, seconds=400
    )
    assert done.returncode == 1, done.stdout
    async with client(cluster, "a", key) as http:
        assert (await http.post("/chat/completions", json=SHORT)).status_code == 200


async def test_a_replica_whose_engine_does_not_come_back_is_replaced(cluster: RayCluster):
    key, before = cluster.make_key(), nodes_of(cluster)["chat"]
    replicas = [
        one for one in psutil.process_iter(["name", "environ"]) if one.info["name"].startswith("ray::ServeRepl")
    ]
    data = str(cluster.folder / "data")
    mine = [one for one in replicas if (one.info["environ"] or {}).get("HEARTH_DATA_DIR") == data]
    ill = next(one for one in mine if any("VLLM" in child.name() for child in one.children(recursive=True)))

    def is_replaced() -> bool:
        with suppress(psutil.NoSuchProcess):
            for child in ill.children(recursive=True):
                if child.name().startswith("VLLM"):
                    child.kill()
        return not ill.is_running()

    began = time.monotonic()
    await async_poll_until(is_replaced, 300)
    print(f"ended after {time.monotonic() - began:.0f} s")  # noqa: T201
    await async_poll_until(lambda: len({*nodes_of(cluster)["chat"]} - {*before}) == 1, 240)
    async with client(cluster, "a", key) as http:
        assert (await http.post("/chat/completions", json=SHORT)).status_code == 200
