"""`bench batch`: a batch against the same requests one by one, and interactive requests beside batches."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from bench import report
from bench.load import NUMBER, TEXT, Answer, BenchError, LoadJob, beats, chat_body
from bench.servers import HearthServer, Server, Target, Workspace, open_workspace, running, say

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
    model: report.Model = "service-plus",
    models: report.Models = Path("models.yaml"),
    weights_dir: report.WeightsDir = None,
    items: Annotated[int, typer.Option(min=1, max=256, help="Items of a batch.")] = 256,
    bad: Annotated[float, typer.Option(min=0, max=0.9, help="Which part of them must be refused.")] = 0.1,
    repeats: report.Repeats = 3,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long interactive requests are sent in a run.")] = 20.0,
    max_tokens: report.MaxTokens = 64,
    json: report.JsonFile = None,
) -> None:
    """Compare a batch with single requests, and interactive requests beside batches with those on an idle server."""
    settings = Settings(items, bad, repeats, seconds, max_tokens)
    with open_workspace(models, model, weights_dir) as place:
        asyncio.run(_benchmark(settings, place)).deliver(json)


async def _benchmark(settings: Settings, place: Workspace) -> report.Report:
    whole = report.begin("batch", settings, place)
    async with running(place, partial(HearthServer.launch, place)) as (target,):
        runs = {one: partial(_items, settings, target, batched=one == BATCH) for one in (BATCH, SINGLE)}
        for measure in runs.values():
            await measure(-1)
        say("Measuring a batch against single requests:")
        case = f"{settings.items} items, {len(bad_places(settings.items, settings.bad))} bad"
        joined = await report.in_turns(case, runs, repeats=settings.repeats, headline="wall_seconds")
        say("Measuring interactive requests:")
        runs = {one: partial(_interactive, settings, target, busy=one == BUSY) for one in (BUSY, IDLE)}
        headline = "time_to_first_token_p99_ms"
        beside = await report.in_turns("interactive", runs, repeats=settings.repeats, headline=headline)
    whole.tables = [
        ("A batch and single requests", [joined]),
        ("Interactive requests beside batches", [beside]),
    ]
    return whole


async def _items(settings: Settings, target: Target, repeat: int, *, batched: bool) -> report.Figures:
    """Send a batch, or its good items as single requests at the same moment. Raises `BenchError`."""
    await asyncio.sleep(_REST_SECONDS)
    wrong = bad_places(settings.items, settings.bad)
    good = settings.items - len(wrong)
    job = _batches(settings, target.server, f"{repeat} {batched}", requests=1)
    if not batched:
        bodies = [body for place, body in enumerate(job.bodies[0]["requests"]) if place not in wrong]
        job = target.server.job(f"{repeat} {batched}", bodies, streams=good, requests=good)
    result, used = await target.measure(job)
    tokens = sum(check_batch(settings, answer) for answer in result.answers) if batched else result.tokens
    return {
        "wall_seconds": result.wall_seconds,
        "items_per_second": good / result.wall_seconds,
        "tokens_per_second": tokens / result.wall_seconds,
        "api_cpu_ms_per_item": used.api_cpu_seconds * 1000 / good,
        "engine_cpu_ms_per_item": used.engine_cpu_seconds * 1000 / good,
    }


async def _interactive(settings: Settings, target: Target, repeat: int, *, busy: bool) -> report.Figures:
    """Send short streamed requests, if `busy` while batches run back to back. Raises `BenchError`."""
    server, label = target.server, f"{repeat} {busy} i"
    bodies = [chat_body(server.model, _INTERACTIVE_TOKENS, text="What is the time?")]
    # The server is asked interactively before the batches come.
    await target.measure(server.job(f"{label}l", bodies, moments=beats(_LEAD_SECONDS, _EVERY_SECONDS, repeat)))
    at = beats(settings.seconds, _EVERY_SECONDS, repeat)
    beside = _batches(settings, server, f"{label}b") if busy else None
    result, _ = await target.measure(server.job(label, bodies, moments=at, beside=beside))
    done = None
    if result.beside is not None:
        for answer in result.beside.answers:
            check_batch(settings, answer)
        done = len(result.beside.answers) * (settings.items - len(bad_places(settings.items, settings.bad)))
    return {
        "requests": len(result.answers),
        **report.percentiles_ms("time_to_first_token", result.first_texts, 50, 99),
        **report.percentiles_ms("latency", result.latencies, 50, 99),
        **report.percentiles_ms("sent_late", result.delays, 99),
        "batch_items_per_second": None if done is None else done / result.wall_seconds,
    }


def _batches(settings: Settings, server: Server, label: str, requests: int = 0) -> LoadJob:
    body = {"requests": batch_items(server.model, settings)}
    return server.job(label, [body], path=_PATH, streams=1, requests=requests, keep_bodies=True)


def bad_places(items: int, bad: float) -> frozenset[int]:
    """Return which of `items` are the bad ones: the part `bad` of them, in random places that are always the same."""
    return frozenset(random.Random(items).sample(range(items), round(items * bad)))  # noqa: S311  # repeatable


def batch_items(model: str, settings: Settings) -> list[Any]:
    """Return the bodies in order. A good answer may have `max_tokens` tokens on average, half to one and a half."""
    lengths, half = random.Random(settings.items), settings.max_tokens // 2  # noqa: S311  # repeatable on purpose
    bodies = [
        _good(model, index, lengths.randint(max(1, half), settings.max_tokens + half))
        for index in range(settings.items)
    ]
    for number, place in enumerate(sorted(bad_places(settings.items, settings.bad))):
        bodies[place] |= _BAD[number % len(_BAD)]
    return bodies


def _good(model: str, index: int, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{NUMBER}-{index}. {TEXT}"}]
    kind = _KINDS[index % len(_KINDS)]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "custom_id": f"item-{index}", **kind}


def check_batch(settings: Settings, answer: Answer) -> int:
    """Return how many tokens a batch's answer has.

    Raises `BenchError` unless each item is answered in its place and exactly the bad ones failed.
    """
    responses = msgspec.json.decode(answer.body)["responses"]
    wrong = bad_places(settings.items, settings.bad)
    if [response["index"] for response in responses] != [*range(settings.items)]:
        raise BenchError(
            f"a batch of {settings.items} items was answered with {len(responses)}, or not in their order."
        )
    for place, response in enumerate(responses):
        if ("error" in response) != (place in wrong) or response["custom_id"] != f"item-{place}":
            shown = msgspec.json.encode(response).decode()[:_SHOWN_CHARACTERS]
            raise BenchError(f"item {place} of a batch should have {'failed' if place in wrong else 'not'}: {shown}")
    return sum(response["usage"]["completion_tokens"] for response in responses if "usage" in response)
