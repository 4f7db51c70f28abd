"""The second part of `bench images`: chat on a real server, alone and while images are made beside it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from benchmarks.children import Child
from benchmarks.compare import Case, Row, compare, say
from benchmarks.hearth import HearthServer
from benchmarks.images_chat_job import BESIDE, IDLE, ChatBesideJob, ChatBesideMeasurement, chat_beside_figures
from benchmarks.load import KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.chat_job import ChatJob
    from benchmarks.figures import Figures
    from benchmarks.workplace import Workplace

_START_SECONDS = 900.0  # a large model is read from a slow disk
_REST_SECONDS = 2.0  # for the images on which their clients have hung up
_LEAD_SECONDS = 2.0
_WARM_REQUESTS = 16


class ChatTarget:
    """Chat with images beside it, or without."""

    def __init__(self, name: str, sender: Child) -> None:
        self.name = name
        self._sender = sender

    async def measure(self, job: ChatBesideJob) -> Figures:
        """Do one run. Raises `BenchError`."""
        # Both ask the same server: with the same prompts, the second would find them in the cache.
        label = f"{job.chat.label}{'b' if self.name == BESIDE else 'a'}"
        order = msgspec.structs.replace(
            job,
            clients=job.clients if self.name == BESIDE else 0,
            chat=msgspec.structs.replace(job.chat, label=label),
        )
        seen = await self._sender.run(order, ChatBesideMeasurement)
        await asyncio.sleep(_REST_SECONDS)
        return chat_beside_figures(order, seen)


async def measured(place: Workplace, job: ChatBesideJob, *, repeats: int, seconds: float) -> Row:
    """Start the server, measure about `2 * repeats * seconds`, end it. Raises `BenchError`.

    How many requests of `job.chat` fill `seconds` on the idle server is found out first; both targets get as many.
    """
    say("Starting a server with both models.")
    async with _started(place) as targets:
        job = await _filled(job, targets, seconds)
        say(f"Measuring {job.chat.requests} chat requests a run, at least {2 * repeats * seconds:.0f} s:")

        def of_repeat(repeat: int) -> ChatBesideJob:
            return msgspec.structs.replace(job, chat=msgspec.structs.replace(job.chat, label=f"r{repeat}"))

        case = Case(f"{job.chat.streams} streams, {job.clients} image clients", of_repeat)
        (row,) = await compare(targets, [case], repeats=repeats, headline="inter_token_latency_p99_ms")
    return row


def beside_job(chat: ChatJob, image_model: str, *, clients: int, size: int) -> ChatBesideJob:
    """Return the work of a run."""
    return ChatBesideJob(chat, image_model, clients, size, _LEAD_SECONDS)


async def _filled(job: ChatBesideJob, targets: list[ChatTarget], seconds: float) -> ChatBesideJob:
    warm = msgspec.structs.replace(job.chat, label="warm", requests=max(_WARM_REQUESTS, 2 * job.chat.streams))
    for target in targets:  # the last one tells the speed of the idle server
        figures = await target.measure(msgspec.structs.replace(job, chat=warm))
    requests_per_second = (figures["tokens_per_second"] or 0.0) / job.chat.max_tokens
    rounds = max(2, round(requests_per_second * seconds / job.chat.streams))
    chat = msgspec.structs.replace(job.chat, requests=rounds * job.chat.streams)
    return msgspec.structs.replace(job, chat=chat)


@contextlib.asynccontextmanager
async def _started(place: Workplace) -> AsyncIterator[list[ChatTarget]]:
    async with contextlib.AsyncExitStack() as stack:
        server = await HearthServer.start(place, within_seconds=_START_SECONDS)
        stack.push_async_callback(server.stop)
        sender = await Child.start(
            "sender",
            "benchmarks.images_chat_load",
            *(server.host, str(server.port), str(server.pid)),
            environment=place.environment | {KEY_VARIABLE: server.key},
            log=place.log("images_chat_load"),
        )
        stack.push_async_callback(sender.stop)
        yield [ChatTarget(BESIDE, sender), ChatTarget(IDLE, sender)]
