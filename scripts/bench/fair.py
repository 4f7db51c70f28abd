"""`bench fair`: one key floods a small server; what another key feels of it, with the fair queue and without."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer
from bench import report
from bench.load import beats
from bench.servers import Server, create_key, running, say, start_hearth

FAIR, FIRST_COME, B_ALONE = "A and B, fair", "A and B, first come", "B alone"
A_ALONE, A_ALONE_FIRST_COME = "A alone, fair", "A alone, first come"
_QUEUE = 512
_LEAD_SECONDS = 2.0  # the flood fills the queue before B asks
_REST_SECONDS = 2.0  # for what is left of the flood, which has disconnected
# A clock that beats as evenly as the flood's rounds would meet each of them at the same place.
_JITTER = 0.2


@dataclass(frozen=True, kw_only=True)
class Fair(report.Benchmark):
    """Measure what one key's flood does to another key, with the fair queue and first come, first served."""

    places: Annotated[int, typer.Option(min=2, help="Requests generated at the same time (max_num_seqs).")] = 4
    flood: Annotated[int, typer.Option(min=1, max=_QUEUE, help="Requests that A keeps in flight.")] = 200
    every_seconds: Annotated[float, typer.Option("--every", min=0.05, help="Seconds between two requests of B.")] = 1.0
    repeats: report.Repeats = 3
    seconds: Annotated[float, typer.Option(min=1, help="How long B sends in one run.")] = 20.0
    max_tokens: report.MaxTokens = 64
    method = "A: closed loop; B: open loop; targets in turns, medians of the repeats"

    async def measure(self) -> report.Report:
        small = {"max_num_seqs": self.places, "max_queued_requests": _QUEUE, "fair_queue": True}
        unfair = small | {"fair_queue": False, "kept_for_newcomers": 0}
        with self.workspace(engine=small) as one, self.workspace(engine=unfair) as other:
            whole = self.begin(one)
            starts = {"fair": partial(start_hearth, one), "first come": partial(start_hearth, other)}
            async with running(one, starts) as servers:
                fairly = partial(self._run, servers["fair"], await create_key(one, "second"))
                first_come = partial(self._run, servers["first come"], await create_key(other, "second"))
                # In this order (and back), those that are compared with each other are neighbours.
                runs: dict[str, Callable[[int], Awaitable[report.Figures]]] = {
                    B_ALONE: partial(fairly, flooded=False, asked=True),
                    FAIR: partial(fairly, flooded=True, asked=True),
                    A_ALONE: partial(fairly, flooded=True, asked=False),
                    A_ALONE_FIRST_COME: partial(first_come, flooded=True, asked=False),
                    FIRST_COME: partial(first_come, flooded=True, asked=True),
                }
                for measure in (fairly, first_come):  # warms up
                    await measure(-1, flooded=True, asked=True, seconds=_LEAD_SECONDS)
                say("Measuring:")
                row = await report.in_turns("flood", runs, lambda run, n: run(n), self.repeats, "b_latency_p95_ms")
        whole.tables = [
            ("What B feels", [_pair(row, FAIR, B_ALONE), _pair(row, FIRST_COME, B_ALONE)]),
            ("What A gets", [_pair(row, FAIR, A_ALONE), _pair(row, A_ALONE, A_ALONE_FIRST_COME)]),
        ]
        return whole

    async def _run(  # noqa: PLR0913
        self, server: Server, second_key: str, repeat: int, *, flooded: bool, asked: bool, seconds: float | None = None
    ) -> report.Figures:
        """Do a run of A (the server's own key), of B (`second_key`) or of both; None for the key that sent nothing."""
        label, seconds = f"{repeat}{flooded}{asked}", seconds or self.seconds
        job = server.chat(
            f"{label}b",
            self.max_tokens,
            key=second_key,
            moments=beats(seconds, self.every_seconds, repeat, _JITTER) if asked else [],
            seconds=seconds,
            beside=server.chat(f"{label}a", self.max_tokens, streams=self.flood) if flooded else None,
            lead_seconds=_LEAD_SECONDS,
        )
        result, _ = await server.measure(job)
        await asyncio.sleep(_REST_SECONDS)
        flood = result.beside
        return {
            "b_requests": len(result.answers) or None,
            **report.percentiles_ms("b_latency", result.latencies, 50, 95, 99),
            **report.percentiles_ms("b_time_to_first_token", result.first_texts, 50, 95),
            **report.percentiles_ms("b_sent_late", result.delays, 95),
            "a_requests_per_second": len(flood.answers) / flood.wall_seconds if flood else None,
            "a_tokens_per_second": flood.tokens / flood.wall_seconds if flood else None,
            **report.percentiles_ms("a_inter_token_latency", flood.gaps if flood else [], 50),
        }


def _pair(row: report.Row, ours: str, theirs: str) -> report.Row:
    return report.row_of(f"{ours} / {theirs}", {name: row.runs[name] for name in (ours, theirs)})
