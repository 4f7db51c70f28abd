"""`bench images`, its second half: chat that is timed while images are asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import TYPE_CHECKING

import pytest
from benchmarks import images_chat_load
from benchmarks.chat_job import ChatJob, Measurement
from benchmarks.http_answers import AnswerError
from benchmarks.images_chat_job import ChatBesideJob, ChatBesideMeasurement, chat_beside_figures

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


CHAT = ChatJob("m", streams=2, requests=4, streamed=True, max_tokens=2, label="x")
STREAM = (
    b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\ndata: {"choices":[{"delta":{"content":" you"}}]}\n\n'
    b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)
IMAGE = b'{"data":[{"b64_json":"aGk="}]}'


def test_figures_of_chat_beside_images_name_each_process():
    chat = Measurement(wall_seconds=2.0, cpu_seconds=0.1)
    chat.add(10.0, [10.5, 10.6, 10.8], 11.0, 4)
    job = ChatBesideJob(CHAT, "i", 8, 256, lead_seconds=0.0)
    seen = ChatBesideMeasurement(chat, {"api": 0.5, "engine_core": 1.0, "image_worker": 2.0, "others": 0.0}, [1.0, 3.0])
    figures = chat_beside_figures(job, seen)
    expected = {
        "inter_token_latency_p50_ms": 150.0,
        "tokens_per_second": 2.0,
        "images_per_second": 1.0,
        "image_latency_p50_ms": 2000.0,
        "api_cpu_percent": 25.0,
        "engine_core_cpu_percent": 50.0,
        "image_worker_cpu_percent": 100.0,
        "load_cpu_percent": 5.0,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert chat_beside_figures(job, ChatBesideMeasurement(chat))["images_per_second"] == 0.0
    alone = ChatBesideJob(CHAT, "i", 0, 256, lead_seconds=0.0)
    assert chat_beside_figures(alone, ChatBesideMeasurement(chat))["images_per_second"] is None


def test_processes_are_told_apart_by_the_names_that_they_give_themselves():
    assert images_chat_load.role_of("hearth-worker", ["python", "-m", "engine.process.child", "7"]) == "image_worker"
    assert images_chat_load.role_of("VLLM::EngineCor", ["VLLM::EngineCore"]) == "engine_core"
    assert images_chat_load.role_of("python", ["python", "-c", "resource_tracker"]) == "others"


@contextlib.asynccontextmanager
async def answering(image_status: str = "200 OK") -> AsyncIterator[tuple[dict[str, int], int]]:
    """A real server that answers chat at once, images too, and counts both."""
    asked = {"/v1/chat/completions": 0, "/v1/images/generations": 0}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split()[1].decode()
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                json.loads(await reader.readexactly(length))
                asked[path] += 1
                await asyncio.sleep(0)  # the others come in meanwhile
                chat = path.endswith("completions")
                status, kind = ("200 OK", "text/event-stream") if chat else (image_status, "application/json")
                body = STREAM if chat else IMAGE
                lines = f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
                await writer.drain()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield asked, server.sockets[0].getsockname()[1]


async def beside(port: int, clients: int) -> ChatBesideMeasurement:
    job = ChatBesideJob(CHAT, "i", clients, 256, lead_seconds=0.05)
    return await images_chat_load.measure(job, host="127.0.0.1", port=port, key="k", server_pid=os.getpid())


async def test_chat_is_timed_while_images_are_asked_for():
    async with answering() as (asked, port):
        seen = await beside(port, clients=3)
    assert len(seen.chat.latency_seconds) == asked["/v1/chat/completions"] == 4
    # Those of the lead do not count.
    assert len(seen.image_seconds) < asked["/v1/images/generations"]
    assert set(seen.cpu_seconds) == {"api", "engine_core", "image_worker", "others"}
    assert seen.cpu_seconds["api"] >= 0


async def test_without_clients_nothing_is_asked_but_chat():
    async with answering() as (asked, port):
        seen = await beside(port, clients=0)
    assert (asked["/v1/images/generations"], seen.image_seconds) == (0, [])


async def test_one_failed_image_request_ends_the_run():
    async with answering("503 Service Unavailable") as (_, port):
        with pytest.raises(AnswerError, match="status 503"):
            await beside(port, clients=1)


def test_every_image_request_of_a_run_is_another_one_and_some_are_long():
    job = ChatBesideJob(CHAT, "i", 8, 256, lead_seconds=0.0)
    bodies = [job.image_fields(client, number) for client in range(8) for number in range(8)]
    assert len({body["seed"] for body in bodies}) == 64
    assert [body["quality"] for body in bodies].count("hd") == 16
