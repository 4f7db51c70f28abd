"""`hearth voices say`: speaks a text into a file, in a worker process of its own and without a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from engine import AudioFormat, EngineError, SpeechRequest
from engine.config import SpeechModelSpec
from engine.process.parent import WorkerDiedError
from engine.voices.offered import Voices
from server.cli_store import Models, WeightsDir, config_for, refuse, settings_for
from server.command_name import HEARTH

if TYPE_CHECKING:
    from engine import Config, Voice

FORMATS: tuple[AudioFormat, ...] = get_args(AudioFormat)


def say(  # noqa: PLR0913 - one argument per option
    voice: Annotated[str, typer.Argument(metavar="ID", help="A voice; `hearth voices` shows them.")],
    text: Annotated[str, typer.Argument(help="What is spoken.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, like hello.wav.")],
    audio_format: Annotated[
        str | None, typer.Option("--format", help=f"{', '.join(FORMATS)}. Default: the file's ending.")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.25, max=4, help="1 is the voice's own.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="The same gives the same sound.")] = None,
    weights_dir: WeightsDir = None,
    models: Models = None,
) -> None:
    """Speak a text into a file. No server is needed."""
    if text.encode(errors="replace").decode() != text:
        refuse("The text is no valid UTF-8. Is the terminal's encoding UTF-8?")
    settings = settings_for(models=models, weights_dir=weights_dir)
    config = config_for(settings)
    spec, found = _find(config, Voices(config, settings.weights_dir), voice)
    request = SpeechRequest(
        request_id=secrets.token_hex(12),
        model=spec.id,
        voice=found.id,
        text=text,
        speed=speed,
        seed=seed,
        response_format=_format(audio_format, output),
    )
    try:
        seconds = asyncio.run(_speak(spec, request, found, output, mark=settings.image_mark))
    except EngineError as error:
        refuse(error.message, code=1)
    except WorkerDiedError as error:
        refuse(str(error), code=1)
    except OSError as error:
        refuse(f"{output} cannot be written: {error.strerror}.", code=1)
    typer.echo(f"{found.name} has spoken {seconds:.1f} s into {output}.", err=True)


def _find(config: Config, offered: Voices, name: str) -> tuple[SpeechModelSpec, Voice]:
    """Return the voice of this id, or other name, and the entry of models.yaml that offers it; or end."""
    specs = [spec for spec in config.models.values() if isinstance(spec, SpeechModelSpec)]
    both = ((spec, voice) for spec in specs for voice in offered.of(spec.id))
    found = next(((spec, voice) for spec, voice in both if voice.id == spec.aliases.get(name, name)), None)
    if found is None:
        problems = [error.message for spec in specs if (error := offered.problem(spec.id)) is not None]
        near = dict.fromkeys(one for spec in specs for one in offered.near(spec.id, name))
        meant = [f"Did you mean {' or '.join(near)}?"] if near else []
        refuse(" ".join(["There is no such voice.", *meant, f"`{HEARTH} voices` shows the ones there are.", *problems]))
    spec, voice = found
    if not voice.available:
        why = [one.message for one in offered.warnings(spec.id) if one.model == voice.model]
        refuse(" ".join([f"{voice.id} cannot speak here.", *why]), code=1)
    return found


def _format(given: str | None, output: Path) -> AudioFormat:
    wanted = (given or output.suffix.removeprefix(".")).lower()
    found = next((known for known in FORMATS if known == wanted), None)
    if found is None and given is None:
        refuse(f"What kind of file {output.name!r} is cannot be told from its name. Say --format wav, for example.")
    if found is None:
        refuse(f"--format {given!r} is not known. Known: {', '.join(FORMATS)}.")
    return found


async def _speak(spec: SpeechModelSpec, request: SpeechRequest, voice: Voice, output: Path, *, mark: bool) -> float:
    """Return how many seconds were written. A file appears only when it is whole. Raises `EngineError`, `OSError`."""
    from engine.backends.speech_model import SpeechModel

    threads = spec.engine.cpu_threads or os.cpu_count() or 1
    part = output.with_name(f"{output.name}.part")
    seconds = 0.0
    with part.open("wb") as file, contextlib.ExitStack() as undo:
        undo.callback(part.unlink, missing_ok=True)
        model = await SpeechModel.load(spec, threads=threads, mark=mark, on_cpu=False, report=_report)
        try:
            async with contextlib.aclosing(model.speech(request, voice)) as chunks:
                async for chunk in chunks:
                    file.write(chunk.data)
                    seconds += chunk.seconds
                    _progress(f"{seconds:.1f} s spoken")
        finally:
            await model.shutdown()
            _progress("")
        part.replace(output)
    return seconds


def _report(phase: str, progress: float) -> None:
    _progress(f"{phase} {progress:.0%}")


def _progress(text: str) -> None:
    """Show on one line what goes on, to people only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
