"""The command behind scripts/bench/run. A new benchmark is a module with a command function, added here."""

from __future__ import annotations

import typer
from bench import batch, chat, fair, images, soak, start

app = typer.Typer(
    name="bench",
    help="Benchmarks of Hearth on this machine. See docs/benchmarks.md.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

app.command()(chat.chat)
app.command()(fair.fair)
app.command()(images.images)
app.command()(batch.batch)
app.command()(start.start)
app.command()(start.killed)
app.command()(soak.many)
app.command()(soak.soak)

if __name__ == "__main__":
    app()
