"""The command `hearth`. A command's file is imported only when it runs, so none waits for another's imports."""

from __future__ import annotations

import atexit
import gc
import importlib
from pathlib import Path  # typer reads the annotations
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from server.cli.options import Commands, refuse

# In the order of the help: where each command is, and its line there, which its docstring repeats.
COMMANDS = {
    "keys": ("server.cli.keys:app", "Create, show, change and revoke API keys."),
    "voices": ("server.cli.voices:app", "List voices, or let one speak."),
    "weights": ("server.cli.weights:app", "Fetch models, verify them, move them to a host without internet."),
    "status": ("server.cli.status:status", "Show the server's state: models, memory, queues, GPUs."),
    "requests": ("server.cli.status:requests", "Show the latest requests that were refused or failed."),
    "batches": (
        "server.cli.batches:app",
        "Run files of requests, and show or cancel those that run. The key is taken from HEARTH_KEY.",
    ),
    "doctor": ("server.cli.doctor:doctor", "Find problems and suggest fixes."),
    "plan": ("server.cli.plan:plan", "Show which weights serve each model on this machine, on which device, and why."),
    "reload": (
        "server.cli.status:reload",
        "Have the running server read its models.yaml, weights, voices and certificate again, and print what changed.",
    ),
    "cluster": ("server.cli.cluster:app", "Run Hearth on several machines, with Ray Serve."),
    "usage": ("server.cli.database:usage", "Show requests and tokens."),
    "audit": ("server.cli.database:audit", "Show who changed keys and configuration, newest first."),
    "backup": ("server.cli.database:backup", "Copy the whole database (keys, usage, audit log) while the server runs."),
    "restore": ("server.cli.database:restore", "Replace the database with a backup; the old one is moved aside."),
    "compile": ("server.cli.compile:compile_models", "Compile chat models for faster answers on a CPU."),
}


class _OnDemand(TyperCommand):
    """Stands for a command in the help, and becomes it when it is called."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self._command().make_context(info_name, args, parent, **extra)

    def _command(self) -> Any:
        module, _, name = COMMANDS[str(self.name)][0].partition(":")
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, typer.Typer):
            return typer.main.get_group(found)
        alone = typer.Typer(add_completion=False)
        alone.command(self.name)(found)
        return typer.main.get_command(alone)


class _AllCommands(Commands):
    """`serve`, which is here, and those that are imported on demand."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, line) in COMMANDS.items():
            self.add_command(_OnDemand(name, callback=None, help=line))


app = typer.Typer(cls=_AllCommands, no_args_is_help=True, pretty_exceptions_show_locals=False)


def _version(asked: bool) -> None:  # noqa: FBT001  # typer calls it
    if asked:
        import importlib.metadata

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
    data_dir: Annotated[Path | None, typer.Option(help="Folder of keys, logs, files [HEARTH_DATA_DIR, var].")] = None,
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of models [HEARTH_WEIGHTS_DIR, weights].")] = None,
    models: Annotated[Path | None, typer.Option(help="What is served [HEARTH_MODELS, models.yaml].")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM), for HTTPS [HEARTH_TLS_CERT].")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM) [HEARTH_TLS_KEY].")] = None,
    real: Annotated[
        bool, typer.Option("--real", help="First fetch the models that the plan wants; asks once.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --real: fetch without a question.")] = False,
) -> None:
    """Start the server and keep it running until SIGTERM or Ctrl-C."""
    from engine.config import load_config
    from server.http.tls import TlsError
    from server.serve import StartError, run
    from server.settings import SettingsError, load_settings
    from server.terminal import set_up_log

    try:
        folders = {"data_dir": data_dir, "weights_dir": weights_dir, "models": models}
        settings = load_settings(host=host, port=port, **folders, tls_cert=tls_cert, tls_key=tls_key)
        set_up_log(settings.log_level)
        config = load_config(settings.models)
        if real:
            from server.cli.plan import prepare

            prepare(settings, config, yes=yes)
        run(settings, config)
    except (SettingsError, StartError, TlsError) as error:
        refuse(str(error), code=1)


def main() -> None:
    # Imported objects stay: collecting garbage among them takes a tenth of a short command's time, and a third at its
    # exit, where all memory is freed anyway. `serve` sets its own thresholds.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    app()
