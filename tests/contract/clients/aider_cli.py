"""aider, with the settings of docs/clients.md: it sends the file with the question, and gets text."""

import os
import subprocess
from pathlib import Path

import checks
from checks import API_KEY, BASE_URL, CHAIN, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY

PYTHON = Path(os.environ["PROGRAMS"]) / "python"


def aider(prompt: str, *more: str, key: str = API_KEY, model: str = MODEL) -> str:
    Path(CHAIN["file"]).write_text(CHAIN["held"] + "\n", encoding="utf-8")
    settings = {"OPENAI_API_BASE": BASE_URL, "OPENAI_API_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    quiet = ["--no-git", "--no-check-update", "--no-show-model-warnings", "--no-pretty", "--yes-always"]
    done = subprocess.run(
        [PYTHON, "-m", "aider", "--model", f"openai/{model}", *quiet, *more, "--message", prompt],
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
        check=False,
    )
    return done.stdout


def said(output: str, expected: str) -> None:
    checks.true(expected in " ".join(output.split()), output)


def chat() -> None:
    said(aider(CHAIN["hello"], "--no-stream"), CHAIN["greeting"])


def stream() -> None:
    said(aider(CHAIN["hello"]), CHAIN["greeting"])


def wrong_key() -> None:
    said(aider(CHAIN["hello"], key=WRONG_KEY), DEMO["wrong_key_message"])


def unknown_model() -> None:
    said(aider(CHAIN["hello"], model=UNKNOWN_MODEL), DEMO["unknown_model_message"])


checks.run(chat, stream, wrong_key, unknown_model)
