"""What commands share: options, the opened database, one way to print for people or as JSON, and one to refuse.

Every command imports this file, so what takes time to import is imported where it is used.
Exit codes: 1, the database, models.yaml or weights cannot be used; 2, a wrong argument.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import typer
from rich.console import RenderableType
from typer.core import TyperGroup

if TYPE_CHECKING:
    from engine.placement.hardware import Hardware, Prefer
    from server.settings import Settings
    from server.store.database import Database

T = TypeVar("T")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
DataDir = Annotated[Path | None, typer.Option(help="Data directory of the server [HEARTH_DATA_DIR, var].")]
WeightsDir = Annotated[Path | None, typer.Option(help="Where models are kept [HEARTH_WEIGHTS_DIR].")]
Preferred = Annotated[
    Literal["resident", "quality"] | None,
    typer.Option(help="Models that stay loaded, or better ones that take turns [HEARTH_PREFER, resident]."),
]
Models = Annotated[Path | None, typer.Option(help="The server's models.yaml [HEARTH_MODELS].")]


class Commands(TyperGroup):
    """Commands whose errors, if they are of our own classes, end them with the message on stderr."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            code = _exit_code(error)
            if isinstance(error, PermissionError) and error.filename is not None:
                refuse(f"This user may not open {error.filename}. Run this as the user of the server.", code=1)
            if code is None:
                raise
            refuse(str(error), code=code)


def _exit_code(error: Exception) -> int | None:
    """Return the exit code for an error of ours; None for any other."""
    from engine.errors import EngineError
    from engine.placement.hardware import HardwareError
    from server.instance import InstanceError
    from server.observability.status import StatusError
    from server.settings import SettingsError
    from server.store import KeyFieldError, KeyNotFoundError, StoreError

    if isinstance(error, (SettingsError, KeyFieldError, KeyNotFoundError, StatusError, HardwareError)):
        return 2
    return 1 if isinstance(error, (EngineError, StoreError, InstanceError)) else None


def refuse(message: str, *, code: int = 2) -> NoReturn:
    """Print the reason on stderr, and end."""
    typer.echo(message, err=True)
    raise typer.Exit(code)


def tell(data: Mapping[str, Any], *lines: RenderableType, as_json: bool) -> None:
    """Print `data` as one line of JSON and nothing else, or the lines and tables for people."""
    if as_json:
        sys.stdout.write(json.dumps(data) + "\n")
        return
    from server.terminal import print_rich

    for line in lines:
        (typer.echo if isinstance(line, str) else print_rich)(line)


def hardware_for(
    settings: Settings, gpus: str | None = None, ram_gib: float | None = None, prefer: Prefer | None = None
) -> Hardware:
    """Return the machine to plan for: an imagined one, or this one, where what a running server has counts as free."""
    from engine.placement.hardware import imagined, meant_for, read_hardware
    from server.instance import running_pid

    wanted = prefer or settings.prefer
    if gpus is not None:
        return meant_for(imagined(gpus) if ram_gib is None else imagined(gpus, ram_gib=ram_gib), None, wanted)
    return meant_for(read_hardware(running_pid(settings.data_dir)), settings.ram_gib, wanted)


def in_store(settings: Settings, work: Callable[[Database], Awaitable[T]], *, make_store: bool = False) -> T:
    """Run `work` on the opened database. A missing one is made only with `make_store`."""
    import asyncio

    from server.settings import database_url
    from server.store import StoreError
    from server.store.database import Database
    from server.terminal import HEARTH, keys_command

    if not make_store and missing_store(settings) is not None:
        raise StoreError(
            f"There is no key store in {settings.data_dir}. Pick one: 1. name the server's data directory with "
            f"--data-dir (of keys: {HEARTH} keys --data-dir ...), or HEARTH_DATA_DIR; 2. make the first key: "
            f"{keys_command(settings, 'create')}."
        )

    async def opened() -> T:
        async with await Database.open(database_url(settings)) as database:
            return await work(database)

    return asyncio.run(opened())


def missing_store(settings: Settings) -> Path | None:
    """Return the key database's file where there is none yet."""
    from server.store.sqlite import FILE_NAME

    file = settings.data_dir / FILE_NAME
    return None if settings.database_url is not None or file.exists() else file


def key_named(given: str | None) -> str | None:
    """Return the public id in what was typed: the id, `hk_<id>`, or a whole key; or end."""
    from server.store.keys import public_id_in
    from server.terminal import HEARTH

    if given is None:
        return None
    # What was typed is not repeated: it may be part of a secret
    unknown = f"That is not the id of a key. An id is 12 letters and digits; `{HEARTH} keys list` shows ids and names."
    return public_id_in(given) or refuse(unknown)


def read_time(option: str, given: str, read: Callable[[str, datetime], T], now: datetime) -> T:
    """Read an option that is a time or a span, or end."""
    from server.validation import MomentError

    try:
        return read(given, now)
    except MomentError as error:
        refuse(f"{option} {given!r} is not a time: it {error}.")
