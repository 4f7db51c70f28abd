"""`hearth voices add`: fetches a neural voice, verified like all weights, shows its licence and gives it a name.

Nothing is installed: where what runs its family is missing, the command says how to install it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pycountry
import typer

from engine import language_code
from engine.config import Config, load_config
from engine.config.models import SpeechModelSpec
from engine.voices.catalogue import read_catalogue
from engine.voices.languages import language_name
from engine.voices.overlay import FILE, ID
from engine.weights.download import Wanted
from engine.weights.transfer import remove
from server.cli.options import Models, WeightsDir, refuse
from server.cli.weights import pulled
from server.settings import load_settings
from server.terminal import HEARTH

_PIPER = re.compile(r"(?P<language>[a-z]{2,3})_(?P<country>[A-Z]{2})-(?P<name>[a-z0-9_]+)-(?P<quality>[a-z_]+)")
_NON_COMMERCIAL = re.compile(r"\bnc\b|non-?\s?commercial", re.IGNORECASE)


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
    """Of a model that makes voices of instructions: those that it is given."""
    tells_all: bool = False
    """What its voices are called, and whether they are a woman's or a man's, is known without the admin."""


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
# By what they are called, which is also their folder.
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
    """Return what to call the source that is added as `folder`; None: that is no whole model which is known here."""
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
        str | None, typer.Option("--id", help="What clients send. selam takes the shipped Selam's place.")
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
    with contextlib.ExitStack() as undo:  # it is here to be read, and must not stay if it is refused
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
    """Say in voices.yaml what the model's files do not; what people wrote there stays."""
    file = place / FILE
    if not voices or file.exists():
        return
    said = {"voices": voices} | ({"licence": licence} if licence else {})
    file.write_text(json.dumps(said, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")  # JSON is YAML
