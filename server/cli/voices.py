"""`hearth voices`: which voices there are and what is wrong with the rest; `say` has one speak. Without a server."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.console import Console
from rich.table import Table

from engine import AudioFormat, Config, SpeechRequest
from engine import Voice as Speaker
from engine.config import SpeechModelSpec, load_config
from engine.errors import RequestError
from engine.voices.catalogue import Voices
from server.api.audio.voices import VoiceList, VoiceQuery
from server.cli.add_voice import add
from server.cli.options import AsJson, Models, WeightsDir, refuse, tell
from server.settings import load_settings
from server.terminal import HEARTH, table

_COLUMNS = ("id", "name", "gender", "language", "family", "quality", "licence", "model", "available")
_WORDS = {None: "", True: "yes", False: "no"}
# What plays a WAV file on a desktop; the first that is there does.
_PLAYERS = (("pw-play",), ("paplay",), ("aplay", "-q"), ("ffplay", "-nodisp", "-autoexit", "-loglevel", "error"))
_SHORT = {"language": "lang", "available": "ready"}  # so that nine columns fit in a usual terminal

app = typer.Typer(invoke_without_command=True)
app.command("add")(add)


@app.callback()
def voices(  # noqa: PLR0913 - one argument per option
    context: typer.Context,
    *,
    language: Annotated[str | None, typer.Option(help="Only of this language, like am.")] = None,
    gender: Annotated[Literal["female", "male"] | None, typer.Option(help="Only female or male.")] = None,
    model: Annotated[str | None, typer.Option(help="Only of this TTS model, or of this entry of models.yaml.")] = None,
    weights_dir: WeightsDir = None,
    models: Models = None,
    as_json: AsJson = False,
) -> None:
    """List voices, or let one speak. No server is needed."""
    if context.invoked_subcommand is not None:
        return
    settings = load_settings(models=models, weights_dir=weights_dir)
    config = load_config(settings.models)
    offered = Voices(config, settings.weights_dir)
    entries = {spec.id: offered.of(spec.id) for spec in config.models.values() if isinstance(spec, SpeechModelSpec)}
    found = [(entry, voice) for entry, catalogue in entries.items() for voice in catalogue.voices]
    try:
        listed = VoiceList.of(VoiceQuery(language=language, gender=gender, model=model).chosen(found))
    except RequestError as wrong:
        refuse(wrong.message)
    data = [voice.model_dump() for voice in listed.voices]
    remarks = [
        {"served_by": entry, "model": one.model, "voice": one.voice, "message": one.message}
        for entry, catalogue in entries.items()
        for one in catalogue.warnings
    ]
    broken = {entry: one.problem.message for entry, one in entries.items() if one.problem is not None}
    remarks += [{"served_by": entry, "model": None, "voice": None, "message": broken[entry]} for entry in broken]
    shown: Table | str = f"There is no such voice. `{HEARTH} voices` without options shows all of them."
    if not entries:
        shown = "models.yaml has no speech model. docs/voices.md says how to add one."
    elif data:
        rows = [[_WORDS.get(one[column], one[column]) for column in _COLUMNS] for one in data]
        shown = table([_SHORT.get(column, column) for column in _COLUMNS], rows)
    tell({"voices": data, "warnings": remarks}, shown, as_json=as_json)
    for one in remarks if not as_json else ():
        typer.echo(f"{one['served_by']}: {one['message']}", err=True)
    if broken:
        raise typer.Exit(1)


@app.command()
def say(  # noqa: PLR0913 - one argument per option
    voice: Annotated[str, typer.Argument(metavar="ID", help="A voice; `hearth voices` shows them.")],
    text: Annotated[str, typer.Argument(help="Text to speak.")],
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write a file, like hello.wav.")] = None,
    audio_format: Annotated[
        AudioFormat | None, typer.Option("--format", case_sensitive=False, help="Default: the file's ending.")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.25, max=4, help="1 is the voice's normal speed.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same sound.")] = None,
    weights_dir: WeightsDir = None,
    models: Models = None,
) -> None:
    """Speak a text, through this machine's loudspeaker or into a file. No server is needed."""
    from engine.process.parent import WorkerDiedError

    if text.encode(errors="replace").decode() != text:
        refuse("The text is not valid UTF-8. Is the terminal's encoding UTF-8?")
    player = None if output else _player()
    file = output or Path("said.wav")
    ending = file.suffix.removeprefix(".").lower()
    response_format = audio_format or next((known for known in get_args(AudioFormat) if known == ending), None)
    if response_format is None:
        refuse(f"The name {file.name!r} does not say the format. Give one, like --format wav.")
    settings = load_settings(models=models, weights_dir=weights_dir)
    config = load_config(settings.models)
    spec, found = _find(config, Voices(config, settings.weights_dir), voice)
    request = SpeechRequest(
        request_id=secrets.token_hex(12),
        model=spec.id,
        voice=found.id,
        text=text,
        speed=speed,
        seed=seed,
        response_format=response_format,
    )
    with tempfile.TemporaryDirectory() as folder:
        target = output or Path(folder) / file
        try:
            seconds = asyncio.run(_speak(spec, request, found, target, mark=settings.image_mark))
        except WorkerDiedError as error:
            refuse(str(error), code=1)
        except OSError as error:
            refuse(f"{file} cannot be written: {error.strerror}.", code=1)
        if player and subprocess.run([*player, str(target)], check=False).returncode:
            refuse(f"{player[0]} could not play it. Write a file instead: -o hello.wav", code=1)
    if output:
        typer.echo(f"Wrote {seconds:.1f} s of speech by {found.name} to {output}.", err=True)


def _player() -> tuple[str, ...]:
    """Return the command that plays a file here, or end."""
    found = next((command for command in _PLAYERS if shutil.which(command[0])), None)
    if found is None:
        names = ", ".join(command[0] for command in _PLAYERS)
        refuse(f"Nothing here plays sound (looked for {names}). Write a file instead: -o hello.wav")
    return found


def _find(config: Config, offered: Voices, name: str) -> tuple[SpeechModelSpec, Speaker]:
    """Return the voice of this id, or other name, and the entry of models.yaml that offers it; or end."""
    specs = [spec for spec in config.models.values() if isinstance(spec, SpeechModelSpec)]
    both = ((spec, voice) for spec in specs for voice in offered.of(spec.id).voices)
    found = next(((spec, voice) for spec, voice in both if voice.id == spec.voice_aliases.get(name, name)), None)
    if found is None:
        problems = [error.message for spec in specs if (error := offered.of(spec.id).problem) is not None]
        near = dict.fromkeys(one for spec in specs for one in offered.near(spec.id, name))
        meant = [f"Did you mean {' or '.join(near)}?"] if near else []
        refuse(" ".join(["There is no such voice.", *meant, f"`{HEARTH} voices` shows the ones there are.", *problems]))
    spec, voice = found
    if not voice.available:
        why = [one.message for one in offered.of(spec.id).warnings if one.model == voice.model]
        refuse(" ".join([f"{voice.id} cannot speak here.", *why]), code=1)
    return found


async def _speak(spec: SpeechModelSpec, request: SpeechRequest, voice: Speaker, output: Path, *, mark: bool) -> float:
    """Return how many seconds were written. A file appears only when it is whole. Raises `EngineError`, `OSError`."""
    from engine.backends.tts.model import SpeechModel
    from engine.stream import SpeechStream

    threads = spec.engine.cpu_threads or os.cpu_count() or 1
    part = output.with_name(f"{output.name}.part")
    seconds = 0.0
    try:
        with part.open("wb") as file, Console(stderr=True).status("") as shown:

            def report(phase: str, progress: float) -> None:
                shown.update(f"{phase} {progress:.0%}")

            model = await SpeechModel.load(spec, [voice], threads=threads, mark=mark, on_cpu=False, report=report)
            try:
                async with SpeechStream() as chunks:
                    model.speech(request, voice, chunks)
                    async for chunk in chunks:
                        file.write(chunk.data)
                        seconds += chunk.seconds
                        shown.update(f"{seconds:.1f} s spoken")
            finally:
                await model.shutdown()
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)
    return seconds
