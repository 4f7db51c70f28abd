"""What a command imports: nobody waits for a library that the command does not use."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from server.cli import COMMANDS, app

HEAVY = {"torch", "vllm", "transformers", "diffusers", "numpy", "av"}
WEB = {"fastapi", "uvicorn", "engine.engine"}
STORE = {"sqlalchemy", "alembic"}
MODELS = {"engine.config", "yaml"}
LIST = "import sys; from server.cli import main\ntry: main()\nfinally: print('\\n'.join(['', *sys.modules]))"


@pytest.mark.parametrize(
    ("command", "unwanted"),
    [
        ("--help", HEAVY | WEB | STORE | {"pydantic", "engine"}),
        ("status", HEAVY | WEB | STORE | MODELS),
        ("keys list", HEAVY | WEB | {"alembic"}),
        ("usage", HEAVY | WEB | MODELS | {"alembic"}),
        ("audit", HEAVY | WEB | MODELS | {"alembic"}),
        ("voices", HEAVY | WEB | STORE),
        ("plan", HEAVY | WEB | STORE),
        ("doctor", HEAVY | WEB | STORE),
    ],
)
def test_a_command_imports_only_what_it_uses(command: str, unwanted: set[str], tmp_path: Path):
    environment = {"HEARTH_DATA_DIR": str(tmp_path), "HEARTH_WEIGHTS_DIR": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", LIST, *command.split()], env=environment, capture_output=True, text=True, check=False
    )
    imported = set(done.stdout.splitlines())
    assert "server.cli.options" in imported, done.stderr
    assert imported & unwanted == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_all_commands_says_of_each_what_its_own_help_says(name: str):
    where, line = COMMANDS[name]
    module, _, attribute = where.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    own = typer.main.get_group(found).help if isinstance(found, typer.Typer) else found.__doc__
    assert own is not None
    assert own.startswith(line)
    assert typer.main.get_group(app).commands[name].help == line


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_shows_an_optional_list_in_one_pair_of_brackets(name: str):
    where = COMMANDS[name][0].split(":")
    found = getattr(importlib.import_module(where[0]), where[1])
    parts = typer.main.get_group(found).commands if isinstance(found, typer.Typer) else [None]
    for part in parts:
        help_text = CliRunner().invoke(app, [*filter(None, (name, part)), "--help"]).stdout
        assert "Usage:" in help_text
        assert "[[" not in help_text
