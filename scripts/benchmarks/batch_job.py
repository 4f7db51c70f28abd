"""The orders for batches and for interactive requests, what their senders saw, and what a right answer is."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.batch_items import bad_places, batch_items, custom_id
from benchmarks.errors import BenchError
from benchmarks.figures import milliseconds, percentile

if TYPE_CHECKING:
    from benchmarks.figures import Figures
    from benchmarks.footprint import Footprint

_SHOWN_CHARACTERS = 300


class BatchJob(msgspec.Struct, frozen=True):
    """Send `items` mixed items, the part `bad` of them bad: as one batch, or the good ones as single requests.

    `seconds` above 0: batch after batch, until that time has passed and the last one is answered.
    """

    model: str
    items: int
    bad: float
    max_tokens: int
    label: str
    batched: bool = True
    seconds: float = 0.0

    def bodies(self, number: int = 0) -> list[Any]:
        """Return the items of batch `number`, good and bad, in order."""
        return batch_items(self.model, self.items, self.bad, self.max_tokens, self.label_of(number))

    def label_of(self, number: int) -> str:
        """Return what the prompts of batch `number` begin with."""
        return f"{self.label}-{number}"

    @property
    def bad_places(self) -> frozenset[int]:
        """Which items must fail."""
        return bad_places(self.items, self.bad)


class InteractiveJob(msgspec.Struct, frozen=True):
    """Send a short streamed request about every `every_seconds`, whether earlier ones are answered or not."""

    model: str
    seconds: float
    every_seconds: float
    max_tokens: int
    label: str
    seed: int

    def moments(self) -> list[float]:
        """Return when each request is sent, in seconds: one in each interval, at a place that chance decides."""
        chance = random.Random(self.seed)  # noqa: S311  # no secret
        count = max(1, round(self.seconds / self.every_seconds))
        return [(number + chance.random()) * self.every_seconds for number in range(count)]

    def fields(self, index: int) -> dict[str, Any]:
        """Return the body of request number `index`."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": f"{self.label}-{index}. What is the time?"}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


class BatchJobs(msgspec.Struct, frozen=True):
    """One case of either part: the batches, and the interactive requests beside them."""

    batch: BatchJob
    interactive: InteractiveJob


class BatchMeasurement(msgspec.Struct):
    """What the sender of a `BatchJob` saw. `cpu_seconds` is what it used itself."""

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    good_items: int = 0
    completion_tokens: int = 0
    batches: int = 0


class InteractiveMeasurement(msgspec.Struct):
    """What the sender of an `InteractiveJob` saw, one value per request."""

    time_to_first_token_seconds: list[float] = []
    latency_seconds: list[float] = []
    late_seconds: list[float] = []  # how long after its moment each one was really sent


def check_batch(answer: Any, job: BatchJob, number: int) -> int:
    """Return how many tokens a batch's answer has.

    Raises `BenchError` unless each item is answered in its place and exactly the bad ones failed.
    """
    responses = answer["responses"]
    bodies = job.bodies(number)
    if len(responses) != job.items:
        raise BenchError(f"a batch of {job.items} items was answered with {len(responses)}.")
    for place, (body, response) in enumerate(zip(bodies, responses, strict=True)):
        name = custom_id(job.label_of(number), place) if isinstance(body, dict) else None
        if (response["index"], response["custom_id"]) != (place, name):
            raise BenchError(f"item {place} ({name}) of a batch is not answered in its place: {_shown(response)}")
        if ("error" in response) != (place in job.bad_places):
            wrong = "a bad item was answered" if place in job.bad_places else "a good item failed"
            raise BenchError(f"{wrong}, item {place} of a batch: {_shown(response)}")
    bad = len(job.bad_places)
    if answer["counts"] != {"total": job.items, "succeeded": job.items - bad, "failed": bad}:
        raise BenchError(f"a batch of {job.items} items, {bad} of them bad, counts {_shown(answer['counts'])}.")
    return sum(response["usage"]["completion_tokens"] for response in responses if "usage" in response)


def batch_figures(seen: BatchMeasurement, footprint: Footprint) -> Figures:
    """Put a run of batches or single requests into figures. An item is one that was answered without an error."""
    items = seen.good_items
    return {
        "wall_seconds": seen.wall_seconds,
        "items_per_second": items / seen.wall_seconds,
        "tokens_per_second": seen.completion_tokens / seen.wall_seconds,
        "api_cpu_ms_per_item": footprint.api_cpu_seconds * 1000 / items,
        "engine_cpu_ms_per_item": footprint.engine_cpu_seconds * 1000 / items,
        "load_cpu_ms_per_item": seen.cpu_seconds * 1000 / items,
        "api_peak_rss_mib": footprint.api_peak_rss_bytes / 2**20,
        "engine_peak_rss_mib": footprint.engine_peak_rss_bytes / 2**20,
        "items": items,
        "completion_tokens": seen.completion_tokens,
    }


def interactive_figures(seen: InteractiveMeasurement, batches: BatchMeasurement | None) -> Figures:
    """Put a run of interactive requests into figures; `batches` is what ran beside them, if anything did."""
    first, whole, late = seen.time_to_first_token_seconds, seen.latency_seconds, seen.late_seconds
    return {
        "requests": len(first),
        "time_to_first_token_p50_ms": milliseconds(percentile(first, 50)),
        "time_to_first_token_p99_ms": milliseconds(percentile(first, 99)),
        "latency_p50_ms": milliseconds(percentile(whole, 50)),
        "latency_p99_ms": milliseconds(percentile(whole, 99)),
        "sent_late_p99_ms": milliseconds(percentile(late, 99)),
        "batches": None if batches is None else batches.batches,
        "items_per_second": None if batches is None else batches.good_items / batches.wall_seconds,
    }


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:_SHOWN_CHARACTERS]
