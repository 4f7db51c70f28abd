"""`hearth reload`: has the running server read models.yaml, voices and certificate again, and says what came of it.

What the server does is reload.py's. A model that has to be loaded anew is waited for as long as failing at once takes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from engine.config import load_config
from engine.errors import EngineError
from server.cli.options import DataDir, Models, refuse
from server.instance import InstanceError, ask_to_reload
from server.reload_outcome import wait_for
from server.settings import SettingsError, load_settings
from server.status_socket import StatusError, ask
from server.terminal import HEARTH

if TYPE_CHECKING:
    from pathlib import Path

    from server.reload_outcome import Outcome
    from server.schemas.status import ModelState

_OUTCOME_SECONDS = 60.0  # a thousand voices on a slow disk
_STATUS_SECONDS = 10.0
_AT_ONCE_SECONDS = 3.0  # a folder that is missing, a plan that has no room
_POLL_SECONDS = 0.1


def reload(*, data_dir: DataDir = None, models: Models = None) -> None:
    """Have the running server read models.yaml, voices and certificate again, and say what came of it.

    No answer is cut short. Exit code 1: something was refused, a changed model fails at once, or nobody knows.
    """
    asked_at_ns = time.monotonic_ns()
    try:
        settings = load_settings(data_dir=data_dir, models=models)
        load_config(settings.models)
        pid = ask_to_reload(settings.data_dir)
    except (SettingsError, InstanceError, EngineError) as error:
        refuse(str(error), code=1)
    outcome = wait_for(settings.data_dir, pid, asked_at_ns, _OUTCOME_SECONDS)
    if outcome is None:
        refuse(
            f"The server (process {pid}) was asked, but does not say what came of it: it has ended, is still starting, "
            "or is very busy. Its log tells when it reads models.yaml; then ask again.",
            code=1,
        )
    well = _told(outcome)
    if outcome.refused is None and not _settled(settings.data_dir, {*outcome.models.added, *outcome.models.changed}):
        well = False
    if not well:
        raise typer.Exit(1)


def _told(outcome: Outcome) -> bool:
    """Say what the server has taken over; False if it refused some of it."""
    certificate = outcome.certificate
    if outcome.refused is not None:
        typer.echo(f"The server (process {outcome.pid}) did not take models.yaml over: {outcome.refused}", err=True)
        renewed = certificate is not None and certificate.renewed
        rest = "But the TLS certificate is renewed." if renewed else "Everything stays as it was."
        typer.echo(rest, err=True)
    else:
        typer.echo(f"The server (process {outcome.pid}) has read {outcome.path} again.")
        for sentence in outcome.sentences() or ["nothing has changed"]:
            typer.echo(f"  {sentence}")
        for warning in outcome.warnings:
            typer.echo(f"Warning: {warning}", err=True)
    if certificate is not None and certificate.refused is not None:
        typer.echo(f"The TLS certificate was refused, and the old one is still shown: {certificate.refused}", err=True)
        return False
    return outcome.refused is None


def _settled(data_dir: Path, changed: set[str]) -> bool:
    """Say how the changed models fare; False if one has failed already."""
    states = _states(data_dir, changed)
    deadline = time.monotonic() + _AT_ONCE_SECONDS
    while any(state.status == "loading" for state in states) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        states = _states(data_dir, changed)
    for state in states:
        if state.status == "failed":
            typer.echo(f"{state.id} cannot be served: {state.reason}", err=True)
        elif state.status == "loading":
            typer.echo(f"  {state.id} is being loaded ({state.phase}): `{HEARTH} status` tells what comes of it")
    return all(state.status != "failed" for state in states)


def _states(data_dir: Path, names: set[str]) -> list[ModelState]:
    """Return how these models stand; nothing where the server does not say, since it has answered already."""
    if not names:
        return []
    try:
        found = ask(data_dir, _STATUS_SECONDS)
    except StatusError:
        return []
    return [state for state in found.models if state.id in names] if found is not None else []
