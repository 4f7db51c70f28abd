"""One run of chat requests: the order for it, what was seen by the client, and the figures made of both."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.figures import milliseconds, percentile

if TYPE_CHECKING:
    from benchmarks.figures import Figures
    from benchmarks.footprint import Footprint

_TEXT = "Write a few sentences about the weather, the garden and the people who meet there in the evening."


class ChatJob(msgspec.Struct, frozen=True):
    """Send `requests` requests over `streams` streams, each sending its next one when the last is answered.

    With a `rate` (requests/s) they are sent at the moments of a Poisson process instead, which `seed` decides,
    whether earlier ones are answered or not. `label` sets the prompts apart from those of every other run: nothing
    but the start of the template is cached. `sentences` is how long they are.
    """

    model: str
    streams: int
    requests: int
    streamed: bool
    max_tokens: int
    label: str
    rate: float = 0.0
    seed: int = 0
    sentences: int = 1

    def moments(self) -> list[float]:
        """Return when each request is to be sent, in seconds from the start; with a `rate` only."""
        chance = random.Random(self.seed)  # noqa: S311  # repeatable on purpose
        return list(accumulate(chance.expovariate(self.rate) for _ in range(self.requests)))

    def messages(self, index: int) -> list[dict[str, Any]]:
        """Return the conversation of request number `index`."""
        return [{"role": "user", "content": " ".join([f"{self.label}-{index}.", *[_TEXT] * self.sentences])}]


class Measurement(msgspec.Struct):
    """What the client saw of a run; lists hold one value per request, or per gap between two pieces of text.

    `cpu_seconds` is what the measuring process itself used.
    """

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    completion_tokens: int = 0
    text_events: int = 0
    latency_seconds: list[float] = []
    time_to_first_token_seconds: list[float] = []
    inter_token_latency_seconds: list[float] = []
    late_seconds: list[float] = []

    def add(self, started: float, text_times: list[float], finished: float, completion_tokens: int) -> None:
        """Add one answer; `text_times` are the moments at which text came, empty if it came whole.

        `started` is when it was asked for, or with a rate when it should have been: a sender that is kept waiting
        must not make the server look better.
        """
        self.latency_seconds.append(finished - started)
        self.completion_tokens += completion_tokens
        self.text_events += len(text_times)
        if text_times:
            self.time_to_first_token_seconds.append(text_times[0] - started)
            self.inter_token_latency_seconds += [after - before for before, after in pairwise(text_times)]


def chat_figures(seen: Measurement, footprint: Footprint, *, load_cpu_seconds: float | None) -> Figures:
    """Put a run into figures. `load_cpu_seconds` is None where the API process generates the load itself."""
    requests, tokens = len(seen.latency_seconds), seen.completion_tokens
    first, between, whole = (
        seen.time_to_first_token_seconds,
        seen.inter_token_latency_seconds,
        seen.latency_seconds,
    )
    return {
        "requests_per_second": requests / seen.wall_seconds,
        "tokens_per_second": tokens / seen.wall_seconds,
        "time_to_first_token_p50_ms": milliseconds(percentile(first, 50)),
        "time_to_first_token_p95_ms": milliseconds(percentile(first, 95)),
        "time_to_first_token_p99_ms": milliseconds(percentile(first, 99)),
        "inter_token_latency_p50_ms": milliseconds(percentile(between, 50)),
        "inter_token_latency_p95_ms": milliseconds(percentile(between, 95)),
        "inter_token_latency_p99_ms": milliseconds(percentile(between, 99)),
        "latency_p50_ms": milliseconds(percentile(whole, 50)),
        "latency_p95_ms": milliseconds(percentile(whole, 95)),
        "latency_p99_ms": milliseconds(percentile(whole, 99)),
        "sent_late_p95_ms": milliseconds(percentile(seen.late_seconds, 95)),
        "tokens_per_event": tokens / seen.text_events if seen.text_events else None,
        "api_cpu_ms_per_request": footprint.api_cpu_seconds * 1000 / requests,
        "api_cpu_ms_per_1000_tokens": footprint.api_cpu_seconds * 1e6 / tokens,
        "engine_cpu_ms_per_request": footprint.engine_cpu_seconds * 1000 / requests,
        "engine_cpu_ms_per_1000_tokens": footprint.engine_cpu_seconds * 1e6 / tokens,
        "load_cpu_ms_per_request": None if load_cpu_seconds is None else load_cpu_seconds * 1000 / requests,
        "load_cpu_ms_per_1000_tokens": None if load_cpu_seconds is None else load_cpu_seconds * 1e6 / tokens,
        "api_peak_rss_mib": footprint.api_peak_rss_bytes / 2**20,
        "engine_peak_rss_mib": footprint.engine_peak_rss_bytes / 2**20,
        "api_pss_mib": footprint.api_pss_bytes / 2**20,
        "engine_pss_mib": footprint.engine_pss_bytes / 2**20,
        "requests": requests,
        "wall_seconds": seen.wall_seconds,
    }
