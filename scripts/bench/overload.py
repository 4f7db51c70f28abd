"""`bench fair`, `bench many`, `bench pictures`: keys that send too much, their effect on others, and the memory.

Floods with the fair queue and first come, first served; a burst of thousands; pictures of many pixels.
"""

import asyncio
import base64
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import msgspec
import typer
from bench import report
from bench.load import CHAT, NUMBER, TEXT, BenchError, LoadJob, LoadResult, beats, chat_body
from bench.servers import Server, family, pss_bytes, running, say, start_hearth
from PIL import Image

ALONE, BESIDE = "alone", "beside"
FAIR, FIRST_COME = "beside, fair", "beside, first come"
MOST_TIMES_A_STEP = 2.0
_QUEUE = 512
_TOKENS_PER_ANSWER = 32  # of the neighbour
_EVERY_SECONDS = 0.75  # from one of its questions to the next
_REST_SECONDS = 2.0  # for the rest of a flood, which has disconnected
_LONGEST_WAIT_SECONDS = 10.0  # of the neighbour; it counts as such
# Random, since even intervals would meet the flood's rounds always at the same place.
_JITTER = 0.2
_WORD = "seven "
_STEPS, _GENERATED = "vllm:iteration_tokens_total_count", "vllm:generation_tokens_total"


@dataclass(frozen=True)
class Case:
    """A flood: `keys` keys together keep `requests` in flight. `engine` are settings of the model."""

    about: str
    requests: int
    max_tokens: int = 1800
    answers: int = 1
    keys: int = 1
    prompt_tokens: int = 0
    lead_seconds: float = 6.0  # the flood fills queue and KV cache before the neighbour asks
    engine: dict[str, Any] = field(default_factory=dict)


_FEW_PLACES = {"max_num_seqs": 32}
# Of the demo model: 1,536 bytes a token, six conversations of the whole context.
_SMALL_CACHE = {"context_length": 2048, "kv_cache_gib": 6 * 2048 * 1536 / 2**30}
CASES = {
    "queue": Case("200 x 64 tokens, 32 places", 200, max_tokens=64, lead_seconds=2.0, engine=_FEW_PLACES),
    "64": Case("64 x 1,800 tokens", 64),
    "100": Case("100 x 1,800 tokens", 100),
    "200": Case("200 x 1,800 tokens", 200),
    "several": Case("60 x 8 answers of 1,800 tokens", 60, answers=8),
    "keys": Case("20 keys x 20 x 1,800 tokens", 400, keys=20),
    "prompts": Case("8 prompts of the whole context", 8, max_tokens=32, prompt_tokens=32600),
    "cache": Case("100 x 1,800 tokens, cache of six conversations", 100, engine=_SMALL_CACHE),
}


@dataclass(frozen=True, kw_only=True)
class Fair(report.Benchmark):
    """Measure what a flood does to another key, with the fair queue and first come, first served."""

    cases: Annotated[Sequence[str], report.listed(report.words, f"Which floods: {', '.join(CASES)}. Default: all.")] = (
        tuple(CASES)
    )
    repeats: report.Repeats = 1
    seconds: Annotated[float, typer.Option(min=1, help="How long the neighbour asks in one run.")] = 10.0
    method = "flood: closed loop; neighbour: open loop; targets in turns, medians of the repeats"

    async def measure(self) -> report.Report:
        if unknown := set(self.cases) - CASES.keys():
            raise BenchError(f"There is no case {unknown.pop()!r}, only: {', '.join(CASES)}.")
        rows: list[report.Row] = []
        settings: list[dict[str, Any]] = []
        for name in self.cases:
            if CASES[name].engine not in settings:
                settings.append(CASES[name].engine)
        for engine in settings:
            cases = {name: CASES[name] for name in self.cases if CASES[name].engine == engine}
            fair = {"max_queued_requests": _QUEUE, "fair_queue": True} | engine
            with (
                self.workspace(engine=fair) as one,
                self.workspace(engine=fair | {"fair_queue": False, "kept_for_newcomers": 0}) as other,
            ):
                whole = self.begin(one)
                starts = {FAIR: partial(start_hearth, one), FIRST_COME: partial(start_hearth, other)}
                async with running(one, starts) as servers:
                    rows += [await self._case(name, case, servers) for name, case in cases.items()]
        whole.tables = [("What the neighbour feels, and what all get", rows)]
        return whole

    async def _case(self, name: str, case: Case, servers: dict[str, Server]) -> report.Row:
        repeats = await _words(servers[FAIR], case.prompt_tokens)
        flood = {
            target: partial(_flood, case, server, await server.more_keys(case.keys), repeats)
            for target, server in servers.items()
        }
        runs = {
            FAIR: partial(self._run, name, case, servers[FAIR], flood[FAIR]),
            ALONE: partial(self._run, name, case, servers[FAIR], None),
            FIRST_COME: partial(self._run, f"{name} first", case, servers[FIRST_COME], flood[FIRST_COME]),
        }
        row = await report.in_turns(case.about, runs, lambda run, repeat: run(repeat), self.repeats, "answer_p95_ms")
        fair, first = row.medians[FAIR], row.medians[FIRST_COME]
        wanted = MOST_TIMES_A_STEP * (fair["steps_of_an_answer_ms"] or 0.0)
        say(
            f"    p95 {report.shown(fair['answer_p95_ms'])} ms, wanted {wanted:.0f}; all tokens/s fair / first come: "
            f"{(fair['all_tokens_per_second'] or 0) / (first['all_tokens_per_second'] or 1):.2f}, wanted 0.9"
        )
        return row

    async def _run(
        self, name: str, case: Case, server: Server, flood: Callable[[str], LoadJob] | None, repeat: int
    ) -> report.Figures:
        """Do a run of the neighbour (the server's own key), alone or beside the keys of the flood."""
        label = f"{name} {repeat}"
        job = server.chat(
            f"{label} b" if flood else f"{label} c",
            _TOKENS_PER_ANSWER,
            moments=beats(self.seconds, _EVERY_SECONDS, repeat, _JITTER),
            leave_after_seconds=_LONGEST_WAIT_SECONDS,
            beside=flood(f"{label} a") if flood else None,
            lead_seconds=case.lead_seconds,
        )
        asking = asyncio.create_task(server.measure(job))
        await asyncio.sleep(case.lead_seconds if flood else 0)
        before, began = await server.counted(_STEPS, _GENERATED), time.perf_counter()
        result, _ = await asking
        seconds = time.perf_counter() - began
        steps, tokens = (
            after - was for after, was in zip(await server.counted(_STEPS, _GENERATED), before, strict=True)
        )
        await asyncio.sleep(_REST_SECONDS)
        beside = {
            "steps_of_an_answer_ms": _TOKENS_PER_ANSWER * seconds / steps * 1000 if steps else None,
            "all_tokens_per_second": tokens / seconds,
        }
        return {
            **_felt(result),
            **(beside if flood else dict.fromkeys(beside)),
        }


async def _words(server: Server, tokens: int) -> int:
    """Return how many words a prompt of so many tokens needs. Raises `BenchError`."""
    if not tokens:
        return 0
    body = chat_body(server.model, 1, streamed=False, text=_WORD * 1000)
    status, answer = await asyncio.to_thread(server.ask, CHAT, body)
    if status != 200:
        raise BenchError(f"A prompt of 1,000 words is answered with status {status}.")
    return int(1000 * tokens / msgspec.json.decode(answer)["usage"]["prompt_tokens"])


def _flood(case: Case, server: Server, keys: list[str], words: int, label: str) -> LoadJob:
    body = chat_body(server.model, case.max_tokens, text=_WORD * words or TEXT)
    if case.answers > 1:
        body |= {"n": case.answers, "temperature": 1}
    return server.job(label, [body], streams=case.requests, key=keys[0], more_keys=keys[1:])


_IDLE_SECONDS = 12  # the server frees unneeded memory every 10 s
_SETTLE_SECONDS = 45.0
_WARM_STREAMS = 256
_SHOWN = 3
_SHOWN_CHARACTERS = 300
BATCHES, CHATS = "batches", "chats"
_CHAT_EVERY_SECONDS = 0.5  # from one short chat to the next
_SIDE_PIXELS = 6000
_DIFFERENT = 12  # pictures; making one takes a third of a second
_SAMPLE_SECONDS = 0.2
_CHAT_TOKENS = 16


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
    """Count the outcomes of requests; print a few that went wrong."""
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


async def _settled(pid: int) -> report.Figures:
    """Return resident memory and open files of the API process, later. Raises `psutil.Error` when it has ended."""
    await asyncio.sleep(_SETTLE_SECONDS)
    api, _ = family(pid)
    return {
        "api_rss_mib": sum(process.memory_info().rss for process in api) / 2**20,
        "api_files": sum(process.num_fds() for process in api),
    }


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
            await server.measure(server.chat("warm", _CHAT_TOKENS, streams=1, requests=3))
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
        await asyncio.sleep(_IDLE_SECONDS)
        idle = _pss_mib(server.pid)
        moments = beats(self.seconds, _CHAT_EVERY_SECONDS, repeat)
        beside = load(f"{label}{repeat}p") if load else None
        job = server.chat(f"{label}{repeat}", _CHAT_TOKENS, key=key, moments=moments, beside=beside, lead_seconds=1.0)
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
            **_felt(result),
        }


def _felt(result: LoadResult) -> report.Figures:
    """Return the figures of the other key."""
    return {
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
    return {"model": server.model, "messages": [{"role": "user", "content": content}], "max_tokens": _CHAT_TOKENS}


def _batches(server: Server, urls: list[str], label: str, items: int = 60, **how: Any) -> LoadJob:
    body = {"requests": [_body(server, [urls[number % len(urls)]]) for number in range(items)]}
    return server.job(label, [body], path="/v1/chat/completions/batch", **({"streams": 6} | how))


def _chats(server: Server, urls: list[str], label: str, **how: Any) -> LoadJob:
    bodies = [_body(server, [url, urls[number - 1]]) for number, url in enumerate(urls)]
    return server.job(label, bodies, **({"streams": 30} | how))
