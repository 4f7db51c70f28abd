"""`bench batch`: a batch against the same requests one by one, and interactive requests beside batches."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from bench.chat import TEXT, chat_body, tokens_of
from bench.figures import Figures, in_turns, percentiles_ms, say
from bench.hearth import HearthServer, Workspace, load_generator, open_workspace, running
from bench.load import NUMBER, LoadJob, LoadResult
from bench.processes import BenchError, Child, Meter
from bench.report import JsonFile, MaxTokens, Model, Models, Repeats, Report, WeightsDir, conditions, ending_cleanly

BATCH, SINGLE, BUSY, IDLE = "batch", "single", "busy", "idle"
_PATH = "/v1/chat/completions/batch"
_EVERY_SECONDS = 0.1
_INTERACTIVE_TOKENS = 16
_REST_SECONDS = 4.0  # single requests are interactive ones, which make the server hold back batches for a while
_LEAD_SECONDS = 1.0
_SHOWN_CHARACTERS = 300
_GREEDY = {"temperature": 0, "ignore_eos": True}
_KINDS: tuple[dict[str, Any], ...] = (  # one after the other
    _GREEDY,
    {"temperature": 0.8, "top_p": 0.9, "seed": 1, "ignore_eos": True},
    {"response_format": {"type": "json_object"}, "temperature": 0},
    {"logprobs": True, "top_logprobs": 2, **_GREEDY},
)
_BAD: tuple[dict[str, Any], ...] = ({"max_tokens": "many"}, {"model": "no-such-model"}, {"messages": []})


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured. `bad` is a part of `items`, `seconds` one run of interactive requests."""

    items: int
    bad: float
    repeats: int
    seconds: float
    max_tokens: int
    method: str = "batches: all at once; interactive: open loop; targets in turns, medians of the repeats"


def batch(  # noqa: PLR0913  # one argument per option
    *,
    model: Model = "service-plus",
    models: Models = Path("models.yaml"),
    weights_dir: WeightsDir = None,
    items: Annotated[int, typer.Option(min=1, max=256, help="Items of a batch.")] = 256,
    bad: Annotated[float, typer.Option(min=0, max=0.9, help="Which part of them must be refused.")] = 0.1,
    repeats: Repeats = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long interactive requests are sent in a run.")] = 20.0,
    max_tokens: MaxTokens = 64,
    json: JsonFile = None,
) -> None:
    """Compare a batch with single requests, and interactive requests beside batches with those on an idle server."""
    settings = Settings(items, bad, repeats, seconds, max_tokens)
    with ending_cleanly(), open_workspace(models, model, weights_dir) as place:
        asyncio.run(_benchmark(settings, place)).deliver(json)


async def _benchmark(settings: Settings, place: Workspace) -> Report:
    report = Report("batch", asdict(settings), conditions(place))
    async with running(HearthServer.launch(place)) as (server,), load_generator(place) as load:
        bench = Bench(settings, place.model, server, load)
        targets = {BATCH: partial(bench.items, batched=True), SINGLE: partial(bench.items, batched=False)}
        for target in targets.values():
            await target(-1)
        say("Measuring a batch against single requests:")
        case = f"{settings.items} items, {len(bad_places(settings.items, settings.bad))} bad"
        whole = await in_turns(case, targets, repeats=settings.repeats, headline="wall_seconds")
        say("Measuring interactive requests:")
        targets = {BUSY: partial(bench.interactive, busy=True), IDLE: partial(bench.interactive, busy=False)}
        headline = "time_to_first_token_p99_ms"
        beside = await in_turns("interactive", targets, repeats=settings.repeats, headline=headline)
    report.tables = [
        ("A batch and single requests", [whole]),
        ("Interactive requests beside batches", [beside]),
    ]
    return report


class Bench:
    """The server, and what is asked of it."""

    def __init__(self, settings: Settings, model: str, server: HearthServer, load: Child) -> None:
        self._settings = settings
        self._model = model
        self._server = server
        self._load = load

    async def items(self, repeat: int, *, batched: bool) -> Figures:
        """Send a batch, or its good items as single requests at the same moment. Raises `BenchError`."""
        await asyncio.sleep(_REST_SECONDS)
        good, job = self._good_items(), self._batches(f"{repeat} {batched}", requests=1)
        if not batched:
            wrong = bad_places(self._settings.items, self._settings.bad)
            bodies = [body for place, body in enumerate(self._bodies()) if place not in wrong]
            job = self._job(f"{repeat} {batched}", bodies, streams=good, requests=good)
        meter = Meter(self._server.pid)
        result = await self._load.run(job, LoadResult)
        used = meter.stop()
        tokens = sum(map(self._check, result.answers)) if batched else tokens_of(result)
        return {
            "wall_seconds": result.wall_seconds,
            "items_per_second": good / result.wall_seconds,
            "tokens_per_second": tokens / result.wall_seconds,
            "api_cpu_ms_per_item": used.api_cpu_seconds * 1000 / good,
            "engine_cpu_ms_per_item": used.engine_cpu_seconds * 1000 / good,
        }

    async def interactive(self, repeat: int, *, busy: bool) -> Figures:
        """Send short streamed requests, if `busy` while batches run back to back. Raises `BenchError`."""
        label = f"{repeat} {busy} i"
        bodies = [chat_body(self._model, _INTERACTIVE_TOKENS, text="What is the time?")]
        # The server is asked interactively before the batches come.
        await self._load.run(self._job(f"{label}l", bodies, moments=moments(_LEAD_SECONDS, repeat)), LoadResult)
        job = self._job(
            label,
            bodies,
            moments=moments(self._settings.seconds, repeat),
            beside=self._batches(f"{label}b") if busy else None,
        )
        result = await self._load.run(job, LoadResult)
        if result.beside is not None:
            for answer in result.beside.answers:
                self._check(answer)
        first = [answer.text_times[0] - answer.asked for answer in result.answers if answer.text_times]
        done = None if result.beside is None else len(result.beside.answers) * self._good_items()
        return {
            "requests": len(result.answers),
            **percentiles_ms("time_to_first_token", first, 50, 99),
            **percentiles_ms("latency", [answer.seconds for answer in result.answers], 50, 99),
            **percentiles_ms("sent_late", [answer.started - answer.asked for answer in result.answers], 99),
            "batch_items_per_second": None if done is None else done / result.wall_seconds,
        }

    def _bodies(self) -> list[Any]:
        return batch_items(self._model, self._settings.items, self._settings.bad, self._settings.max_tokens)

    def _good_items(self) -> int:
        return self._settings.items - len(bad_places(self._settings.items, self._settings.bad))

    def _batches(self, label: str, requests: int = 0) -> LoadJob:
        body = {"requests": self._bodies()}
        return self._job(label, [body], path=_PATH, streams=1, requests=requests, keep_bodies=True)

    def _job(self, label: str, bodies: list[Any], **how: Any) -> LoadJob:
        return LoadJob(self._server.host, self._server.port, self._server.key, label, bodies, **how)

    def _check(self, answer: Any) -> int:
        return check_batch(msgspec.json.decode(answer.body), self._settings.items, self._settings.bad)


def moments(seconds: float, seed: int) -> list[float]:
    """Return when each interactive request is sent: one in each interval, at a place that the seed decides."""
    source = random.Random(seed)  # noqa: S311  # repeatable on purpose
    return [(number + source.random()) * _EVERY_SECONDS for number in range(max(1, round(seconds / _EVERY_SECONDS)))]


def bad_places(items: int, bad: float) -> frozenset[int]:
    """Return which of `items` are the bad ones: the part `bad` of them, in random places that are always the same."""
    return frozenset(random.Random(items).sample(range(items), round(items * bad)))  # noqa: S311  # repeatable


def batch_items(model: str, items: int, bad: float, max_tokens: int) -> list[Any]:
    """Return the bodies in order. A good answer may have `max_tokens` tokens on average, half to one and a half."""
    lengths = random.Random(items)  # noqa: S311  # repeatable on purpose
    bodies = [
        _good(model, index, lengths.randint(max(1, max_tokens // 2), max_tokens + max_tokens // 2))
        for index in range(items)
    ]
    for number, place in enumerate(sorted(bad_places(items, bad))):
        bodies[place] |= _BAD[number % len(_BAD)]
    return bodies


def _good(model: str, index: int, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{NUMBER}-{index}. {TEXT}"}]
    kind = _KINDS[index % len(_KINDS)]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "custom_id": f"item-{index}", **kind}


def check_batch(answer: Any, items: int, bad: float) -> int:
    """Return how many tokens a batch's answer has.

    Raises `BenchError` unless each item is answered in its place and exactly the bad ones failed.
    """
    responses, wrong = answer["responses"], bad_places(items, bad)
    if [response["index"] for response in responses] != [*range(items)]:
        raise BenchError(f"a batch of {items} items was answered with {len(responses)}, or not in their order.")
    for place, response in enumerate(responses):
        if ("error" in response) != (place in wrong) or response["custom_id"] != f"item-{place}":
            shown = msgspec.json.encode(response).decode()[:_SHOWN_CHARACTERS]
            raise BenchError(f"item {place} of a batch should have {'failed' if place in wrong else 'not'}: {shown}")
    return sum(response["usage"]["completion_tokens"] for response in responses if "usage" in response)
