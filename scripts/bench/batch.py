"""`bench batch`, `bench files`: a batch in one request and as a file, and interactive requests beside each."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import httpx2
import msgspec
import typer
from bench import report
from bench.load import NUMBER, TEXT, Answer, BenchError, LoadJob, beats, chat_body
from bench.servers import Server, say

BATCH, SINGLE, BUSY, IDLE = "batch", "single", "busy", "idle"
FILE, REQUESTS = "file", "requests"
_ENDPOINT = "/v1/chat/completions"
_EVERY_SECONDS = 0.1
_JITTER = 0.2
_INTERACTIVE_TOKENS = 16
_REST_SECONDS = 4.0  # single requests are interactive: the server holds back batches for a while after them
_LEAD_SECONDS = 1.0
_FILE_REST_SECONDS = 2.0
_POLL_SECONDS = 0.2
_MOST_ITEMS = 256
_SHOWN_CHARACTERS = 300
_GREEDY = {"temperature": 0, "ignore_eos": True}
_KINDS: tuple[dict[str, Any], ...] = (  # one after the other
    _GREEDY,
    {"temperature": 0.8, "top_p": 0.9, "seed": 1, "ignore_eos": True},
    {"response_format": {"type": "json_object"}, "temperature": 0},
    {"logprobs": True, "top_logprobs": 2, **_GREEDY},
)
_BAD: tuple[dict[str, Any], ...] = ({"max_tokens": "many"}, {"model": "no-such-model"}, {"messages": []})


@dataclass(frozen=True, kw_only=True)
class Batch(report.Benchmark):
    """Compare a batch with single requests, and interactive requests beside batches with those on an idle server."""

    items: Annotated[int, typer.Option(min=1, max=_MOST_ITEMS, help="Items of a batch.")] = 256
    repeats: report.Repeats = 3
    seconds: Annotated[float, typer.Option(min=0.1, help="How long interactive requests are sent in a run.")] = 20.0
    max_tokens: report.MaxTokens = 64
    method = "batches: all at once; interactive: open loop; targets in turns, medians of the repeats"

    async def measure(self) -> report.Report:
        async with self.one_server() as (whole, server):
            send = partial(self._items, server)
            for kind in (BATCH, SINGLE):
                await send(kind, -1)
            say("Measuring a batch against single requests:")
            case = f"{self.items} items, {len(self.bad_places())} bad"
            joined = await report.in_turns(case, {BATCH: BATCH, SINGLE: SINGLE}, send, self.repeats, "items_per_second")
            say("Measuring interactive requests:")
            ask, targets = partial(self._interactive, server), {BUSY: BUSY, IDLE: IDLE}
            beside = await report.in_turns("interactive", targets, ask, self.repeats, "time_to_first_token_p99_ms")
        whole.tables = [("A batch and single requests", [joined]), ("Interactive requests beside batches", [beside])]
        return whole

    async def _items(self, server: Server, kind: str, repeat: int) -> report.Figures:
        """Send a batch, or its good items as single requests at the same moment. Raises `BenchError`."""
        await asyncio.sleep(_REST_SECONDS)
        bodies = [body for place, body in enumerate(self.bodies(server.model)) if place not in self.bad_places()]
        good, job = len(bodies), self._batches(server, f"{repeat} {kind}", requests=1)
        if kind == SINGLE:
            job = server.job(f"{repeat} {kind}", bodies, streams=good, requests=good)
        result, used = await server.measure(job)
        for answer in result.answers if kind == BATCH else ():
            self.check(answer)
        return {
            "items_per_second": good / result.wall_seconds,
            "api_cpu_ms_per_item": used.api_cpu_seconds * 1000 / good,
            "engine_cpu_ms_per_item": used.engine_cpu_seconds * 1000 / good,
        }

    async def _interactive(self, server: Server, kind: str, repeat: int) -> report.Figures:
        """Send short streamed requests, if busy while batches run back to back. Raises `BenchError`."""
        label = f"{repeat} {kind} i"
        # The server gets interactive requests before the batches.
        await server.measure(_questions(server, f"{label}l", beats(_LEAD_SECONDS, _EVERY_SECONDS, repeat)))
        beside = self._batches(server, f"{label}b") if kind == BUSY else None
        job = _questions(server, label, beats(self.seconds, _EVERY_SECONDS, repeat), beside=beside)
        result, _ = await server.measure(job)
        for answer in result.beside.answers if result.beside else ():
            self.check(answer)
        return {
            **report.percentiles_ms("time_to_first_token", result.first_texts, 50, 99),
            **report.percentiles_ms("latency", result.latencies, 50, 99),
        }

    def _batches(self, server: Server, label: str, requests: int = 0) -> LoadJob:
        body = {"requests": self.bodies(server.model)}
        return server.job(label, [body], path=f"{_ENDPOINT}/batch", streams=1, requests=requests, keep_bodies=True)

    def bad_places(self) -> frozenset[int]:
        """Return the places of bad items: a tenth, random but always the same."""
        source = random.Random(self.items)  # noqa: S311  # repeatable on purpose
        return frozenset(source.sample(range(self.items), round(self.items / 10)))

    def bodies(self, model: str) -> list[Any]:
        """Return the items. Good answers have half to one and a half times `max_tokens` tokens, on average once."""
        lengths, half = random.Random(self.items), self.max_tokens // 2  # noqa: S311  # repeatable on purpose
        bodies = [
            {
                "model": model,
                "messages": [{"role": "user", "content": f"{NUMBER}-{index}. {TEXT}"}],
                "max_tokens": lengths.randint(max(1, half), self.max_tokens + half),
                "custom_id": f"item-{index}",
                **_KINDS[index % len(_KINDS)],
            }
            for index in range(self.items)
        ]
        for number, place in enumerate(sorted(self.bad_places())):
            bodies[place] |= _BAD[number % len(_BAD)]
        return bodies

    def check(self, answer: Answer) -> None:
        """Raise `BenchError` unless each item of a batch is answered in its place and exactly the bad ones failed."""
        responses = msgspec.json.decode(answer.body)["responses"]
        wrong = self.bad_places()
        if [response["index"] for response in responses] != [*range(self.items)]:
            raise BenchError(f"a batch of {self.items} was answered with {len(responses)} items, or out of order.")
        for place, response in enumerate(responses):
            if ("error" in response) != (place in wrong) or response["custom_id"] != f"item-{place}":
                shown, due = msgspec.json.encode(response).decode(), "failed" if place in wrong else "not"
                raise BenchError(f"item {place} of a batch should have {due}: {shown[:_SHOWN_CHARACTERS]}")


@dataclass(frozen=True, kw_only=True)
class Files(report.Benchmark):
    """Compare a file batch with batch requests back to back, and interactive requests beside it with an idle server."""

    lines: Annotated[int, typer.Option(min=1, max=50_000, help="Lines of the file.")] = 1024
    repeats: report.Repeats = 3
    seconds: Annotated[float, typer.Option(min=0.1, help="How long interactive requests are sent in a run.")] = 20.0
    every: Annotated[Sequence[float], report.listed(report.numbers, "Between interactive requests, in s.")] = (0.1, 0.7)
    max_tokens: report.MaxTokens = 64
    method = "file: from its batch's creation to its end; requests: of 256 items, back to back; interactive: open loop"

    async def measure(self) -> report.Report:
        async with self.one_server() as (whole, server):
            answer = partial(self._answer, server)
            say("Measuring a file against batch requests:")
            targets = {FILE: FILE, REQUESTS: REQUESTS}
            joined = await report.in_turns(f"{self.lines} lines", targets, answer, self.repeats, "lines_per_second")
            say("Measuring interactive requests:")
            beside = [
                await report.in_turns(
                    f"one each {seconds} s",
                    {BUSY: BUSY, IDLE: IDLE},
                    partial(self._interactive, server, seconds),
                    self.repeats,
                    "time_to_first_token_p95_ms",
                )
                for seconds in self.every
            ]
        whole.tables = [("A file and batch requests", [joined]), ("Interactive requests beside a file batch", beside)]
        return whole

    async def _answer(self, server: Server, kind: str, repeat: int) -> report.Figures:
        await asyncio.sleep(_FILE_REST_SECONDS)
        if kind == FILE:
            file = await asyncio.to_thread(_upload, server, self._lines(server.model, self.lines, repeat))
            began = time.perf_counter()
            batch = await _begin(server, file)
            while batch["status"] not in {"completed", "failed", "expired", "cancelled"}:
                await asyncio.sleep(_POLL_SECONDS)
                batch = await _look(server, batch)
            seconds = time.perf_counter() - began
            if batch["request_counts"]["completed"] != self.lines:
                raise BenchError(f"The batch is {batch['status']}: {batch['request_counts']}.")
        else:
            bodies = [self._body(server.model, f"{repeat} r {number}") for number in range(self.lines)]
            parts = [{"requests": bodies[first : first + _MOST_ITEMS]} for first in range(0, len(bodies), _MOST_ITEMS)]
            job = server.job(f"{repeat}", parts, path=f"{_ENDPOINT}/batch", streams=1, requests=len(parts))
            result, _ = await server.measure(job)
            seconds = result.wall_seconds
        return {"lines_per_second": self.lines / seconds}

    async def _interactive(self, server: Server, every_seconds: float, kind: str, repeat: int) -> report.Figures:
        moments = beats(self.seconds, every_seconds, repeat, _JITTER)
        async with self._busy(server, repeat) if kind == BUSY else nullcontext():
            result, _ = await server.measure(_questions(server, f"{repeat} {kind} i", moments))
        return {
            **report.percentiles_ms("time_to_first_token", result.first_texts, 50, 95),
            **report.percentiles_ms("latency", result.latencies, 50, 95),
        }

    @asynccontextmanager
    async def _busy(self, server: Server, repeat: int) -> AsyncIterator[None]:
        file = await asyncio.to_thread(_upload, server, self._lines(server.model, 50_000, f"{repeat} b"))
        batch = await _begin(server, file)
        while not batch["request_counts"]["completed"]:
            await asyncio.sleep(_POLL_SECONDS)
            batch = await _look(server, batch)
        try:
            yield
        finally:
            await asyncio.to_thread(server.ask, f"/v1/batches/{batch['id']}/cancel", {"x": 1})

    def _lines(self, model: str, count: int, label: object) -> bytes:
        common = {"method": "POST", "url": _ENDPOINT}
        return msgspec.json.Encoder().encode_lines(
            common | {"custom_id": f"line-{number}", "body": self._body(model, f"{label} {number}")}
            for number in range(count)
        )

    def _body(self, model: str, label: str) -> dict[str, Any]:
        asked = {"role": "user", "content": f"{label}. {TEXT}"}
        return {"model": model, "messages": [asked], "max_tokens": self.max_tokens, **_GREEDY}


def _questions(server: Server, label: str, moments: list[float], **how: Any) -> LoadJob:
    bodies = [chat_body(server.model, _INTERACTIVE_TOKENS, text="What is the time?")]
    return server.job(label, bodies, moments=moments, **how)


def _upload(server: Server, content: bytes) -> str:
    sent = httpx2.post(
        f"http://{server.host}:{server.port}/v1/files",
        files={"file": ("lines.jsonl", content)},
        data={"purpose": "batch"},
        headers={"Authorization": f"Bearer {server.key}"},
        timeout=600,
    )
    if sent.status_code != 200:
        raise BenchError(f"The file was not taken: status {sent.status_code}.")
    return str(sent.json()["id"])


async def _begin(server: Server, file: str) -> dict[str, Any]:
    body = {"input_file_id": file, "endpoint": _ENDPOINT, "completion_window": "24h"}
    status, answer = await asyncio.to_thread(server.ask, "/v1/batches", body)
    if status != 200:
        raise BenchError(f"No batch was made: status {status}.")
    made: dict[str, Any] = msgspec.json.decode(answer)
    return made


async def _look(server: Server, batch: dict[str, Any]) -> dict[str, Any]:
    _, answer = await asyncio.to_thread(server.ask, f"/v1/batches/{batch['id']}")
    found: dict[str, Any] = msgspec.json.decode(answer)
    return found
