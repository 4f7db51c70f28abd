"""The English of documents, help and messages: the field's own words, and lines that fit a screen."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from serving import ROOT
from test_docs import PAGES

from server.cli import _OnDemand, app

# Each replaces a word of the field: queue, slot, administrator, queued key, contains, no key, evicts, random, again.
NOT_OURS = re.compile(
    r"\b(crowds?|visits?|seats?|desks?|shelf|shelves|whoever|who waits|is told|are told|holds|nobody|makes? room"
    r"|by chance|anew)\b",
    re.IGNORECASE,
)
# "Not ... yet" is English; "yet" for "so far" is not.
SO_FAR = re.compile(r"\byet\b", re.IGNORECASE)
NEGATED = re.compile(r"\b(not|no|never|nothing|none|cannot)\b|n't", re.IGNORECASE)
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
SOURCES = [file for folder in ("engine", "server") for file in sorted((ROOT / folder).rglob("*.py"))]
WRITTEN = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "engine/DESIGN.md"]


def faults(words: str) -> list[str]:
    """What is said in words that are not the field's."""
    found = [match[0] for match in NOT_OURS.finditer(words)]
    sentences = re.split(r"(?<=[.:;])\s", words)
    return found + [one for one in sentences if SO_FAR.search(one) and not NEGATED.search(one)]


def messages(file: Path) -> Iterator[str]:
    """Yield each text of a source file that is not a docstring: what it prints, logs or answers."""
    tree = ast.parse(file.read_text())
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def commands(command: Any) -> Iterator[Any]:
    """Yield a command of the program and all below it."""
    command = command._command() if isinstance(command, _OnDemand) else command
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from commands(below)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_a_page_uses_the_words_of_the_field(page: Path):
    prose = re.sub(r"`[^`]*`", "", CODE.sub("", page.read_text()))
    if page.name == "DESIGN.md":
        prose = prose.partition("\n## Words")[0]  # that section names the words which are not used
    assert faults(prose) == []


def test_comments_of_models_yaml_use_the_words_of_the_field():
    assert [word for line in (ROOT / "models.yaml").read_text().splitlines() for word in faults(line)] == []


def test_messages_use_the_words_of_the_field():
    found = {f"{file.relative_to(ROOT)}: {text}" for file in SOURCES for text in messages(file) if faults(text)}
    assert found == set()


def test_help_uses_the_words_of_the_field():
    helped = [text for one in commands(typer.main.get_command(app)) for text in (one.name, one.help) if text]
    assert len(helped) > 60
    assert [text for text in helped if faults(text)] == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_no_line_of_prose_is_longer_than_120_characters(page: Path):
    lines = CODE.sub("", page.read_text()).splitlines()
    # A table's row, a picture and a line that is code cannot be folded.
    prose = [line for line in lines if not re.match(r" *(\||!\[|[-*]? *`[^`]*`[,.]?$)", line)]
    assert [line for line in prose if len(line) > 120] == []
