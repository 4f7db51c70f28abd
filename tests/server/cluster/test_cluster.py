"""Hearth on a cluster of Ray on this machine: a head, two nodes with a chat replica each, voices and another chat model
as a role of their own. What is one server's must be true of the whole."""

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import yaml
from cluster_parts import CHAT, IMAGES, SPEECH, RayCluster, missing_reason, models_yaml
from page_parts import CHROMIUM, MISSING, chromium, opened
from postgres_parts import Postgres
from serving import Key

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
OTHER_CHAT = "service-pro"
ROLES = {"chat": {"models": [CHAT], "replicas": 2}, "more": {"models": [OTHER_CHAT, IMAGES, SPEECH]}}
NODES = ("a", "b")
BROWSER = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
HELLO = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[RayCluster]:
    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cluster")
    with RayCluster(folder, postgres.new_schema()) as running:
        running.deploy(models_yaml(folder / "models.yaml", ROLES))
        for node in NODES:
            running.wait_until_ready(node)
        yield running


@pytest.fixture(scope="module")
def key(cluster: RayCluster) -> Key:
    return cluster.make_key("all", *(part for scope in ALL_SCOPES for part in ("--scope", scope)))


ALL_SCOPES = ("chat", "batch", "embeddings", "images", "audio", "models", "metrics", "admin")


def client_of(cluster: RayCluster, node: str, key: Key) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.root_url(node)}/v1", api_key=key.text, max_retries=0, timeout=240)


async def ask(client: openai.AsyncOpenAI, model: str = CHAT, **more: Any) -> Any:
    return await client.chat.completions.create(model=model, messages=HELLO, temperature=0, **more)  # type: ignore[call-overload]


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("model", [CHAT, OTHER_CHAT])
async def test_a_chat_streams_and_is_whole_through_any_node_whoever_has_the_model(
    cluster: RayCluster, key: Key, node: str, model: str
):
    async with client_of(cluster, node, key) as client:
        whole = await ask(client, model)
        text = ""
        async for chunk in await ask(client, model, stream=True, stream_options={"include_usage": True}):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage
    assert text == whole.choices[0].message.content
    assert usage == whole.usage
    assert usage.completion_tokens > 3


async def test_what_haproxy_sends_through_serves_own_proxy_is_answered_like_the_rest(cluster: RayCluster, key: Key):
    """It does so for moments of a deploy, in which it knows of no replica that is up."""
    url = f"http://127.0.0.1:{cluster.environment['RAY_SERVE_FALLBACK_PROXY_HTTP_PORT']}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=key.text, max_retries=0, timeout=240) as client:
        whole, text = await ask(client), ""
        async for chunk in await ask(client, stream=True):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        with pytest.raises(openai.NotFoundError):
            await ask(client, "no-such-model")
    assert text == whole.choices[0].message.content


async def test_images_and_speech_of_another_role_come_through_and_a_link_opens_at_either_replica(
    cluster: RayCluster, key: Key
):
    async with client_of(cluster, "a", key) as client:
        made = await client.images.generate(model=IMAGES, prompt="a red circle", size="256x256", response_format="url")
        spoken = await client.audio.speech.create(model=SPEECH, voice="alloy", input="Hello.", response_format="wav")
    assert spoken.content[:4] == b"RIFF"
    url = httpx2.URL(made.data[0].url or "")
    async with both(cluster, key) as clients:
        opened = [await http.get(url.raw_path.decode()) for http in clients]
    assert [one.status_code for one in opened] == [200, 200]
    assert {one.content[:4] for one in opened} == {b"\x89PNG"}


async def test_one_batch_has_models_of_both_roles(cluster: RayCluster, key: Key):
    body = {"requests": [{"model": model, "messages": HELLO} for model in (CHAT, OTHER_CHAT, CHAT)]}
    async with httpx2.AsyncClient(base_url=cluster.root_url("b"), headers=bearer(key), timeout=60) as http:
        answered = await http.post("/v1/chat/completions/batch", json=body)
    assert answered.status_code == 200, answered.text
    assert [one["model"] for one in answered.json()["responses"]] == [CHAT, OTHER_CHAT, CHAT]


async def test_what_the_other_role_refuses_keeps_its_status_and_a_limit_is_met_there_too(cluster: RayCluster, key: Key):
    async with client_of(cluster, "a", key) as client:
        with pytest.raises(openai.BadRequestError, match="context") as caught:
            await client.chat.completions.create(
                model=OTHER_CHAT, messages=[{"role": "user", "content": "word " * 100_000}]
            )
        assert caught.value.code == "context_length_exceeded"
    few = cluster.make_key("few", "--tokens-per-minute", "100")
    async with client_of(cluster, "a", few) as client:
        await ask(client, OTHER_CHAT, max_tokens=60)
        with pytest.raises(openai.RateLimitError, match="100 tokens per minute"):
            await ask(client, OTHER_CHAT, max_tokens=75)


async def test_a_client_that_leaves_frees_its_place_at_both_roles(cluster: RayCluster, key: Key):
    headers, url = bearer(key), cluster.root_url("a")

    async def running(model: str) -> int:
        listed = await http.get("/v1/models")
        return int(next(one["running"] for one in map(_hearth, listed.json()["data"]) if one["id"] == model))

    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
        for model in (CHAT, OTHER_CHAT):
            body = {"model": model, "messages": HELLO, "stream": True, "max_tokens": 16_000, "ignore_eos": True}
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200, await response.aread()
                await anext(response.aiter_bytes())
            deadline = time.monotonic() + 10  # the answer would take longer
            while await running(model):
                assert time.monotonic() < deadline, f"{model} still runs what its client has left"


def _hearth(model: dict[str, Any]) -> dict[str, Any]:
    return {"id": model["id"], **model.get("hearth", model)}


async def test_clients_that_leave_before_their_answer_begins_are_noticed(cluster: RayCluster, key: Key):
    """Head and body come apart, as most programs send them: HAProxy has to look at the client after both."""
    body = json.dumps(
        {"model": IMAGES, "prompt": "a red circle", "size": "1024x1024", "quality": "hd", "n": 4}
    ).encode()
    head = f"POST /v1/images/generations HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key.text}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"

    async def leave() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", cluster.ports["a"])
        for part in (head.encode(), body):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.1)
        writer.close()

    async with client_of(cluster, "b", key) as client:

        async def asked() -> int:
            model: Any = await client.models.retrieve(IMAGES)
            return int(model.running + model.waiting)

        await asyncio.gather(*(leave() for _ in range(16)))
        deadline = time.monotonic() + 30  # to make them all takes minutes
        while await asked():
            assert time.monotonic() < deadline, "images are made that nobody waits for"


async def test_sixty_requests_a_minute_are_sixty_over_both_replicas(cluster: RayCluster):
    sixty = cluster.make_key("sixty", "--requests-per-minute", "60")

    async def count(http: httpx2.AsyncClient) -> int:
        body = {"model": CHAT, "messages": HELLO, "max_tokens": 1}
        return (await http.post("/v1/chat/completions", json=body)).status_code

    began = time.monotonic()
    async with both(cluster, sixty) as (first, second):
        codes = await asyncio.gather(*(count(http) for http in (first, second) for _ in range(45)))
    passed, refilled = codes.count(200), time.monotonic() - began
    assert codes.count(200) + codes.count(429) == 90
    assert 60 <= passed <= 60 + refilled, f"{passed} passed in {refilled:.1f} s"


async def test_parallel_requests_count_at_the_other_replica_within_a_second(cluster: RayCluster):
    two = cluster.make_key("two", "--parallel-requests", "2")
    item = {"model": CHAT, "messages": HELLO, "max_tokens": 1500, "ignore_eos": True}
    async with both(cluster, two) as (first, second):
        running = [
            asyncio.create_task(first.post("/v1/chat/completions/batch", json={"requests": [item] * 100}))
            for _ in range(2)
        ]
        while (await first.get("/v1/key")).json()["left"]["parallel_requests"]:
            assert not any(one.done() for one in running)
        began = time.monotonic()
        while True:
            asked_at = time.monotonic()  # a slow answer does not count
            if not (await second.get("/v1/key")).json()["left"]["parallel_requests"]:
                break
            assert asked_at < began + 2  # one, and the time that a busy machine takes to write it
        print(f"known after {time.monotonic() - began:.2f} s")  # noqa: T201
        refused = await second.post("/v1/chat/completions", json={**item, "max_tokens": 1})
        assert not any(one.done() for one in running)
        for one in running:
            one.cancel()
        await asyncio.wait(running)
        while (await second.get("/v1/key")).json()["left"]["parallel_requests"] < 2:
            assert time.monotonic() < began + 60
    assert refused.status_code == 429, refused.text


async def test_a_revoked_key_is_refused_at_each_replica_within_ten_seconds(cluster: RayCluster):
    gone = cluster.make_key("gone")
    async with both(cluster, gone) as clients:
        for http in clients:
            assert (await http.get("/v1/models")).status_code == 200
        assert cluster.hearth("keys", "revoke", gone.public_id).returncode == 0
        deadline = time.monotonic() + 11
        while {(await http.get("/v1/models")).status_code for http in clients} != {401}:
            assert time.monotonic() < deadline


async def test_usage_of_both_replicas_is_in_one_book(cluster: RayCluster):
    used = cluster.make_key("used")
    async with both(cluster, used) as clients:
        for http in clients:
            for model in (CHAT, OTHER_CHAT):
                body = {"model": model, "messages": HELLO, "max_tokens": 3}
                assert (await http.post("/v1/chat/completions", json=body)).status_code == 200

        async def book() -> dict[str, int]:
            rows = (await clients[0].get("/v1/usage", params={"by": "model"})).json()["data"]
            return {
                model: sum(row["requests"] for row in rows if row["model"] == model) for model in (CHAT, OTHER_CHAT)
            }

        deadline = time.monotonic() + 60
        while await book() != {CHAT: 2, OTHER_CHAT: 2}:
            assert time.monotonic() < deadline, await book()


async def test_metrics_and_status_are_of_all_replicas(cluster: RayCluster, key: Key):
    async with both(cluster, key) as (http, _):
        page = (await http.get("/metrics")).text
        whole = (await http.get("/v1/admin/status")).json()
    shown, machines = whole["replicas"], whole["machines"]
    ready = [line for line in page.splitlines() if line.startswith("hearth_model_state{") and line.endswith(" 1.0")]
    assert sum(f'model="{CHAT}"' in line and 'role="chat"' in line for line in ready) == 2, ready
    assert sum(f'model="{OTHER_CHAT}"' in line and 'role="more"' in line for line in ready) == 1, ready
    assert all('node="' in line and 'replica="' in line for line in ready)
    models = sorted((one["role"], [model["id"] for model in one["status"]["models"]]) for one in shown)
    assert models == [("chat", [CHAT]), ("chat", [CHAT]), ("more", [OTHER_CHAT, IMAGES, SPEECH])]
    assert sorted((one["alive"], one["head"]) for one in machines) == [(True, False), (True, False), (True, True)]
    status = cluster.status()
    assert (status["status"], len(status["replicas"]), len(status["machines"])) == ("running", 3, 3)


async def test_a_reload_says_that_a_deploy_takes_its_place(cluster: RayCluster, key: Key):
    async with both(cluster, key) as (http, _):
        answered = await http.post("/v1/admin/reload")
    assert answered.status_code == 400
    assert "hearth cluster deploy" in answered.json()["error"]["message"]


async def test_what_no_machine_can_run_is_refused_and_a_description_needs_no_new_replica(
    cluster: RayCluster, key: Key, tmp_path: Path
):
    def deploy(change: Callable[[dict[str, Any]], None]) -> subprocess.CompletedProcess[str]:
        content = yaml.safe_load(models_yaml(tmp_path / "models.yaml", ROLES).read_text())
        change(content)
        (tmp_path / "models.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        arguments = ("--models", str(tmp_path / "models.yaml"), "--address", cluster.address)
        return cluster.hearth("cluster", "deploy", *arguments, seconds=120)

    before = {one["replica"] for one in cluster.status()["replicas"]}
    refused = deploy(lambda content: content["cluster"]["roles"]["more"].update(gpus=1))
    assert refused.returncode == 1
    assert "No machine can run a replica of more, which needs CPU 0.1, GPU 1." in refused.stderr
    done = deploy(lambda content: content["models"][CHAT].update(description="Another one."))
    assert done.returncode == 0, done.stderr
    async with both(cluster, key) as clients:
        for http in clients:
            shown = (await http.get(f"/v1/models/{CHAT}")).json()
            assert shown["description"] == "Another one."
    assert {one["replica"] for one in cluster.status()["replicas"]} == before


def bearer(key: Key) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.text}"}


class both:  # noqa: N801  # used like a function
    """Clients of both replicas that speak HTTP, past HAProxy."""

    def __init__(self, cluster: RayCluster, key: Key) -> None:
        urls = cluster.replica_urls()
        assert len(urls) == 2
        self._clients = [httpx2.AsyncClient(base_url=url, headers=bearer(key), timeout=120) for url in urls]

    async def __aenter__(self) -> list[httpx2.AsyncClient]:
        return self._clients

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.aclose()


@BROWSER
def test_the_page_shows_machines_and_the_replicas_of_a_model(cluster: RayCluster, key: Key):
    with chromium() as browser, opened(browser, cluster.root_url("b")) as tab:
        tab.sign_in(key)
        tab.go("Models")
        replicas = tab.page.get_by_role("region", name="Replicas").get_by_role("row")
        replicas.nth(3).wait_for()
        roles = [row.split()[1:3] for row in replicas.all_inner_texts()[1:]]
        assert sorted(roles) == [["chat", "ready"], ["chat", "ready"], ["more", "ready"]]
        engines = tab.page.get_by_role("region", name=f"Engines of {CHAT}").get_by_role("row")
        assert [row.split()[0] for row in engines.all_inner_texts()[1:]] == [CHAT, CHAT]
        assert tab.page.get_by_role("region", name="Memory").get_by_role("img").count() >= 1
        tab.check()
