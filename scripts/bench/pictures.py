"""`bench pictures`: small files of many pixels, in batches and in chats: their memory, and what others feel."""

import asyncio
import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from bench import report
from bench.load import NUMBER, BenchError, LoadJob, beats
from bench.servers import Server, family, pss_bytes
from PIL import Image

ALONE, BESIDE = "alone", "beside"
BATCHES, CHATS = "batches", "chats"
_DIFFERENT = 12  # pictures; to make one takes a third of a second
_SAMPLE_SECONDS = 0.2
_REST_SECONDS = 12.0  # the server gives back what it does not need every 10 s
_TOKENS = 16
_SHOWN = 300


@dataclass(frozen=True, kw_only=True)
class Pictures(report.Benchmark):
    """Measure memory and another key's short chats while one key sends pictures of many pixels."""

    model: report.Model = "service-pro"
    cases: Annotated[
        Sequence[str], report.listed(report.words, "batches: six of 60 pictures; chats: 30 of two. Default: both.")
    ] = (BATCHES, CHATS)
    megapixels: Annotated[float, typer.Option(min=0.01, help="Of each picture.")] = 36.0
    every_seconds: Annotated[
        float, typer.Option("--every", min=0.05, help="Seconds from one short chat to the next.")
    ] = 0.5
    repeats: report.Repeats = 1
    seconds: Annotated[float, typer.Option(min=1, help="How long the short chats are sent in one run.")] = 30.0
    method = "pictures: closed loop; short chats: open loop; PSS of all processes, five times a second"

    async def measure(self) -> report.Report:
        urls = [await asyncio.to_thread(_picture, self.megapixels, number) for number in range(_DIFFERENT)]
        async with self.one_server() as (whole, server):
            (neighbour,) = await server.more_keys(1)
            loads = {
                BATCHES: partial(_batches, server, urls),
                CHATS: partial(_chats, server, urls),
            }
            await server.measure(server.chat("warm", _TOKENS, streams=1, requests=3))
            await server.measure(_chats(server, urls, "warm", streams=1, requests=1))
            result, _ = await server.measure(
                _batches(server, urls, "warm", items=2, streams=1, requests=1, keep_bodies=True)
            )
            if b'"error"' in (said := result.answers[0].body.encode()):
                raise BenchError(f"A batch of two pictures failed: {said[:_SHOWN].decode()}")
            rows = []
            for case in self.cases:
                runs = {
                    BESIDE: partial(self._run, server, neighbour, f"{case}b", loads[case]),
                    ALONE: partial(self._run, server, neighbour, f"{case}a", None),
                }
                rows.append(
                    await report.in_turns(case, runs, lambda run, repeat: run(repeat), self.repeats, "answer_p95_ms")
                )
        whole.tables = [("Memory, and what others feel", rows)]
        return whole

    async def _run(self, server: Server, key: str, label: str, load: Any, repeat: int) -> report.Figures:
        await asyncio.sleep(_REST_SECONDS)
        idle = _level(server.pid)
        moments = beats(self.seconds, self.every_seconds, repeat)
        beside = load(f"{label}{repeat}p") if load else None
        job = server.chat(f"{label}{repeat}", _TOKENS, key=key, moments=moments, beside=beside, lead_seconds=1.0)
        levels = [idle]

        async def sample() -> None:
            while True:
                levels.append(await asyncio.to_thread(_level, server.pid))
                await asyncio.sleep(_SAMPLE_SECONDS)

        sampling = asyncio.create_task(sample())
        try:
            result, _ = await server.measure(job)
        finally:
            sampling.cancel()
        return {
            "idle_mib": idle,
            "peak_mib": max(levels),
            "above_idle_mib": max(levels) - idle,
            "chats": len(result.answers),
            "answered_beside": len(result.beside.answers) if result.beside else None,
            **report.percentiles_ms("answer", result.latencies, 50, 95, 100),
            **report.percentiles_ms("first_token", result.first_texts, 50, 95),
        }


def _level(pid: int) -> float:
    return sum(map(pss_bytes, family(pid))) / 2**20


def _picture(megapixels: float, number: int) -> str:
    side, file = round((megapixels * 1e6) ** 0.5), io.BytesIO()
    Image.new("RGB", (side, side), (number, 80, 200 - number)).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _body(server: Server, urls: list[str]) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": f"{NUMBER} What is this?"}, *parts]
    return {"model": server.model, "messages": [{"role": "user", "content": content}], "max_tokens": _TOKENS}


def _batches(server: Server, urls: list[str], label: str, items: int = 60, **how: Any) -> LoadJob:
    body = {"requests": [_body(server, [urls[number % len(urls)]]) for number in range(items)]}
    return server.job(label, [body], path="/v1/chat/completions/batch", **({"streams": 6} | how))


def _chats(server: Server, urls: list[str], label: str, **how: Any) -> LoadJob:
    bodies = [_body(server, [url, urls[number - 1]]) for number, url in enumerate(urls)]
    return server.job(label, bodies, **({"streams": 30} | how))
