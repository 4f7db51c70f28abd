"""The command behind scripts/bench. A new benchmark is a module with a command function, added here."""

from __future__ import annotations

import typer

from benchmarks import chat

app = typer.Typer(
    name="bench",
    help="Benchmarks of Hearth on this machine. See docs/benchmarks.md.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def _several_commands() -> None:
    """Keep typer from dropping the sub-command's name while there is only one."""


app.command()(chat.chat)

if __name__ == "__main__":
    app()
