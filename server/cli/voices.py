"""`hearth voices`: which voices there are and what is wrong with the rest; `say` has one speak, `add` fetches one.

No server is needed. A neural voice is verified like all weights, its licence is shown, and it gets a name. Packages
are not installed: where its family needs one that is missing, the command says how to install it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import pycountry
import typer
from rich.console import Console
from rich.table import Table

from engine import AudioFormat, SpeechRequest, language_code
from engine import Voice as Speaker
from engine.config import Config, SpeechModelSpec, load_config
from engine.errors import RequestError
from engine.voices.catalogue import Voices, read_catalogue
from engine.voices.languages import language_name
from engine.voices.overlay import FILE, ID
from engine.weights.download import Wanted
from engine.weights.transfer import remove
from server.api.audio.voices import VoiceList, VoiceQuery
from server.cli.options import AsJson, Models, WeightsDir, refuse, tell
from server.cli.weights import pulled
from server.settings import load_settings
from server.terminal import HEARTH, table

_COLUMNS = ("id", "name", "gender", "language", "family", "quality", "licence", "model", "available")
_WORDS = {None: "", True: "yes", False: "no"}
# What plays a WAV file on a desktop; the first that is there does.
_PLAYERS = (("pw-play",), ("paplay",), ("aplay", "-q"), ("ffplay", "-nodisp", "-autoexit", "-loglevel", "error"))
_SHORT = {"language": "lang", "available": "ready"}  # so that nine columns fit in a usual terminal
_PIPER = re.compile(r"(?P<language>[a-z]{2,3})_(?P<country>[A-Z]{2})-(?P<name>[a-z0-9_]+)-(?P<quality>[a-z_]+)")
_NON_COMMERCIAL = re.compile(r"\bnc\b|non-?\s?commercial", re.IGNORECASE)

app = typer.Typer(invoke_without_command=True)


@app.callback()
def voices(  # noqa: PLR0913 - one argument per option
    context: typer.Context,
    *,
    language: Annotated[str | None, typer.Option(help="Only voices of this language, like am.")] = None,
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


@dataclass(frozen=True, slots=True)
class Source:
    """Where a voice comes from, and what is known of it before it is here."""

    repository: str
    folder: str
    name: str = ""
    """Of one voice."""
    licence: str | None = None
    subfolder: str = ""
    revision: str | None = None
    """None: the newest, which the folder's manifest then keeps."""
    pickled: bool = False
    """Its weights are converted here."""
    voices: tuple[dict[str, str], ...] = ()
    """Of a model that makes voices from instructions: the instructions."""
    tells_all: bool = False
    """Names and genders of its voices are known: the admin need not give them."""


# A woman's and a man's voice in each language of the voices that come with Hearth.
_OMNIVOICE_VOICES = tuple(
    {
        "id": f"omnivoice-{language}-{gender}",
        "name": f"OmniVoice {language_name(language)}, {gender}",
        "speaker": f"{gender}, young adult, moderate pitch",
        "language": language,
    }
    for language in ("am", "so", "ti", "om", "en")
    for gender in ("female", "male")
)
# By source, which is also the folder.
_WHOLE = {
    "kokoro": Source(
        repository="hexgrad/Kokoro-82M",
        folder="kokoro",
        licence="Apache-2.0",
        revision="f3ff3571791e39611d31c381e3a41a3af07b4987",
        pickled=True,
        tells_all=True,
    ),
    "omnivoice": Source(
        repository="k2-fsa/OmniVoice",
        folder="omnivoice",
        licence="CC-BY-NC-4.0",
        voices=_OMNIVOICE_VOICES,
        tells_all=True,
    ),
}


def source_in(weights: str, folder: str) -> str | None:
    """Return the source that is added as `folder`, or None if that is not in `_WHOLE`."""
    return next((name for name in _WHOLE if f"{weights}/{name}" == folder), None)


def source_of(text: str) -> Source:
    """Return what `kokoro`, `omnivoice`, `mms:am` or `piper:en_US-amy-medium` means; or end."""
    family, _, which = text.partition(":")
    found = _mms(which) if family == "mms" else _piper(which) if family == "piper" else _WHOLE.get(text)
    if found is None:
        refuse(
            f"{text!r} is not a source of voices. Known: kokoro, omnivoice, mms:LANGUAGE, like mms:am, and "
            "piper:VOICE, like piper:en_US-amy-medium. Add others by hand: docs/voices.md"
        )
    return found


def _mms(which: str) -> Source | None:
    code = language_code(which) or ""
    found = pycountry.languages.get(alpha_2=code) or pycountry.languages.get(alpha_3=code)
    if found is None:
        return None
    return Source(f"facebook/mms-tts-{found.alpha_3}", f"mms-{code}", f"MMS {language_name(code)}", "CC-BY-NC-4.0")


def _piper(which: str) -> Source | None:
    voice = _PIPER.fullmatch(which)
    if voice is None:
        return None
    place = f"{voice['language']}/{voice['language']}_{voice['country']}/{voice['name']}/{voice['quality']}"
    name = voice["name"].replace("_", " ").title()
    return Source("rhasspy/piper-voices", f"piper-{which.lower()}", name, subfolder=place)


@app.command()
def add(  # noqa: PLR0913 - one argument per option
    source: Annotated[
        str,
        typer.Argument(
            help="kokoro; omnivoice; mms:LANGUAGE, like mms:am; or piper:VOICE, like piper:en_US-amy-medium."
        ),
    ],
    *,
    gender: Annotated[
        Literal["female", "male"] | None,
        typer.Option(help="What the voice sounds like. Needed for mms and piper, whose files do not say."),
    ] = None,
    voice_id: Annotated[
        str | None, typer.Option("--id", help="What clients send. selam replaces the shipped Selam.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Shown to people.")] = None,
    accept_licence: Annotated[bool, typer.Option("--accept-licence", help="Do not ask about the licence.")] = False,
    weights_dir: WeightsDir = None,
    models: Models = None,
) -> None:
    """Fetch a neural voice, or those of Kokoro or OmniVoice. Resumes; asks where no commercial use is allowed."""
    wanted = source_of(source)
    if wanted.tells_all and (gender or voice_id or name):
        refuse(f"The voices of {source} have names of their own; docs/voices.md says how to change them.")
    if not wanted.tells_all and gender is None:
        refuse("Give --gender female or --gender male: the model's files do not say. Correct voices.yaml later.")
    if voice_id is not None and not ID.fullmatch(voice_id):
        refuse("--id has 1 to 64 of a-z, 0-9, `-` and `_`, and begins with a letter or digit.")
    settings = load_settings(models=models, weights_dir=weights_dir)
    weights = _weights_of_speech(load_config(settings.models))
    folder, voices = f"{weights}/{wanted.folder}", settings.weights_dir / weights
    known = read_catalogue(voices).find(voice_id or wanted.folder)
    if known is not None and known.model != wanted.folder:
        refuse(f"{known.model} has a voice {known.id} already. Give this one another --id, or remove that folder.")
    if wanted.licence is not None:
        _ask(wanted.licence, accepted=accept_licence)
    asked = Wanted(wanted.repository, folder, wanted.revision, wanted.subfolder, convert=wanted.pickled)
    if not pulled(settings.weights_dir, [asked]):
        raise typer.Exit(1)
    own = [{"id": voice_id or wanted.folder, "name": name or wanted.name, "gender": gender}] if gender else []
    _write(voices / wanted.folder, [*wanted.voices, *own], wanted.licence)
    catalogue = read_catalogue(voices)
    remarks = [one.message for one in catalogue.warnings if one.model == wanted.folder]
    found = [one for one in catalogue.voices if one.model == wanted.folder]
    if not found:
        refuse(" ".join(remarks), code=1)
    licence = found[0].licence
    with contextlib.ExitStack() as undo:  # its files name the licence; if that is refused, they must not stay
        if wanted.licence is None:
            undo.callback(remove, settings.weights_dir, folder)
            _ask(licence or "unknown", accepted=accept_licence)
            undo.pop_all()
    ids = ", ".join(one.id for one in found)
    there = f"{found[0].name} is installed as {ids}" if len(found) == 1 else f"{len(found)} voices are installed: {ids}"
    typer.echo(f"{there}. Licence: {licence or 'its files name none'}.")
    for message in remarks:
        typer.echo(message, err=True)
    typer.echo(f"Listen: {HEARTH} voices say {found[0].id} ...   Serve: {HEARTH} reload")


def _weights_of_speech(config: Config) -> str:
    found = next((spec for spec in config.models.values() if isinstance(spec, SpeechModelSpec)), None)
    if found is None:
        refuse("models.yaml has no speech model. docs/voices.md says how to add one.")
    return found.weights


def _ask(licence: str, *, accepted: bool) -> None:
    if accepted or not _NON_COMMERCIAL.search(licence.replace("_", "-")):
        return
    try:
        typer.confirm(f"The licence is {licence}: no commercial use. Accept it?", abort=True)
    except typer.Abort:
        refuse("\nThe licence is not accepted: nothing is installed. --accept-licence accepts it.", code=1)


def _write(place: Path, voices: Sequence[dict[str, str]], licence: str | None) -> None:
    """Write to voices.yaml what the model's files do not say; a file that is there stays."""
    file = place / FILE
    if not voices or file.exists():
        return
    said = {"voices": voices} | ({"licence": licence} if licence else {})
    file.write_text(json.dumps(said, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")  # JSON is YAML


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
