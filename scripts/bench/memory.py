"""`bench many`, `bench pictures`: a burst of thousands, pictures of many pixels: what fails, and the memory."""

import asyncio
import base64
import io
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from bench import report
from bench.load import NUMBER, BenchError, LoadJob, LoadResult, beats
from bench.servers import Server, family, pss_bytes, say
from PIL import Image

_RESTS_SECONDS = 12  # the server gives back what it does not need every 10 s
_SETTLE_SECONDS = 45.0
_WARM_STREAMS = 256
_SHOWN = 3
_SHOWN_CHARACTERS = 300
ALONE, BESIDE = "alone", "beside"
BATCHES, CHATS = "batches", "chats"
_EVERY_SECONDS = 0.5  # from one short chat to the next
_SIDE_PIXELS = 6000
_DIFFERENT = 12  # pictures; to make one takes a third of a second
_SAMPLE_SECONDS = 0.2
_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Many(report.Benchmark):
    """Send thousands of requests at once: each is answered or refused with Retry-After, and memory comes back."""

    requests: Annotated[int, typer.Option(min=1, help="Streamed requests at the same moment.")] = 2000
    max_tokens: report.MaxTokens = 64
    repeats: report.Repeats = 3
    method = "one burst after the other; levels read 45 s later"

    async def measure(self) -> report.Report:
        async with self.one_server() as (whole, server):
            await self._burst(server, "warm", min(_WARM_STREAMS, self.requests))
            before = await _settled(server.pid)
            bursts: list[report.Figures] = []
            for number in range(self.repeats):
                seen = await self._burst(server, f"many {number}", self.requests)
                say(f"  burst {number + 1}: {seen['answered']:.0f} answered, {seen['wrong']:.0f} wrong")
                bursts.append(seen | await _settled(server.pid))
        row = report.row_of("burst", {"after": bursts, "before": [before] * self.repeats})
        whole.tables = [(f"{self.requests} requests at once", [row])]
        return whole

    async def _burst(self, server: Server, label: str, requests: int) -> report.Figures:
        how: dict[str, Any] = {"streams": requests, "requests": requests, "strict": False}
        result, _ = await server.measure(server.chat(label, self.max_tokens, **how))
        return outcome(result)


def outcome(result: LoadResult) -> report.Figures:
    """Put what became of the requests into figures; a few that went wrong are shown."""
    refused = [answer for answer in result.answers if answer.refused]
    wrong = [answer for answer in result.answers if not answer.refused and answer.problem]
    good = [answer for answer in result.answers if not answer.problem]
    for answer in wrong[:_SHOWN]:
        say(f"  {answer.problem}")
    return {
        "answered": len(good),
        "refused": len(refused),
        "wrong": len(wrong),
        **report.percentiles_ms("answered", [answer.seconds for answer in good], 50, 99),
        **report.percentiles_ms("refused", [answer.seconds for answer in refused], 50, 99),
    }


def level(pid: int) -> report.Figures:
    """Return resident memory and open files of the API process. Raises `psutil.Error` when it has ended."""
    api, _ = family(pid)
    return {
        "api_rss_mib": sum(process.memory_info().rss for process in api) / 2**20,
        "api_files": sum(process.num_fds() for process in api),
    }


async def _settled(pid: int) -> report.Figures:
    await asyncio.sleep(_SETTLE_SECONDS)
    return level(pid)


@dataclass(frozen=True, kw_only=True)
class Pictures(report.Benchmark):
    """Measure memory and another key's short chats while one key sends pictures of many pixels."""

    model: report.Model = "service-pro"
    repeats: report.Repeats = 1
    seconds: Annotated[float, typer.Option(min=1, help="How long the short chats are sent in one run.")] = 30.0
    method = "pictures: closed loop; short chats: open loop; PSS of all processes, five times a second"

    async def measure(self) -> report.Report:
        urls = [await asyncio.to_thread(_picture, number) for number in range(_DIFFERENT)]
        async with self.one_server() as (whole, server):
            (neighbour,) = await server.more_keys(1)
            loads = {BATCHES: partial(_batches, server, urls), CHATS: partial(_chats, server, urls)}
            await server.measure(server.chat("warm", _TOKENS, streams=1, requests=3))
            await server.measure(_chats(server, urls, "warm", streams=1, requests=1))
            result, _ = await server.measure(
                _batches(server, urls, "warm", items=2, streams=1, requests=1, keep_bodies=True)
            )
            if b'"error"' in (said := result.answers[0].body.encode()):
                raise BenchError(f"A batch of two pictures failed: {said[:_SHOWN_CHARACTERS].decode()}")
            rows = []
            for case, load in loads.items():
                runs = {
                    BESIDE: partial(self._run, server, neighbour, f"{case}b", load),
                    ALONE: partial(self._run, server, neighbour, f"{case}a", None),
                }
                rows.append(
                    await report.in_turns(case, runs, lambda run, repeat: run(repeat), self.repeats, "answer_p95_ms")
                )
        whole.tables = [("Memory, and what others feel", rows)]
        return whole

    async def _run(self, server: Server, key: str, label: str, load: Any, repeat: int) -> report.Figures:
        await asyncio.sleep(_RESTS_SECONDS)
        idle = _pss_mib(server.pid)
        moments = beats(self.seconds, _EVERY_SECONDS, repeat)
        beside = load(f"{label}{repeat}p") if load else None
        job = server.chat(f"{label}{repeat}", _TOKENS, key=key, moments=moments, beside=beside, lead_seconds=1.0)
        levels = [idle]

        async def sample() -> None:
            while True:
                levels.append(await asyncio.to_thread(_pss_mib, server.pid))
                await asyncio.sleep(_SAMPLE_SECONDS)

        sampling = asyncio.create_task(sample())
        try:
            result, _ = await server.measure(job)
        finally:
            sampling.cancel()
        return {
            "above_idle_mib": max(levels) - idle,
            "answered_beside": len(result.beside.answers) if result.beside else None,
            **report.percentiles_ms("answer", result.latencies, 50, 95),
            **report.percentiles_ms("first_token", result.first_texts, 50, 95),
        }


def _pss_mib(pid: int) -> float:
    return sum(map(pss_bytes, family(pid))) / 2**20


def _picture(number: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (_SIDE_PIXELS, _SIDE_PIXELS), (number, 80, 200 - number)).save(file, "png")
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
