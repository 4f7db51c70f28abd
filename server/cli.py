"""The command `hearth`."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import Annotated

import typer

from engine.config import load_config
from engine.errors import EngineError
from server import cli_audit, cli_doctor, cli_keys, cli_plan, cli_status, cli_usage, cli_voices, cli_weights
from server.cli_store import refuse
from server.instance import InstanceError, ask_to_reload
from server.reload_outcome import wait_for
from server.settings import SettingsError, load_settings
from server.store import StoreError
from server.tls import TlsError

# What uvicorn says when a file is cut off, which happens on purpose: sse.py says why.
_CUT_OFF = "ASGI callable returned without completing response."
_RELOAD_SECONDS = 60.0  # a thousand voices on a slow disk

app = typer.Typer(
    help="Hearth: chat, images and speech on your own machine.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.add_typer(cli_keys.app, name="keys")
app.add_typer(cli_voices.app, name="voices")
app.add_typer(cli_weights.app, name="weights")
for command in (
    cli_status.status,
    cli_doctor.doctor,
    cli_plan.plan,
    cli_usage.usage,
    cli_audit.audit,
    cli_audit.backup,
):
    app.command()(command)


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
        settings = load_settings(
            host=host,
            port=port,
            data_dir=data_dir,
            weights_dir=weights_dir,
            models=models,
            tls_cert=tls_cert,
            tls_key=tls_key,
        )
        # Ours at the level asked for; of libraries only what goes wrong.
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are a line per stranger's mistake
        logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != _CUT_OFF)
        logging.getLogger("hearth").setLevel(settings.log_level.upper())
        run(settings, load_config(settings.models))
    except (SettingsError, StartError, TlsError, InstanceError, EngineError, StoreError) as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(1) from None


@app.command()
def reload(
    *,
    data_dir: Annotated[Path | None, typer.Option(help="That of the server [HEARTH_DATA_DIR, var].")] = None,
    models: Annotated[Path | None, typer.Option(help="The server's models.yaml [HEARTH_MODELS].")] = None,
) -> None:
    """Have the running server read models.yaml and the voices again, and say what came of it.

    No answer is cut short. Exit code 1: it was refused, or nobody knows.
    """
    asked_at_ns = time.monotonic_ns()
    try:
        settings = load_settings(data_dir=data_dir, models=models)
        load_config(settings.models)
        pid = ask_to_reload(settings.data_dir)
    except (SettingsError, InstanceError, EngineError) as error:
        refuse(str(error), code=1)
    outcome = wait_for(settings.data_dir, pid, asked_at_ns, _RELOAD_SECONDS)
    if outcome is None:
        refuse(
            f"The server (process {pid}) was asked, but does not say what came of it: it has ended, is still starting, "
            "or is very busy. Its log tells when it reads models.yaml; then ask again.",
            code=1,
        )
    if outcome.refused is not None:
        refuse(f"The server (process {pid}) took nothing over: {outcome.refused}\nEverything stays as it was.", code=1)
    typer.echo(f"The server (process {pid}) has read {outcome.path} again.")
    for sentence in outcome.sentences() or ["nothing has changed"]:
        typer.echo(f"  {sentence}")
    for warning in outcome.warnings:
        typer.echo(f"Warning: {warning}", err=True)


def main() -> None:
    """Run the command line."""
    app()
