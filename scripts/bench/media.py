"""`bench images`, `bench speech`: images batched in three ways, short beside long ones; when a page begins to speak."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Annotated, Any

import typer
import yaml
from bench import report
from bench.load import NUMBER, LoadJob
from bench.report import listed, numbers
from bench.servers import HEARTH, Server, Workspace, running, say, start_hearth

from engine import demo
from engine.config.models import SIZES

ONE_BY_ONE, REQUESTS, STEPS = "one by one", "requests joined", "steps joined"
_ENGINE: dict[str, dict[str, Any]] = {
    STEPS: {"batching": "steps"},
    REQUESTS: {"batching": "requests"},
    ONE_BY_ONE: {"batching": "requests", "max_batch": {f"{size}x{size}": 1 for size in SIZES}},
}
_FEWEST_IMAGES = 9
_BODIES = 60
_LOADS, _SHORT_LOAD = (0.7, 1.5), 0.3  # arrivals, as parts of what one by one can make
_LONG_BESIDE = 2
_LEAD_SECONDS = 2.0
_REST_SECONDS = 2.0
_PAGE = 4096  # characters, as many as a request may have
_TEXT = "The office opens at 8:30 on Monday, 24 November 2026, and 12 people come. "


@dataclass(frozen=True, kw_only=True)
class Images(report.Benchmark):
    """Compare images made one by one, batched by requests and by steps."""

    model: report.Model = "service-image"
    repeats: report.Repeats = 3
    seconds: Annotated[float, typer.Option(min=1, help="About how long one run takes.")] = 20.0
    method = "open loop, Poisson; targets in turns, medians of the repeats"

    async def measure(self) -> report.Report:
        with ExitStack() as stack:
            places = {way: stack.enter_context(self.workspace(engine=engine)) for way, engine in _ENGINE.items()}
            for place in places.values():
                use_profile_of_demo(place)
            whole = self.begin(places[STEPS])
            starts = {way: partial(start_hearth, place) for way, place in places.items()}
            async with running(places[STEPS], starts) as servers:
                loaded: list[report.Row] = []
                short: list[report.Row] = []
                for size in (256, 512):
                    speed, row = await _speed(servers, size), partial(self._row, servers, size)
                    loaded += [await row(f"load {part:g}", part * speed) for part in _LOADS]
                    short += [await row("short beside long", _SHORT_LOAD * speed, beside_long=True)]
        whole.tables = [("Images", loaded), ("Short images beside long ones", short)]
        return whole

    async def _row(
        self, servers: dict[str, Server], size: int, case: str, rate: float, *, beside_long: bool = False
    ) -> report.Row:
        """Measure mixed images, `rate` a second; or only short ones, on servers that always make long ones."""

        async def measure(server: Server, repeat: int) -> report.Figures:
            count = max(_FEWEST_IMAGES, round(rate * self.seconds))
            how: dict[str, Any] = {"moments": poisson(rate, count, seed=repeat + 1000 * beside_long)}
            if beside_long:
                long = image_job(server, size, f"{repeat} long", ("hd",), streams=_LONG_BESIDE)
                how |= {"qualities": ("standard",), "beside": long, "lead_seconds": _LEAD_SECONDS}
            return await _measure(server, image_job(server, size, f"{repeat} {case}", **how))

        return await report.in_turns(f"{size}x{size}, {case}", servers, measure, self.repeats, "latency_p95_ms")


def use_profile_of_demo(place: Workspace) -> None:
    """Without weights, serve the demo's as real ones: the settings of a demo cannot be changed."""
    document = yaml.safe_load(place.models.read_text(encoding="utf-8"))
    entry = document["models"][place.model]
    weights = place.weights_dir / entry["weights"]
    if not weights.is_dir() and entry.get("demo"):
        weights.parent.mkdir(parents=True, exist_ok=True)
        weights.symlink_to(demo.weights_dir(entry.pop("demo")))
        entry["profile"] = "demo"
        entry.pop("variants", None)
        place.models.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


async def _speed(servers: dict[str, Server], size: int) -> float:
    """Warm every server up and return how many images/s one by one makes when always busy."""
    speed = 0.0
    for way, server in servers.items():
        for label in ("warm", "speed"):
            figures = await _measure(server, image_job(server, size, label, streams=4, requests=_FEWEST_IMAGES))
            speed = figures["images_per_second"] or 0.0 if way == ONE_BY_ONE else speed
    say(f"{size}x{size}: one by one makes {speed:.2f} images/s, every third of them hd. Measuring:")
    return speed


async def _measure(server: Server, job: LoadJob) -> report.Figures:
    """Do a run. Beside long images the arrivals set the speed, and the CPU is that of both."""
    result, used = await server.measure(job)
    await asyncio.sleep(_REST_SECONDS)
    answers, alone = result.answers, result.beside is None
    return {
        "images_per_second": len(answers) / result.wall_seconds if alone else None,
        **report.percentiles_ms("latency", result.latencies, 50, 95),
        "worker_cpu_seconds_per_image": used.engine_cpu_seconds / len(answers) if alone else None,
    }


def image_job(
    server: Server, size: int, label: str, qualities: Sequence[str] = ("hd", "standard", "standard"), **how: Any
) -> LoadJob:
    """Return a job of images whose seeds and prompts differ."""
    bodies = [
        {
            "model": server.model,
            "prompt": f"a red circle on a white background, {NUMBER}",
            "size": f"{size}x{size}",
            "quality": qualities[number % len(qualities)],
            "seed": number,
            "response_format": "b64_json",
        }
        for number in range(_BODIES)
    ]
    return server.job(label, bodies, path="/v1/images/generations", **how)


def poisson(rate: float, count: int, *, seed: int) -> list[float]:
    """Return the moments of `count` requests, `rate` a second on average, decided by the seed only."""
    source = random.Random(seed)  # noqa: S311  # repeatable on purpose
    return list(accumulate(source.expovariate(rate) for _ in range(count)))


@dataclass(frozen=True, kw_only=True)
class Speech(report.Benchmark):
    """Measure the first sound of pages, alone and many at once."""

    model: report.Model = "service-voice"
    voice: Annotated[str, typer.Option(help="A voice of GET /v1/audio/voices.")] = "emma"
    streams: Annotated[Sequence[int], listed(numbers, "Texts that are requested at once; a row each.")] = (1, 50)
    requests: Annotated[int, typer.Option(min=1, help="Pages of a row with one at a time.")] = 10
    repeats: report.Repeats = 3
    method = "closed loop, MP3; first sound is the first byte of the body"

    async def measure(self) -> report.Report:
        async with self.one_server() as (whole, server):
            await self._pages(1, server, "warm")
            rows = [
                await report.in_turns(
                    f"page, {streams} at once",
                    {HEARTH: server},
                    partial(self._pages, streams),
                    self.repeats,
                    "first_sound_p50_ms",
                )
                for streams in self.streams
            ]
        whole.tables = [("Speech", rows)]
        return whole

    async def _pages(self, streams: int, server: Server, label: object) -> report.Figures:
        body = {"model": server.model, "voice": self.voice, "input": (_TEXT * _PAGE)[:_PAGE]}
        requests = self.requests if streams == 1 else streams
        how = {"path": "/v1/audio/speech", "streams": streams, "requests": requests}
        result, used = await server.measure(server.job(f"{streams} {label}", [body], **how))
        first = [one.first_piece - one.asked for one in result.answers]
        return {
            **report.percentiles_ms("first_sound", first, 50, 95),
            **report.percentiles_ms("whole", result.latencies, 50),
            "server_cpu_ms_per_text": used.api_cpu_seconds / len(result.answers) * 1000,
        }
