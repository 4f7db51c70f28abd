"""What the coding agents share: a folder with a file, a question that needs it, and a model that plays the loop.

Each is installed as it comes, and set up with its block of docs/ and nothing else.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import checks
from checks import API_KEY, CHAIN, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY

PROGRAMS = Path(os.environ["PROGRAMS"])
SetUp = Callable[[Path, str, str], dict[str, str]]


def run(
    program: str, set_up: SetUp, *arguments: str, unknown_model_message: str = DEMO["unknown_model_message"]
) -> None:
    """Check one program.

    `set_up(home, key, model)` writes its files below a new home and returns its environment; `arguments` are what
    stands before the prompt. A program may have words of its own for a model that does not exist.
    """

    def ask(prompt: str, *, key: str = API_KEY, model: str = MODEL) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            home, work = (Path(folder).absolute() / name for name in ("home", "work"))
            home.mkdir()
            work.mkdir()
            (work / CHAIN["file"]).write_text(CHAIN["held"] + "\n", encoding="utf-8")
            environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(home)}
            environment |= set_up(home, key, model)
            return subprocess.run(
                [PROGRAMS / program, *arguments, prompt],
                env=environment,
                cwd=work,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
            )

    def answered(prompt: str, answer: str) -> None:
        done = ask(prompt)
        checks.same(done.returncode, 0)
        checks.true(answer in done.stdout, done)

    def refused(done: subprocess.CompletedProcess[str], message: str) -> None:
        checks.true(message in done.stdout + done.stderr, done)

    def stream() -> None:
        answered(CHAIN["hello"], CHAIN["greeting"])

    def tools_streamed() -> None:
        answered(CHAIN["question"], CHAIN["answer"])

    def wrong_key() -> None:
        refused(ask(CHAIN["hello"], key=WRONG_KEY), DEMO["wrong_key_message"])

    def unknown_model() -> None:
        refused(ask(CHAIN["hello"], model=UNKNOWN_MODEL), unknown_model_message)

    checks.run(stream, tools_streamed, wrong_key, unknown_model)
