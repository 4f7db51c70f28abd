"""The options that commands share, and what they stand for: settings, models.yaml, the database; and how to refuse.

Exit codes: 1, the database or models.yaml cannot be used; 2, a wrong argument.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from engine import Config
from engine.config import load_config
from engine.errors import EngineError
from engine.placement.hardware import Hardware, read_hardware, with_ram
from server.instance import running_pid
from server.observability.moments import MomentError
from server.settings import Settings, SettingsError, database_url, load_settings
from server.store import Database, KeyFieldError, KeyNotFoundError, StoreError
from server.store.keys import public_id_in
from server.store.sqlite import FILE_NAME
from server.terminal import HEARTH, keys_command

T = TypeVar("T")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
DataDir = Annotated[Path | None, typer.Option(help="Data directory of the server [HEARTH_DATA_DIR, var].")]
WeightsDir = Annotated[Path | None, typer.Option(help="Where models are kept [HEARTH_WEIGHTS_DIR].")]
Models = Annotated[Path | None, typer.Option(help="The server's models.yaml [HEARTH_MODELS].")]


def refuse(message: str, *, code: int = 2) -> NoReturn:
    """Say why not on stderr, and end."""
    typer.echo(message, err=True)
    raise typer.Exit(code)


def settings_for(
    data_dir: Path | None = None, models: Path | None = None, *, weights_dir: Path | None = None
) -> Settings:
    """Read the settings, or end."""
    try:
        return load_settings(data_dir=data_dir, models=models, weights_dir=weights_dir)
    except SettingsError as error:
        refuse(str(error))


def config_for(settings: Settings) -> Config:
    """Read models.yaml, or end."""
    try:
        return load_config(settings.models)
    except EngineError as error:
        refuse(error.message, code=1)


def hardware_for(settings: Settings) -> Hardware:
    """Return this machine as a plan sees it: what a running server has taken counts as free."""
    machine = read_hardware(settings.weights_dir, server_pid=running_pid(settings.data_dir))
    return with_ram(machine, settings.ram_gib)


def in_store(settings: Settings, work: Callable[[Database], Awaitable[T]], *, make_store: bool = False) -> T:
    """Run `work` on the opened database, or end. Only with `make_store` is one made where there is none."""
    if not make_store and settings.database_url is None and not (settings.data_dir / FILE_NAME).exists():
        refuse(
            f"There is no key store in {settings.data_dir}. Pick one: 1. make the first key: "
            f"{keys_command(settings, 'create')}; 2. name the server's data directory with --data-dir (of keys: "
            f"{HEARTH} keys --data-dir ...), or HEARTH_DATA_DIR.",
            code=1,
        )

    async def opened() -> T:
        async with await Database.open(database_url(settings)) as database:
            return await work(database)

    try:
        return asyncio.run(opened())
    except (KeyFieldError, KeyNotFoundError) as error:
        refuse(error.message)
    except StoreError as error:
        refuse(error.message, code=1)


def key_named(given: str) -> str:
    """Return the public id in what was typed: the id, `hk_<id>`, or a whole key; or end."""
    named = public_id_in(given)
    if named is None:
        # What was typed is not repeated: it may be part of a secret
        refuse(f"That is no key id. An id is 12 letters and digits; `{HEARTH} keys list` shows them.")
    return named


def read_time(option: str, given: str, read: Callable[[str, datetime], datetime], now: datetime) -> datetime:
    """Read an option that is a time, or end."""
    try:
        return read(given, now)
    except MomentError as error:
        refuse(f"{option} {given!r} is no time: it {error}.")


def print_json(value: dict[str, Any]) -> None:
    """Print one object on one line."""
    sys.stdout.write(json.dumps(value) + "\n")
