"""The terminals in docs/: real commands in a terminal of their own, as pictures. `PAGE_PICTURES=docs` puts them there."""

import io
import os
import pty
import re
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest
from hub_server import Fault, HubServer
from rich.console import Console
from rich.text import Text
from serving import BIN, ROOT, poll_until
from weight_parts import NAME, REPOSITORY, SHARD, model_files, safetensors

pytestmark = [pytest.mark.engine, pytest.mark.rounds]
WIDTH = 140
_PIECES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+")


class Terminal:
    """A command in a pseudo-terminal, and what its screen shows. Use it in a `with`; the end kills it."""

    def __init__(self, *command: str | Path, environment: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (60, WIDTH))
        self._text = ""
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment | {"TERM": "xterm-256color", "COLUMNS": str(WIDTH), "NO_PROXY": "*"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(60)
        self._reader.join(10)
        os.close(self._ours)

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._ours, 65536)
            except OSError:  # how Linux tells that the other side was closed
                return
            self._text += piece.decode(errors="replace")

    def wait(self) -> int:
        code = self._process.wait(120)
        self._reader.join(10)
        return code

    def shows(self, words: str) -> Callable[[], bool]:
        return lambda: words in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._text)

    def lines(self) -> list[str]:
        """What the screen shows now, colours included, lines that were drawn again only once."""
        screen, row, fresh = [""], 0, False
        for piece in _PIECES.findall(self._text):
            if piece == "\n":
                row, fresh = row + 1, False
                screen += [""] * (row + 1 - len(screen))
            elif piece == "\r":
                fresh = True
            elif piece.endswith("K"):
                screen[row] = ""
            elif piece.startswith("\x1b[") and piece.endswith("A"):
                row -= int(piece[2:-1] or 1)
            elif piece.startswith("\x1b[") and not piece.endswith("m"):
                continue
            else:
                screen[row] = piece if fresh else screen[row] + piece
                fresh = False
        return screen


def picture(name: str, command: str, lines: list[str], folder: Path, *, hide: dict[str, str] | None = None) -> None:
    """Write the terminal as `terminal-<name>.svg`."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {command}", style="bold"))
    shown = "\n".join(lines).rstrip()
    for pattern, instead in ({r"hk_\w+": "hk_...", r"#once=[\w-]+": "#once=..."} | (hide or {})).items():
        shown = re.sub(pattern, instead, shown)
    console.print(Text.from_ansi(shown))
    drawn = console.export_svg(title="hearth", unique_id=name)
    # Its font is another host's: the reader's own does.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    (folder / f"terminal-{name}.svg").write_text(re.sub(r" +$", "", drawn, flags=re.MULTILINE).strip() + "\n")
    assert "hk_..." in drawn or "hk_" not in drawn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("PAGE_PICTURES") or tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("server")
    return {"HEARTH_DATA_DIR": str(place / "data"), "HEARTH_WEIGHTS_DIR": str(place / "weights")}


@pytest.fixture(scope="module")
def serving(environment: dict[str, str]) -> Iterator[Terminal]:
    with Terminal(BIN / "hearth", "serve", "--port", "0", environment=environment) as terminal:
        poll_until(terminal.shows("capital of France"), 240, describe=lambda: "\n".join(terminal.lines()))
        yield terminal


def test_serve(serving: Terminal, folder: Path):
    lines = serving.lines()
    assert any("API key" in line for line in lines)
    picture("serve", "./scripts/serve", lines, folder, hide={r"127\.0\.0\.1:\d+": "127.0.0.1:8000"})


def test_status(serving: Terminal, environment: dict[str, str], folder: Path):
    assert serving.shows("Ready. Try:")()
    with Terminal(BIN / "hearth", "status", environment=environment) as terminal:
        assert terminal.wait() == 0
        picture("status", "hearth status", terminal.lines(), folder, hide={r"127\.0\.0\.1:\d+": "127.0.0.1:8000"})


def test_plan(environment: dict[str, str], folder: Path):
    with Terminal(BIN / "hearth", "plan", "--gpus", "1x24GiB", environment=environment) as terminal:
        assert terminal.wait() == 0
        picture("plan", "hearth plan --gpus 1x24GiB", terminal.lines(), folder)


def test_pull(environment: dict[str, str], folder: Path, tmp_path: Path):
    files = model_files() | {SHARD: safetensors(60 * 2**20)}
    with HubServer() as hub:
        hub.add(REPOSITORY, files)
        hub.faults[SHARD].append(Fault(hold=40 * 2**20))
        asked = {**environment, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)}
        command = ("weights", "pull", "--repository", REPOSITORY, "--as", NAME)
        with Terminal(BIN / "hearth", *command, environment=asked) as terminal:
            poll_until(terminal.shows("40.0/60.0 MiB"), 60, describe=lambda: "\n".join(terminal.lines()))
            half = terminal.lines()
            hub.release.set()
            assert terminal.wait() == 0
            picture("pull", f"hearth {' '.join(command)}", half, folder)
