"""The command behind scripts/bench/run. A new benchmark is a class of options, added here."""

import signal
import sys

import psutil
import typer
from bench import batch, chat, fair, files, images, many, pictures, speech, start, tracing, vectors
from bench.load import BenchError
from cluster_plan import ClusterPlan

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
    fair.Fair,
    images.Images,
    batch.Batch,
    files.Files,
    start.Start,
    start.Killed,
    many.Many,
    pictures.Pictures,
    speech.Speech,
    vectors.Vectors,
    tracing.Tracing,
):
    app.command(command.__name__.lower())(command)
app.command("cluster-plan")(ClusterPlan)

if __name__ == "__main__":
    # As Ctrl-C does, SIGTERM ends the servers and engines too.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        app()
    except (BenchError, ConfigError) as error:
        sys.exit(str(error))
    except psutil.Error as error:
        sys.exit(f"A process of the server ended: {error}")
