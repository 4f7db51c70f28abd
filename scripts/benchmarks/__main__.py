"""The command behind scripts/bench. A new benchmark is a module with a command function, added here."""

from __future__ import annotations

import typer

from benchmarks import batch, chat, cost, fair, guidellm, images, keys, many, revisions, soak, speech, start

app = typer.Typer(
    name="bench",
    help="Benchmarks of Hearth on this machine. See docs/benchmarks.md.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


app.command()(chat.chat)
app.command()(cost.cost)
app.command()(batch.batch)
app.command()(fair.fair)
app.command()(images.images)
app.command()(keys.keys)
app.command()(speech.speech)
app.command()(start.start)
app.command()(start.killed)
app.command("compare")(revisions.compare_revisions)
app.command()(guidellm.guidellm)
app.command()(many.many)
app.command()(soak.soak)

if __name__ == "__main__":
    app()
