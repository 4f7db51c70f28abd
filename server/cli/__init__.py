"""The command line, `hearth`: one file for each group of commands."""

from server.cli.main import app, main

__all__ = ["app", "main"]
