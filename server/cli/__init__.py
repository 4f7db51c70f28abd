"""The command `hearth`."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path  # typer reads the annotations
from typing import Annotated

import typer

from engine.config import load_config
from server.cli import audit, keys, plan, status, usage, voices, weights
from server.cli.compile import compile_models
from server.cli.doctor.command import doctor
from server.cli.options import Commands, refuse
from server.http.tls import TlsError
from server.settings import SettingsError, load_settings, removed_names
from server.terminal import set_up_log

_log = logging.getLogger("hearth.serve")

app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_show_locals=False)
app.add_typer(keys.app, name="keys")
app.add_typer(voices.app, name="voices")
app.add_typer(weights.app, name="weights")
for command in (status.status, doctor, plan.plan, status.reload, usage.usage, audit.audit, audit.backup, audit.restore):
    app.command()(command)
app.command("compile")(compile_models)


def _version(asked: bool) -> None:  # noqa: FBT001  # typer calls it
    if asked:
        typer.echo(f"hearth {importlib.metadata.version('hearth-inference')}")
        raise typer.Exit


@app.callback()
def flags(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hearth: chat, images and speech on your own machine."""


@app.command()
def serve(  # noqa: PLR0913  # one argument per flag
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on [HEARTH_HOST, 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on [HEARTH_PORT, 8000].")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Keys, logs, files [HEARTH_DATA_DIR, var].")] = None,
    weights_dir: Annotated[Path | None, typer.Option(help="Models [HEARTH_WEIGHTS_DIR, weights].")] = None,
    models: Annotated[Path | None, typer.Option(help="What is served [HEARTH_MODELS, models.yaml].")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM), for HTTPS [HEARTH_TLS_CERT].")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM) [HEARTH_TLS_KEY].")] = None,
) -> None:
    """Start the server and keep it running until SIGTERM or Ctrl-C."""
    from server.serve import StartError, run

    try:
        folders = {"data_dir": data_dir, "weights_dir": weights_dir, "models": models}
        settings = load_settings(host=host, port=port, **folders, tls_cert=tls_cert, tls_key=tls_key)
        set_up_log(settings.log_level)
        for name in removed_names():
            _log.warning("%s has no effect any more: it was removed (CHANGELOG.md). Take it out of the settings.", name)
        run(settings, load_config(settings.models))
    except (SettingsError, StartError, TlsError) as error:
        refuse(str(error), code=1)


def main() -> None:
    app()
