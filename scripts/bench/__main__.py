"""The command behind scripts/bench/run. A new benchmark is a module with a command function, added here."""

from __future__ import annotations

import signal
import sys

import typer
from bench import batch, chat, fair, images, soak, start
from bench.load import BenchError
from bench.servers import say

app = typer.Typer(
    name="bench",
    help="Benchmarks of Hearth on this machine. See docs/benchmarks.md.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
for command in (chat.chat, fair.fair, images.images, batch.batch, start.start, start.killed, soak.many, soak.soak):
    app.command()(command)

if __name__ == "__main__":
    # As Ctrl-C does, SIGTERM ends the servers and engines too.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        app()
    except BenchError as error:
        say(str(error))
        sys.exit(1)
