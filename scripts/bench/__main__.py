"""The command behind scripts/bench/run. A new benchmark is a class of options, added here."""

import signal
import sys

import psutil
import typer
from bench import batch, chat, media, overhead, overload
from bench.load import BenchError

from engine import ConfigError

app = typer.Typer(
    name="bench",
    help="Benchmarks of Hearth on this machine. See docs/benchmarks-method.md.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    result_callback=lambda benchmark: benchmark.run(),
)
for command in (
    chat.Chat,
    overload.Fair,
    chat.Start,
    chat.Killed,
    overhead.Tracing,
    media.Images,
    batch.Batch,
    batch.Files,
    overload.Many,
    overload.Pictures,
    media.Speech,
    overhead.Vectors,
):
    app.command(command.__name__.lower())(command)

if __name__ == "__main__":
    # As Ctrl-C does, SIGTERM ends the servers and engines too.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        app()
    except (BenchError, ConfigError) as error:
        sys.exit(str(error))
    except psutil.Error as error:
        sys.exit(f"A process of the server ended: {error}")
