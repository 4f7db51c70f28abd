"""What the Python clients share: where the server is, what the demo model answers, the tools, and one line of JSON per check.

Nothing but the standard library: every client runs in an environment of its own, with this folder on the path.
"""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

BASE_URL = os.environ["BASE_URL"]
API_KEY = os.environ["API_KEY"]
MODEL = os.environ.get("MODEL", "service-plus")
SEEING = "service-pro"
EMBEDDING = "service-embedding"
RERANKER = "service-rerank"
# A question, the text that answers it, and another one.
FOUND = (
    "Where is the pump for bicycles?",
    "There is a pump for bicycles beside the door.",
    "Salaries are paid in time.",
)
WRONG_KEY = "sk-wrong"
UNKNOWN_MODEL = "nobody"
DEMO = json.loads(Path(__file__).with_name("demo.json").read_text(encoding="utf-8"))
CHAIN = json.loads(Path(__file__).with_name("chain.json").read_text(encoding="utf-8"))
# Three, as the demo model learned them; enough tokens for every answer here, few enough to notice a model that pads.
TOOLS = json.loads((Path(__file__).parents[3] / "scripts/demo_models/chat/tools.json").read_text(encoding="utf-8"))[
    "offered"
]
MAX_TOKENS = 200
# One short field: a model this small may go on with spaces for ever where JSON admits them.
PERSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "enum": ["Ada", "Bob"]}},
    "required": ["name"],
    "additionalProperties": False,
}

called: list[dict[str, Any]] = []


def get_weather(city: str) -> str:
    """The weather in a city"""
    called.append({"city": city})
    return DEMO["tool_result"]


def find_room(seats: int, day: str) -> str:
    """Find a free meeting room"""
    raise AssertionError(f"nobody asked for a room: {seats}, {day}")


def get_phone_number(name: str) -> str:
    """The phone number of a colleague"""
    raise AssertionError(f"nobody asked for a number: {name}")


def same(actual: object, expected: object) -> None:
    """Fails with both values; pytest's own rewriting of `assert` is not at work here."""
    if actual != expected:
        raise AssertionError(f"{actual!r}, expected {expected!r}")


def true(value: object, why: object = "") -> None:
    if not value:
        raise AssertionError(f"{value!r} {why}")


def is_person(value: object) -> None:
    """Whether a structured answer keeps to PERSON_SCHEMA; which of the names it is, is up to the model."""
    true(value in ({"name": "Ada"}, {"name": "Bob"}), value)


def finds_its_text(question: list[float], right: list[float], wrong: list[float]) -> None:
    """Check the vectors of `FOUND`, which have the length 1."""
    near, far = (sum(a * b for a, b in zip(question, text, strict=True)) for text in (right, wrong))
    true(near > far, (near, far))


def add_up(prompt_tokens: int | None, completion_tokens: int | None, total_tokens: int | None) -> None:
    """Whether these are the token counts of an answer."""
    true(prompt_tokens and completion_tokens, (prompt_tokens, completion_tokens))
    same(total_tokens, prompt_tokens + completion_tokens)


def raises(kind: type[Exception], message: str, call: Callable[[], object]) -> Exception:
    """Whether `call` raises this, with our words in it."""
    try:
        call()
    except kind as error:
        true(message in str(error), f"{error}")
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def run(*checks: Callable[[], Any]) -> None:
    """Runs every check, each named as its function, and ends the process: 0 when all passed."""
    failed = False
    report, sys.stdout = sys.stdout, sys.stderr  # some clients print
    for check in checks:
        line: dict[str, Any] = {"check": check.__name__, "ok": True}
        called.clear()
        try:
            if inspect.iscoroutinefunction(check):
                asyncio.run(check())
            else:
                check()
        except Exception:  # noqa: BLE001  whatever a client does wrong is one line of the report
            line |= {"ok": False, "error": traceback.format_exc(limit=-3, chain=False)}
            failed = True
        print(json.dumps(line), file=report, flush=True)
    sys.exit(failed)
