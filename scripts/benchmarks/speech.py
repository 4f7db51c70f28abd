"""`bench speech`: how fast each model speaks, in processor time and by the clock, and how soon its first bytes come."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.command import deliver, ending_cleanly
from benchmarks.compare import Case, Row, compare, say
from benchmarks.conditions import conditions
from benchmarks.errors import BenchError
from benchmarks.report import document, print_table
from benchmarks.speech_targets import SpeechTarget, SpeechWork, speaking
from benchmarks.workplace import Workplace, open_workplace
from engine import LoadError, demo
from engine.config import SpeechModelSpec
from engine.voices.catalogue import read_catalogue

if TYPE_CHECKING:
    from engine.voices.types import Voice

_COLUMNS = {
    "cpu_real_time_factor": "CPU s per s of audio",
    "wall_real_time_factor": "wall s per s of audio",
    "first_bytes_p50_ms": "first bytes p50 ms",
    "first_bytes_p95_ms": "first bytes p95 ms",
    "whole_p50_ms": "whole text p50 ms",
    "audio_seconds_per_text": "audio s per text",
}
# Every language says them in words of its own: the same work for all, and no language's sample text to choose.
_TEXT = "1, 2, 3, 4, 5, 6. 17, 28, 39, 40! 1947, 2026? 12,345 and 3.14."


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `at_once` texts at a time are compared with one."""

    model: str
    at_once: int
    texts: int
    repeats: int
    threads: int
    method: str = "closed loop, without HTTP; one worker for all voices; targets in turns, medians of the repeats"


def speech(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="A speech model of models.yaml.")] = "service-voice",
    models: Annotated[Path, typer.Option(help="The models.yaml to take it from.")] = Path("models.yaml"),
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of real weights. Default: the demo voices.")] = None,
    at_once: Annotated[int, typer.Option(min=2, help="Texts at the same time, compared with one.")] = 4,
    texts: Annotated[int, typer.Option(min=1, help="Texts of one run.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each row and target; medians are shown.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the worker.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="One short run of everything: is it all right?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """Measure every model that speaks: one text at a time, and several at once."""
    plan = Plan(model, at_once, at_once if quick else texts, 1 if quick else repeats, threads)
    with ending_cleanly(), open_workplace(models, model, weights_dir) as place:
        report, rows = asyncio.run(_benchmark(plan, place))
    if deliver(report, output, as_json=as_json):
        print_table(f"Speech, one text at a time, and {plan.at_once} at once", rows, _COLUMNS)


async def _benchmark(plan: Plan, place: Workplace) -> tuple[bytes, list[Row]]:
    spec = place.spec
    if not isinstance(spec, SpeechModelSpec):
        raise BenchError(f"{plan.model} is no model of task speech. Choose one with --model.")
    voices = _one_of_each(spec, place.weights_dir)
    say(f"Speaking in {len(voices)} voices: {', '.join(voice.id for voice in voices)}.")
    under = conditions(place)
    async with speaking(spec, plan.threads) as model:
        targets = [SpeechTarget("one", model, 1), SpeechTarget(f"{plan.at_once} at once", model, plan.at_once)]
        cases = [_case(voice, plan.texts) for voice in voices]
        rows = await compare(targets, cases, repeats=plan.repeats, headline="first_bytes_p50_ms")
    return document("speech", under, asdict(plan), rows), rows


def _case(voice: Voice, texts: int) -> Case[SpeechWork]:
    return Case(voice.model, lambda _repeat: SpeechWork(voice, _TEXT, texts))


def _one_of_each(spec: SpeechModelSpec, weights_dir: Path) -> list[Voice]:
    """Return the first voice of each model that can speak here."""
    demo_folders = [] if spec.demo is None else [demo.weights_dir(spec.demo)]
    try:
        catalogue = read_catalogue([weights_dir / spec.weights], demo_folders)
    except LoadError as error:
        raise BenchError(str(error)) from error
    first: dict[str, Voice] = {}
    for voice in catalogue.voices:
        if voice.available:
            first.setdefault(voice.model, voice)
    if not first:
        raise BenchError("There is no voice that can speak. `hearth models` says what is missing.")
    return list(first.values())
