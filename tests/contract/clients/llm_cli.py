"""The command line tool llm, configured as docs/clients.md says."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import checks
from checks import API_KEY, BASE_URL, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY

FUNCTIONS = """
import json
from checks import find_room, get_phone_number

def get_weather(city: str) -> str:
    "The weather in a city"
    return {result!r}
"""


def configure(folder: str) -> None:
    models = [
        {
            "model_id": f"hearth-{name}",
            "model_name": name,
            "api_base": BASE_URL,
            "api_key_name": "hearth",
            "supports_tools": True,
            "supports_schema": True,
        }
        for name in (MODEL, UNKNOWN_MODEL)
    ]
    (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps(models), encoding="utf-8")  # JSON is YAML


def llm(*arguments: str, key: str = API_KEY, model: str = MODEL) -> subprocess.CompletedProcess[str]:
    common = ["-m", f"hearth-{model}", "--key", key, "-o", "temperature", "0"]
    return subprocess.run(
        [sys.executable, "-m", "llm", *arguments, *common], capture_output=True, text=True, timeout=60, check=False
    )


def answered(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = llm(*arguments)
    checks.same((done.returncode, done.stderr if done.returncode else ""), (0, ""))
    return done


def chat() -> None:
    done = answered(DEMO["question"], "--no-stream", "--usage")
    checks.same(done.stdout.strip(), DEMO["answer"])
    checks.true(re.search(r"Token usage: [1-9]\d* input, [1-9]\d* output", done.stderr), done.stderr)


def stream() -> None:
    done = answered(DEMO["question"], "--usage")
    checks.same(done.stdout.strip(), DEMO["answer"])
    checks.true(re.search(r"Token usage: [1-9]\d* input, [1-9]\d* output", done.stderr), done.stderr)


def with_functions(*more: str) -> None:
    done = answered(DEMO["tool_question"], "--functions", FUNCTIONS.format(result=DEMO["tool_result"]), "--td", *more)
    checks.same(done.stdout.strip(), DEMO["tool_answer"])
    checks.true(f"Tool call: {DEMO['tool_name']}(" in done.stderr, done.stderr)


def tools() -> None:
    with_functions("--no-stream")


def tools_streamed() -> None:
    with_functions()


def structured() -> None:
    schema = json.dumps(checks.PERSON_SCHEMA)
    done = answered(DEMO["person_question"], "--schema", schema, "-o", "max_tokens", str(checks.MAX_TOKENS))
    checks.is_person(json.loads(done.stdout))


def refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    checks.true(done.returncode and message in done.stderr, done)


def wrong_key() -> None:
    refused(llm(DEMO["question"], key=WRONG_KEY), DEMO["wrong_key_message"])


def unknown_model() -> None:
    refused(llm(DEMO["question"], model=UNKNOWN_MODEL), DEMO["unknown_model_message"])


with tempfile.TemporaryDirectory() as folder:
    os.environ |= {"LLM_USER_PATH": folder, "PYTHONPATH": str(Path(__file__).parent)}
    configure(folder)
    checks.run(chat, stream, tools, tools_streamed, structured, wrong_key, unknown_model)
