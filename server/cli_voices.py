"""`hearth voices`: which voices there are, and what is wrong with the rest, without a server.

How one speaks on the command line is cli_say.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from engine.config import SpeechModelSpec
from engine.voices.catalogue import Voices
from server.cli_say import say
from server.cli_store import AsJson, Models, WeightsDir, config_for, print_json, refuse, settings_for
from server.cli_tables import print_rich
from server.command_name import HEARTH
from server.errors import ApiError
from server.schemas.voices import Voice, VoiceList, VoiceQuery

if TYPE_CHECKING:
    from collections.abc import Sequence

_COLUMNS = ("id", "name", "gender", "language", "type", "model", "licence", "demo", "available")
_SHORT = {"language": "lang", "available": "ready"}  # so that nine columns fit in a usual terminal

app = typer.Typer(invoke_without_command=True)
app.command()(say)


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
    """Show which voices there are, or have one speak. No server is needed."""
    if context.invoked_subcommand is not None:
        return
    settings = settings_for(models=models, weights_dir=weights_dir)
    config = config_for(settings)
    offered = Voices(config, settings.weights_dir)
    entries = [spec.id for spec in config.models.values() if isinstance(spec, SpeechModelSpec)]
    found = [(entry, voice) for entry in entries for voice in offered.of(entry)]
    try:
        listed = VoiceList.of(VoiceQuery(language=language, gender=gender, model=model).chosen(found)).voices
    except ApiError as wrong:
        refuse(wrong.message)
    told = [_told(entry, one.model, one.voice, one.message) for entry in entries for one in offered.warnings(entry)]
    problems = [
        _told(entry, None, None, error.message) for entry in entries if (error := offered.problem(entry)) is not None
    ]
    if as_json:
        print_json({"voices": [voice.model_dump() for voice in listed], "warnings": told + problems})
    else:
        _show(listed, entries)
        for one in told + problems:
            typer.echo(f"{one['served_by']}: {one['message']}", err=True)
    if problems:
        raise typer.Exit(1)


def _told(entry: str, model: str | None, voice: str | None, message: str) -> dict[str, str | None]:
    return {"served_by": entry, "model": model, "voice": voice, "message": message}


def _show(listed: Sequence[Voice], entries: Sequence[str]) -> None:
    if not entries:
        typer.echo("No model of models.yaml speaks. docs/voices.md shows an entry that does.")
    elif not listed:
        typer.echo(f"There is no such voice. `{HEARTH} voices` without options shows all of them.")
    else:
        table = Table(*(_SHORT.get(column, column) for column in _COLUMNS), box=box.SIMPLE)
        for voice in listed:
            table.add_row(*(Text(_shown(getattr(voice, column))) for column in _COLUMNS))
        print_rich(table)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
