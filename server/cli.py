"""The command `hearth`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import Annotated

import typer

from engine.config import load_config
from engine.errors import EngineError
from server import cli_audit, cli_keys, cli_usage, cli_voices
from server.instance import InstanceError, ask_to_reload
from server.settings import SettingsError, load_settings
from server.store import StoreError

# What uvicorn says when a file is cut off, which happens on purpose: sse.py says why.
_CUT_OFF = "ASGI callable returned without completing response."

app = typer.Typer(
    help="Hearth: chat, images and speech on your own machine.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.add_typer(cli_keys.app, name="keys")
app.add_typer(cli_voices.app, name="voices")
for command in (cli_usage.usage, cli_audit.audit, cli_audit.backup):
    app.command()(command)


@app.command()
def serve(  # one argument per flag
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on [HEARTH_HOST, 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on [HEARTH_PORT, 8000].")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Keys, logs, files [HEARTH_DATA_DIR, var].")] = None,
    weights_dir: Annotated[Path | None, typer.Option(help="Models [HEARTH_WEIGHTS_DIR, weights].")] = None,
    models: Annotated[Path | None, typer.Option(help="What is served [HEARTH_MODELS, models.yaml].")] = None,
) -> None:
    """Start the server and keep it running until SIGTERM or Ctrl-C."""
    from server.serve import StartError, run

    try:
        settings = load_settings(host=host, port=port, data_dir=data_dir, weights_dir=weights_dir, models=models)
        # Ours at the level asked for; of libraries only what goes wrong.
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are a line per stranger's mistake
        logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != _CUT_OFF)
        logging.getLogger("hearth").setLevel(settings.log_level.upper())
        run(settings, load_config(settings.models))
    except (SettingsError, StartError, InstanceError, EngineError, StoreError) as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(1) from None


@app.command()
def reload(
    *,
    data_dir: Annotated[Path | None, typer.Option(help="That of the server [HEARTH_DATA_DIR, var].")] = None,
    models: Annotated[Path | None, typer.Option(help="The server's models.yaml [HEARTH_MODELS].")] = None,
) -> None:
    """Have the running server read models.yaml again, without cutting an answer short."""
    try:
        settings = load_settings(data_dir=data_dir, models=models)
        load_config(settings.models)  # a mistake is better told here than in the server's log
        pid = ask_to_reload(settings.data_dir)
    except (SettingsError, InstanceError, EngineError) as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(1) from None
    sys.stdout.write(f"The server (process {pid}) reads {settings.models} again.\n")


def main() -> None:
    """Run the command line."""
    app()
