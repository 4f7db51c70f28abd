"""`bench files`: a file batch against the same conversations in batch requests, and interactive requests beside one."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import httpx2
import msgspec
import typer
from bench import report
from bench.load import NUMBER, TEXT, BenchError, beats, chat_body
from bench.servers import Server, say

FILE, REQUESTS, BUSY, IDLE = "file", "requests", "busy", "idle"
_ITEMS = 256  # of a batch request
_JITTER = 0.2
_INTERACTIVE_TOKENS = 16
_REST_SECONDS = 2.0
_POLL_SECONDS = 0.2
_ENDPOINT = "/v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class Files(report.Benchmark):
    """Compare a file batch with batch requests back to back, and interactive requests beside it with an idle server."""

    lines: Annotated[int, typer.Option(min=1, max=50_000, help="Lines of the file.")] = 1024
    repeats: report.Repeats = 3
    seconds: Annotated[float, typer.Option(min=0.1, help="How long interactive requests are sent in a run.")] = 20.0
    every_seconds: Annotated[
        Sequence[float],
        typer.Option("--every", parser=report.numbers, metavar="LIST", help="Seconds from one to the next."),
    ] = (0.1, 0.7)
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
                for seconds in self.every_seconds
            ]
        whole.tables = [("A file and batch requests", [joined]), ("Interactive requests beside a file batch", beside)]
        return whole

    async def _answer(self, server: Server, kind: str, repeat: int) -> report.Figures:
        await asyncio.sleep(_REST_SECONDS)
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
            parts = [{"requests": bodies[first : first + _ITEMS]} for first in range(0, len(bodies), _ITEMS)]
            job = server.job(f"{repeat}", parts, path=f"{_ENDPOINT}/batch", streams=1, requests=len(parts))
            result, _ = await server.measure(job)
            seconds = result.wall_seconds
        return {"wall_seconds": seconds, "lines_per_second": self.lines / seconds}

    async def _interactive(self, server: Server, every_seconds: float, kind: str, repeat: int) -> report.Figures:
        bodies = [chat_body(server.model, _INTERACTIVE_TOKENS, text="What is the time?")]
        job = server.job(f"{repeat} {kind} i", bodies, moments=beats(self.seconds, every_seconds, repeat, _JITTER))
        if kind == IDLE:
            result, _ = await server.measure(job)
            done = None
        else:
            async with self._busy(server, repeat) as counted:
                result, _ = await server.measure(job)
                done = await counted()
        return {
            "requests": len(result.answers),
            **report.percentiles_ms("time_to_first_token", result.first_texts, 50, 95),
            **report.percentiles_ms("latency", result.latencies, 50, 95),
            "lines_per_second": None if done is None else done / result.wall_seconds,
        }

    @asynccontextmanager
    async def _busy(self, server: Server, repeat: int) -> AsyncIterator[Any]:
        """Have a long file batch at work; what is given counts its lines since then."""
        file = await asyncio.to_thread(_upload, server, self._lines(server.model, 50_000, f"{repeat} b"))
        batch = await _begin(server, file)
        while not batch["request_counts"]["completed"]:
            await asyncio.sleep(_POLL_SECONDS)
            batch = await _look(server, batch)
        before = batch["request_counts"]["completed"]

        async def counted() -> int:
            return int((await _look(server, batch))["request_counts"]["completed"] - before)

        try:
            yield counted
        finally:
            await asyncio.to_thread(server.ask, f"/v1/batches/{batch['id']}/cancel", {"x": 1})

    def _lines(self, model: str, count: int, label: object) -> bytes:
        return b"".join(
            msgspec.json.encode(
                {
                    "custom_id": f"line-{number}",
                    "method": "POST",
                    "url": _ENDPOINT,
                    "body": self._body(model, f"{label} {number}"),
                }
            )
            + b"\n"
            for number in range(count)
        )

    def _body(self, model: str, label: str) -> dict[str, Any]:
        content = f"{label}. {TEXT}".replace(NUMBER, "")
        return {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


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
