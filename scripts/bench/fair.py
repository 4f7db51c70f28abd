"""`bench fair`: keys that send too much, and what another key feels of it: by the fair rules, and first come."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import msgspec
import typer
from bench import report
from bench.load import CHAT, TEXT, BenchError, LoadJob, beats, chat_body
from bench.servers import Server, running, say, start_hearth

ALONE, FAIR, FIRST_COME = "alone", "beside, fair", "beside, first come"
MOST_TIMES_A_STEP = 2.0
_QUEUE = 512
_TOKENS_PER_ANSWER = 32  # of the neighbour
_EVERY_SECONDS = 0.75  # from one of its questions to the next
_REST_SECONDS = 2.0  # for what is left of a flood, which has disconnected
_LONGEST_WAIT_SECONDS = 10.0  # of the neighbour; it counts as such
# A clock that beats as evenly as the flood's rounds would meet each of them at the same place.
_JITTER = 0.2
_WORD = "seven "
_STEPS, _TOKENS = "vllm:iteration_tokens_total_count", "vllm:generation_tokens_total"


@dataclass(frozen=True)
class Case:
    """What floods: `keys` keys keep `requests` in flight together. `engine` are settings of the model."""

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
    """Measure what a flood does to another key, by the fair rules and first come, first served."""

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
        before, began = await server.counted(_STEPS, _TOKENS), time.perf_counter()
        result, _ = await asking
        seconds = time.perf_counter() - began
        steps, tokens = (after - was for after, was in zip(await server.counted(_STEPS, _TOKENS), before, strict=True))
        await asyncio.sleep(_REST_SECONDS)
        beside = {
            "steps_of_an_answer_ms": _TOKENS_PER_ANSWER * seconds / steps * 1000 if steps else None,
            "all_tokens_per_second": tokens / seconds,
        }
        return {
            **report.percentiles_ms("answer", result.latencies, 50, 95),
            **report.percentiles_ms("first_token", result.first_texts, 50, 95),
            **(beside if flood else dict.fromkeys(beside)),
        }


async def _words(server: Server, tokens: int) -> int:
    """Return how often a word has to be said in a prompt of so many tokens. Raises `BenchError`."""
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
