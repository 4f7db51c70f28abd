"""Many image requests at once, and what a dying or broken image model costs. Real processes and real signals."""

import asyncio
import base64
import io
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import yaml
from demo_models.promised import fixed_images
from PIL import Image
from serving import READY_SECONDS, ROOT, Server, async_poll_until
from shape_judge import UNCLEAR, judge
from speech_parts import HELLO_EMMA, SPEECH, VOICE_MODEL

from engine.demo import weights_dir

pytestmark = pytest.mark.engine

PATH = "/v1/images/generations"
SMALL = {"model": "service-image", "size": "256x256", "response_format": "b64_json", "output_format": "jpeg"}
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


def image_worker(server: Server) -> psutil.Process:
    """The process that holds the image model; its command line says what it serves."""
    children = psutil.Process(server.pid).children(recursive=True)
    [found] = [child for child in children if any("diffusers.service" in word for word in child.cmdline())]
    return found


async def picture(http: httpx2.AsyncClient, prompt: str) -> tuple[str, str]:
    response = await http.post(PATH, json={**SMALL, "prompt": prompt}, timeout=200)
    assert response.status_code == 200, response.text
    image = Image.open(io.BytesIO(base64.b64decode(response.json()["data"][0]["b64_json"])))
    assert image.size == (256, 256)
    return await asyncio.to_thread(judge, image)


@pytest.mark.parametrize("rounds", [(40,), pytest.param((200, 70, 70), marks=pytest.mark.rounds)], ids=str)
async def test_many_at_once_lose_nothing_and_cross_nothing(
    server: Server, http: httpx2.AsyncClient, rounds: tuple[int, ...]
):
    worker = image_worker(server)
    asked = [fixed_images()[number % len(fixed_images())] for number in range(rounds[0])]
    sizes = []
    for many in rounds:
        got = await asyncio.gather(*(picture(http, one.prompt) for one in asked[:many]))
        mistaken = [
            (one.prompt, seen)
            for one, seen in zip(asked, got, strict=False)
            if seen[0] not in {one.colour, UNCLEAR} or seen[1] not in {one.shape, UNCLEAR}
        ]
        assert mistaken == []
        unclear = sum(UNCLEAR in seen for seen in got)
        assert unclear <= max(3, many // 20), "so small a model draws a ragged shape now and then"
        sizes.append(worker.memory_info().rss)
    megabytes = [size >> 20 for size in sizes]
    if len(rounds) > 2:
        assert megabytes[2] < megabytes[1] * 1.05, f"the worker keeps growing: {megabytes} MiB"


async def test_a_killed_worker_costs_its_requests_and_comes_back_by_itself(server: Server, http: httpx2.AsyncClient):
    restarts = await restarts_of(http, "service-plus")
    body = {**SMALL, "prompt": "a red circle", "size": "1024x1024", "quality": "hd", "n": 4}
    job = asyncio.create_task(http.post(PATH, json=body))
    chats = [asyncio.create_task(chat(http)) for _ in range(4)]
    worker = image_worker(server)
    idle = sum(worker.cpu_times()[:2])
    await async_poll_until(lambda: sum(worker.cpu_times()[:2]) > idle + 0.1, 60)  # it draws
    os.kill(worker.pid, signal.SIGKILL)
    refused = await job
    assert refused.status_code == 503, refused.text
    assert refused.json()["error"]["code"] == "engine_unavailable"
    assert int(refused.headers["retry-after"]) > 0
    assert [answer.status_code for answer in await asyncio.gather(*chats)] == [200] * 4

    async with asyncio.timeout(READY_SECONDS):
        while (answer := await http.post(PATH, json={**SMALL, "prompt": "a red circle"})).status_code == 503:
            continue
    assert answer.status_code == 200, answer.text
    assert image_worker(server).pid != worker.pid
    assert await restarts_of(http, "service-plus") == restarts


async def chat(http: httpx2.AsyncClient) -> httpx2.Response:
    return await http.post("/v1/chat/completions", json={**CHAT, "model": "service-plus"})


async def restarts_of(http: httpx2.AsyncClient, model: str) -> Any:
    return (await http.get("/health/ready")).json()["models"][model]["restarts"]


async def test_models_that_cannot_be_loaded_are_named_and_everything_else_is_served(tmp_path: Path):
    config = yaml.safe_load((ROOT / "models.yaml").read_text())
    # Voices are spoken by a worker like that of images, and load faster than a chat model.
    config["models"] = {name: config["models"][name] for name in ("service-image", VOICE_MODEL)}
    config["models"]["wrong"] = {"task": "chat", "tier": "standard", "capabilities": ["chat"], "weights": "not-there"}
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(config))
    server = Server(tmp_path, environment={"HEARTH_MODELS": str(tmp_path / "models.yaml")})
    folder = server.weights_dir / "service-image"
    shutil.copytree(weights_dir("image"), folder)
    broken = next((folder / "transformer").glob("*.safetensors"))
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    server.start()
    try:
        server.wait_for_line(rf"service-image cannot be loaded.*transformer/{broken.name}")
        server.wait_for_line(rf"{VOICE_MODEL}: ready")
        assert server.admin_key is not None
        headers = {"Authorization": f"Bearer {server.admin_key.text}"}
        async with httpx2.AsyncClient(base_url=server.root_url, headers=headers, timeout=60) as http:
            ready = (await http.get("/health/ready")).json()
            assert {name: model["status"] for name, model in ready["models"].items()} == {
                "service-image": "failed",
                VOICE_MODEL: "ready",
                "wrong": "failed",
            }
            assert "cannot be loaded as it is configured" in ready["models"]["wrong"]["reason"]
            assert "not-there" not in str(ready)
            assert (await http.post(SPEECH, json=HELLO_EMMA)).status_code == 200
            refused = await http.post(PATH, json={**SMALL, "prompt": "a red circle"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
            assert broken.name not in refused.text
        assert server.stop() == 0
    finally:
        server.kill()
