"""What images cost a key, how long they stay, and what happens when the disk is full or the worker dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from chat_parts import assert_error
from image_parts import GENERATE, IMAGE_MODEL, SMALL, fill_up, image_events, path_of, stored
from key_clients import client_of, client_with
from serving import Server, async_poll_until
from small_disks import mount_small_disk, unmount
from small_models import IMAGE_ENTRY, models_yaml

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

YAML = models_yaml(IMAGE_ENTRY, tiers="  three: {models: [standard], images_per_day: 3}\n")
ENVIRONMENT = {
    "HEARTH_IMAGE_RETENTION_HOURS": "0.002",  # 7.2 seconds
    "HEARTH_KEEP_ALIVE_SECONDS": "0.05",
    "HEARTH_TRUSTED_PROXIES": "127.0.0.1",
}
PLAIN = SMALL | {"response_format": "b64_json"}
LINKED = SMALL | {"response_format": "url"}
SLOW = PLAIN | {"size": "1024x1024", "quality": "hd"}
PROGRESS = {"stream": True, "stream_options": {"include_progress": True}}


@pytest.fixture(scope="module")
def images_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images") / "data" / "images"


@pytest.fixture(scope="module")
def small_disk(images_folder: Path) -> Iterator[str]:
    """Puts the images on a file system of 4 MiB; says why not, where that is not allowed."""
    images_folder.mkdir(parents=True)
    reason = mount_small_disk(images_folder, "4m")
    yield reason
    if not reason:
        unmount(images_folder)


@pytest.fixture(scope="module")
def painter(images_folder: Path, small_disk: str) -> Iterator[Server]:
    folder = images_folder.parents[1]
    (folder / "models.yaml").write_text(YAML)
    running = Server(folder, environment=ENVIRONMENT | {"HEARTH_MODELS": str(folder / "models.yaml")})
    try:
        running.start()
        running.wait_until_ready(250)  # alone it would take 10: the worker leaves a busy machine to everybody else
        yield running
        assert running.stop() == 0, running.log()
    finally:
        running.kill()


@pytest.fixture(scope="module")
async def admin(painter: Server) -> AsyncIterator[httpx2.AsyncClient]:
    assert painter.admin_key is not None
    async with client_with(painter, painter.admin_key.text) as client:
        yield client


def worker_of(server: Server) -> psutil.Process:
    """The process that makes the images."""
    children = psutil.Process(server.pid).children(recursive=True)
    (worker,) = [child for child in children if "engine.process.child" in " ".join(child.cmdline())]
    return worker


async def status(client: httpx2.AsyncClient, **fields: Any) -> int:
    return (await client.post(GENERATE, json=PLAIN | fields)).status_code


async def usage(client: httpx2.AsyncClient) -> dict[str, Any]:
    """What this client's key has used."""
    rows = (await client.get("/v1/usage", params={"by": "kind,model"})).json()["data"]
    return rows[0] if rows else {"requests": 0}


async def until_counted(client: httpx2.AsyncClient, requests: int) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (row := await usage(client))["requests"] < requests:
        assert time.monotonic() < deadline, row
    return row


async def test_only_so_many_images_a_day_and_a_request_is_never_cut(painter: Server, admin: httpx2.AsyncClient):
    async with client_of(painter, admin, "three") as client, client_of(painter, admin, "three") as other:
        assert await status(client, n=2) == 200
        for stream in (False, True):
            refused = await client.post(GENERATE, json=PLAIN | {"n": 2, "stream": stream})
            assert_error(refused, 429, "insufficient_quota")
            assert refused.headers["x-should-retry"] == "false"
            assert "3 images a day and has 1 left" in refused.json()["error"]["message"]
        assert await status(client, n=1, stream=True) == 200
        assert await status(client) == 429
        assert await status(other, n=3) == 200
    async with client_of(painter, admin, "three", images_per_day=0) as client:
        assert_error(await client.post(GENERATE, json=PLAIN), 429, "insufficient_quota")


async def test_images_that_were_not_made_do_not_count(painter: Server, admin: httpx2.AsyncClient):
    async with client_of(painter, admin, "three") as client:
        assert await status(client, n=3, negative_prompt="blue") == 400  # known only when the model looks at it
        async with client.stream("POST", GENERATE, json=SLOW | PROGRESS | {"n": 3}) as response:
            assert response.status_code == 200
            await anext(response.aiter_lines())
        row = await until_counted(client, 2)
        assert (row["images"], row["errors"], row["aborted"]) == (0, 1, 1)
        assert await status(client, n=3) == 200
        assert await status(client) == 429


async def test_images_are_in_the_usage_and_count_as_one_request(painter: Server, admin: httpx2.AsyncClient):
    async with client_of(painter, admin, "standard", requests_per_minute=30) as client:
        response = await client.post(GENERATE, json=PLAIN | {"n": 3})
        assert response.headers["x-ratelimit-limit-requests"] == "30"
        assert response.headers["x-ratelimit-remaining-requests"] == "29"
        assert await status(client, stream=True) == 200
        row = await until_counted(client, 2)
        assert (row["kind"], row["model"], row["images"]) == ("images", IMAGE_MODEL, 4)
        assert (row["requests"], row["errors"], row["aborted"], row["prompt_tokens"]) == (2, 0, 0, 0)
    own = response.headers["x-request-id"]
    await async_poll_until(lambda: own in {line["request_id"] for line in painter.access_lines()}, 60)
    line = next(line for line in painter.access_lines() if line["request_id"] == own)
    assert (line["images"], line["model"], line["route"]) == (3, IMAGE_MODEL, GENERATE)
    assert "red" not in str(line)


async def test_only_so_many_requests_of_a_key_run_at_the_same_time(painter: Server, admin: httpx2.AsyncClient):
    async with client_of(painter, admin, "standard", parallel_requests=1) as client:
        worker = worker_of(painter)
        worker.suspend()  # the first stays in the middle of its work, however slowly the second arrives
        try:
            async with client.stream("POST", GENERATE, json=SLOW | PROGRESS) as response:
                lines = response.aiter_lines()
                await anext(lines)
                assert_error(await client.post(GENERATE, json=PLAIN), 429, "rate_limit_exceeded")
        finally:
            worker.resume()


async def test_a_stream_that_waits_says_that_it_lives(admin: httpx2.AsyncClient):
    response = await admin.post(GENERATE, json=SLOW | {"stream": True, "n": 2})
    assert response.status_code == 200
    assert response.content.startswith(b": keep-alive\n\n")
    assert [event["type"] for event in image_events(response.content)] == ["image_generation.completed"] * 2


async def test_a_link_ends_when_it_said(admin: httpx2.AsyncClient):
    (item,) = (await admin.post(GENERATE, json=LINKED)).json()["data"]
    path = path_of(item["url"])
    assert (await admin.get(path)).status_code == 200
    deadline = time.monotonic() + 60
    while (response := await admin.get(path)).status_code == 200:
        assert time.monotonic() < deadline
    assert time.time() >= item["expires_at"]
    assert_error(response, 404, "not_found")


async def test_behind_a_proxy_that_is_trusted_links_are_what_the_browser_sees(admin: httpx2.AsyncClient):
    headers = {"X-Forwarded-Proto": "https", "Host": "ai.example.org"}
    (item,) = (await admin.post(GENERATE, json=LINKED, headers=headers)).json()["data"]
    assert item["url"].startswith("https://ai.example.org/v1/images/files/")


async def test_a_full_disk_is_told_as_such_and_leaves_nothing_behind(
    painter: Server, admin: httpx2.AsyncClient, images_folder: Path, small_disk: str
):
    if small_disk:
        pytest.skip(small_disk)
    ballast = fill_up(images_folder / "ballast")
    before = stored(painter)
    for fields in ({}, {"n": 4}, {"response_format": None}):
        response = await admin.post(GENERATE, json=LINKED | fields)
        assert_error(response, 507, "insufficient_storage")
        assert response.headers["x-should-retry"] == "false"
    streamed = await admin.post(GENERATE, json=LINKED | PROGRESS)
    assert streamed.status_code == 200
    *_, last = image_events(streamed.content)
    assert (last["type"], last["error"]["code"]) == ("error", "insufficient_storage")
    assert stored(painter) <= before
    assert await status(admin) == 200  # base64 needs no disk
    ballast.unlink()
    assert (await admin.post(GENERATE, json=LINKED)).status_code == 200


async def test_a_worker_that_dies_ends_a_stream_with_an_error_and_comes_back(
    painter: Server, admin: httpx2.AsyncClient
):
    async with client_of(painter, admin, "three") as client:
        async with client.stream("POST", GENERATE, json=SLOW | PROGRESS | {"n": 3}) as response:
            lines = response.aiter_lines()
            await anext(lines)
            worker_of(painter).kill()
            rest = [line async for line in lines]
        assert "event: error" in rest
        assert '"code":"engine_unavailable"' in rest[-2]
        row = await until_counted(client, 1)
        assert (row["images"], row["errors"]) == (0, 1)
        await asyncio.to_thread(painter.wait_until_ready, 250)
        assert await status(client, n=3) == 200
