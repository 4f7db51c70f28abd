"""`bench images`: images joined in three ways under the same load, and chat beside images on a real server."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks import images_chat
from benchmarks.chat_job import ChatJob
from benchmarks.command import deliver, ending_cleanly
from benchmarks.compare import Row, paired, say
from benchmarks.conditions import conditions
from benchmarks.images_aims import chat_verdicts
from benchmarks.images_batching import Load, measured
from benchmarks.images_chat_job import BESIDE
from benchmarks.images_source import build_random, order_for, random_profile
from benchmarks.images_targets import ONE_BY_ONE, REQUESTS, STEPS
from benchmarks.report import document, print_table, print_verdicts
from benchmarks.workplace import Workplace, open_workplace
from engine.config_profiles import SIZES

if TYPE_CHECKING:
    from benchmarks.verdicts import Verdict

_JOINED = {
    "asked_per_second": "asked for/s",
    "images_per_second": "images/s",
    "latency_p50_ms": "image p50 ms",
    "latency_p95_ms": "image p95 ms",
    "standard_p50_ms": "standard p50 ms",
    "standard_p95_ms": "standard p95 ms",
    "hd_p50_ms": "hd p50 ms",
    "hd_p95_ms": "hd p95 ms",
    "worker_cpu_seconds_per_image": "CPU s/image",
    "worker_peak_rss_mib": "peak MiB",
    "images": "images",
}
_SHORT = {
    "images": "short images",
    "standard_p50_ms": "short p50 ms",
    "standard_p95_ms": "short p95 ms",
    "long_beside_per_second": "long images/s",
    "sent_late_p95_ms": "sent late p95 ms",
}
_CHAT = {
    "inter_token_latency_p50_ms": "between tokens p50 ms",
    "inter_token_latency_p99_ms": "between tokens p99 ms",
    "time_to_first_token_p50_ms": "first token p50 ms",
    "time_to_first_token_p99_ms": "first token p99 ms",
    "tokens_per_second": "tokens/s",
    "images_per_second": "images/s",
    "image_latency_p50_ms": "image p50 ms",
}
_SHARES = {
    "api_cpu_percent": "API, % of a core",
    "engine_core_cpu_percent": "engine core",
    "image_worker_cpu_percent": "image worker",
    "others_cpu_percent": "others",
    "load_cpu_percent": "load",
}
_CHAT_IMAGE_SIZE = 256
_CHAT_REPEATS = 3
_QUICK_SECONDS = 4.0


class Part(StrEnum):
    """What is measured."""

    BATCHING = "batching"
    CHAT = "chat"
    ALL = "all"


class Family(StrEnum):
    """Whose shape random weights have."""

    SDXL = "sdxl"
    SD3 = "sd3"


class Shape(StrEnum):
    """How large they are."""

    FULL = "full"
    TINY = "tiny"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `loads` are parts of what one by one can do, `seconds` is about how long one run takes."""

    part: Part
    model: str
    chat_model: str
    sizes: tuple[int, ...]
    loads: tuple[float, ...]
    repeats: int
    seconds: float
    streams: int
    clients: int
    max_tokens: int
    batch: int
    threads: int | None
    random: Family | None
    shape: Shape
    method: str = (
        "images: open loop, Poisson; chat beside images: closed loops; targets in turns, medians of the repeats"
    )


def images(  # noqa: PLR0913  # one argument per option
    *,
    part: Annotated[Part, typer.Option(help="Images joined in three ways, chat beside images, or both.")] = Part.ALL,
    model: Annotated[str, typer.Option(help="An image model of models.yaml.")] = "service-image",
    chat_model: Annotated[str, typer.Option(help="The chat model beside it.")] = "service-plus",
    models: Annotated[Path, typer.Option(help="The models.yaml to take both from.")] = Path("models.yaml"),
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of real weights. Default: the demo models.")] = None,
    sizes: Annotated[str, typer.Option(help="Sizes of images, one set of rows each.")] = "256,512",
    loads: Annotated[str, typer.Option(help="What is asked for, as parts of what one by one can do.")] = "0.7,1.5",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each row and target; medians are shown.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="About how long one run takes.")] = 20.0,
    streams: Annotated[int, typer.Option(min=1, help="Chat streams.")] = 4,
    clients: Annotated[int, typer.Option(min=1, help="Clients that have images made beside chat.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each chat answer, exactly.")] = 64,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the pipeline on a CPU.")] = None,
    random: Annotated[Family | None, typer.Option(help="Random weights of that shape. Needs --part batching.")] = None,
    shape: Annotated[Shape, typer.Option(help="Real or tiny, of random weights.")] = Shape.FULL,
    batch: Annotated[int, typer.Option(min=2, max=10, help="Random weights: images made together at most.")] = 8,
    quick: Annotated[bool, typer.Option("--quick", help="One short run of everything: is it all right?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """Compare images made one by one, joined as requests and as steps, and chat beside images with chat alone."""
    plan = Plan(
        part,
        model,
        chat_model,
        tuple(int(size) for size in _numbers(sizes, "--sizes")),
        _numbers(loads, "--loads"),
        1 if quick else repeats,
        _QUICK_SECONDS if quick else seconds,
        streams,
        clients,
        max_tokens,
        batch,
        threads,
        random,
        shape,
    )
    _check(plan, weights_dir)
    beside = () if part is Part.BATCHING else (chat_model,)
    with ending_cleanly(), open_workplace(models, model, weights_dir, beside=beside) as place:
        report, joined, chatted, aims = asyncio.run(_benchmark(plan, place))
    if deliver(report, output, as_json=as_json):
        _print(joined, chatted, aims)


async def _benchmark(plan: Plan, place: Workplace) -> tuple[bytes, list[Row], list[Row], list[Verdict]]:
    joined: list[Row] = []
    chatted: list[Row] = []
    aims: list[Verdict] = []
    settings = asdict(plan)
    if plan.random is not None:
        say(f"Building a pipeline of the shape of {plan.random} with random weights ({plan.shape}).")
        await build_random(place, plan.random.value, plan.shape.value)
    profile = None if plan.random is None else random_profile(plan.random.value, plan.shape.value, plan.batch)
    # Like the demo, a tiny one is too small to share among cores
    threads = 1 if plan.random is not None and plan.shape is Shape.TINY else None
    order = order_for(place, profile, threads=plan.threads or threads)
    under = conditions(place)
    settings |= {"threads": order.threads, "profile": order.profile}
    if plan.part is not Part.CHAT:
        found = await measured(place, order, Load(plan.model, plan.sizes, plan.loads, plan.repeats, plan.seconds))
        joined, aims = found.rows, found.aims
        settings |= {"device": found.device, "one_by_one_images_per_second": found.capacity}
    if plan.part is not Part.BATCHING:
        job = images_chat.beside_job(
            ChatJob(plan.chat_model, plan.streams, plan.streams, streamed=True, max_tokens=plan.max_tokens, label=""),
            plan.model,
            clients=plan.clients,
            size=_CHAT_IMAGE_SIZE,
        )
        chatted = [await images_chat.measured(place, job, repeats=plan.repeats, seconds=plan.seconds)]
        aims = aims + chat_verdicts(chatted[0])
        if not all(run["images_per_second"] for run in chatted[0].runs[BESIDE]):
            say(
                "Beside chat, some run finished no image: nothing is judged. Take longer --seconds, or a quiet machine."
            )
    return document("images", under, settings, joined + chatted, aims), joined, chatted, aims


def _print(joined: list[Row], chatted: list[Row], aims: list[Verdict]) -> None:
    pairs = ((STEPS, ONE_BY_ONE), (REQUESTS, ONE_BY_ONE))
    loaded = [row for row in joined if row.medians[STEPS]["images_per_second"] is not None]
    short = [row for row in joined if row not in loaded]
    if loaded:
        for pair in pairs:
            print_table(f"Images, {pair[0]}, and {pair[1]}", [paired(row, *pair) for row in loaded], _JOINED)
    for pair in ((STEPS, REQUESTS), (STEPS, ONE_BY_ONE)) if short else ():
        print_table(
            f"Short images beside long ones, {pair[0]}, and {pair[1]}", [paired(row, *pair) for row in short], _SHORT
        )
    if chatted:
        print_table("Chat beside images, and alone", chatted, _CHAT)
        print_table("Who uses the processors meanwhile", chatted, _SHARES)
    print_verdicts(aims)


def _check(plan: Plan, weights_dir: Path | None) -> None:
    if not set(plan.sizes) <= set(SIZES):
        raise typer.BadParameter(f"{plan.sizes} are not all of {SIZES}", param_hint="--sizes")
    if plan.random is not None and (weights_dir is not None or plan.part is not Part.BATCHING):
        raise typer.BadParameter("needs --part batching, and no --weights-dir", param_hint="--random")


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) <= 0:
        raise typer.BadParameter(f"{text!r} is no list of numbers like 256,512", param_hint=option)
    return numbers
