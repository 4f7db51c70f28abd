"""The sender of chat beside images, a process of its own: both in a closed loop over HTTP, chat is what is timed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import psutil
import uvloop

from benchmarks import load
from benchmarks.chat_job import Measurement
from benchmarks.children import serve_jobs
from benchmarks.http_answers import AnswerError, Connection
from benchmarks.images_chat_job import ChatBesideJob, ChatBesideMeasurement
from engine.process.child import PROCESS_NAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

API, ENGINE, IMAGES, OTHERS = "api", "engine_core", "image_worker", "others"
ROLES = (API, ENGINE, IMAGES, OTHERS)
_ENGINE_CORE = "EngineCore"


async def measure(job: ChatBesideJob, *, host: str, port: int, key: str, server_pid: int) -> ChatBesideMeasurement:
    """Do one run. Raises `BenchError` when a single answer is no success: such a run says nothing."""
    seen = ChatBesideMeasurement(Measurement())
    async with _images(job, host, port, key, seen):
        if job.clients:
            await asyncio.sleep(job.lead_seconds)
        seen.image_seconds.clear()
        before = cpu_seconds_by_role(server_pid)
        seen.chat = await load.measure(job.chat, host=host, port=port, key=key)
        after = cpu_seconds_by_role(server_pid)
    seen.cpu_seconds = {role: after[role] - before[role] for role in ROLES}
    return seen


def cpu_seconds_by_role(server_pid: int) -> dict[str, float]:
    """Return the processor time so far of the server's processes, those that have ended left out."""
    server = psutil.Process(server_pid)
    used = dict.fromkeys(ROLES, 0.0)
    for process in (server, *server.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            role = API if process.pid == server_pid else role_of(process.name(), process.cmdline())
            used[role] += times.user + times.system
    return used


def role_of(name: str, command: list[str]) -> str:
    """Return what a process below the server does, by the name that it has given itself."""
    if name == PROCESS_NAME:
        return IMAGES
    return ENGINE if _ENGINE_CORE in " ".join((name, *command)) else OTHERS


@contextlib.asynccontextmanager
async def _images(
    job: ChatBesideJob, host: str, port: int, key: str, seen: ChatBesideMeasurement
) -> AsyncIterator[None]:
    """Have images made meanwhile, then hang up on what is left. Raises `AnswerError` if an answer was no success."""

    async def client(number: int) -> None:
        for image in count():
            fields = job.image_fields(number, image)
            request = load.encoded("/v1/images/generations", fields, host=host, key=key)
            # Images take long, and the server closes what rests
            connection = await Connection.open(host, port)
            try:
                answer = await connection.ask(request)
            finally:
                connection.close()
            check_image(answer.status, answer.body)
            seen.image_seconds.append(answer.finished - answer.started)

    clients = [asyncio.create_task(client(number)) for number in range(job.clients)]
    try:
        yield
        for ended in filter(asyncio.Task.done, clients):  # none does unless it failed
            ended.result()
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


def check_image(status: int, body: bytes) -> None:
    """Raise `AnswerError` unless the answer holds an image."""
    if status == 200:
        with contextlib.suppress(msgspec.DecodeError, KeyError, IndexError, TypeError):
            if msgspec.json.decode(body)["data"][0]["b64_json"]:
                return
    shown = body[:300].decode(errors="replace").strip()
    raise AnswerError(f"an image request was answered with status {status} and no image: {shown or 'nothing'}")


def main() -> None:
    """Take jobs from stdin. Arguments: host, port, the server's process; the key comes in the environment."""
    host, port, pid = sys.argv[1:]
    key = os.environ[load.KEY_VARIABLE]
    run = partial(measure, host=host, port=int(port), key=key, server_pid=int(pid))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_jobs(ChatBesideJob, run))


if __name__ == "__main__":
    main()
