"""The rows of `bench chat`: which loads there are, how many requests fill a run of each, and the jobs made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.chat_job import ChatJob
from benchmarks.compare import Case, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare import Target

_FEWEST_REQUESTS = 8
_FEWEST_ROUNDS = 2
_WARM_STREAMS = 32


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are sent: `streams` at the same time, or else `rate` a second."""

    streamed: bool
    streams: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        """The row's name."""
        return f"{'streamed' if self.streamed else 'plain'}, {self.short}"

    @property
    def short(self) -> str:
        """The load without its kind."""
        return f"{self.rate:g}/s" if self.rate else str(self.streams)

    @property
    def way(self) -> str:
        """Which kind of loop."""
        return "open loop" if self.rate else "closed loop"

    @property
    def size(self) -> float:
        """What loads of one way are ordered by."""
        return self.rate or self.streams


@dataclass(frozen=True, slots=True)
class Shape:
    """What all requests have in common. `seconds` is how long one run should about take."""

    model: str
    max_tokens: int
    seconds: float

    def job(self, load: Load, requests: int, label: str, seed: int = 0) -> ChatJob:
        """Return the work of one run; `label` must be new, or the prompts are cached."""
        return ChatJob(
            self.model, load.streams, requests, load.streamed, self.max_tokens, label, rate=load.rate, seed=seed
        )


def loads(streams: Sequence[int], rates: Sequence[float], kinds: Sequence[str]) -> list[Load]:
    """Return the loads of all rows, streamed before plain, closed loop before open."""
    both = [kind == "streamed" for kind in ("streamed", "plain") if kind in kinds]
    closed = [Load(streamed, streams=number) for streamed in both for number in streams]
    return closed + [Load(streamed, rate=rate) for streamed in both for rate in rates]


async def cases_for(shape: Shape, wanted: Sequence[Load], targets: Sequence[Target[ChatJob]]) -> list[Case[ChatJob]]:
    """Warm all targets up for each load and find out how many requests fill a run. Raises `BenchError`."""
    return [_case(shape, load, await _requests(shape, load, targets)) for load in wanted]


async def _requests(shape: Shape, load: Load, targets: Sequence[Target[ChatJob]]) -> int:
    """Return how many requests the first target needs to fill a run.

    In whole rounds, because the requests of a round begin and end together: a part of one would run half empty.
    """
    streams = load.streams or _WARM_STREAMS
    warm = Load(load.streamed, streams=streams)
    job = shape.job(warm, max(streams, _FEWEST_REQUESTS), f"warm-{load.name}")
    speeds = [(await target.measure(job))["requests_per_second"] or 0.0 for target in targets]
    if load.rate:
        requests = max(_FEWEST_REQUESTS, round(load.rate * shape.seconds))
    else:
        rounds = max(_FEWEST_ROUNDS, _FEWEST_REQUESTS // streams, round(speeds[0] * shape.seconds / streams))
        requests = rounds * streams
    say(f"  {load.name}: {requests} requests a run")
    return requests


def _case(shape: Shape, load: Load, requests: int) -> Case[ChatJob]:
    kind = "s" if load.streamed else "p"
    return Case(load.name, lambda repeat: shape.job(load, requests, f"{repeat}-{load.short}-{kind}", seed=repeat))
