"""What is accepted as strict is kept by the real engine: random schemas, forced calls and formats, streamed and plain."""

import asyncio
import json
import logging
from collections import Counter
from itertools import cycle
from typing import Any

import jsonschema
import openai
import pytest
from chat_parts import HELLO, MODEL
from hypothesis import HealthCheck, Phase, given, settings
from random_schemas import SCHEMAS, with_definitions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

AT_A_TIME = 8
ACCEPTED_SHARE = 0.1


def drawn(count: int) -> list[Any]:
    """So many schemas, others for another --hypothesis-seed."""
    found: list[Any] = []

    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMAS, SCHEMAS)
    def draw(schema: Any, one: Any) -> None:
        found.append(with_definitions(schema, one))

    draw()
    return found


def as_format(schema: Any) -> tuple[Any, dict[str, Any]]:
    return schema, {"response_format": {"type": "json_schema", "json_schema": _named(schema, "schema")}}


def as_call(schema: Any) -> tuple[Any, dict[str, Any]]:
    """The schema is that of one argument."""
    inner = {name: value for name, value in schema.items() if name != "$defs"}
    whole = {"type": "object", "properties": {"v": inner}, "required": ["v"], "additionalProperties": False}
    whole["$defs"] = schema["$defs"]
    tools = [{"type": "function", "function": _named(whole, "parameters")}]
    return whole, {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "f"}}}


def _named(schema: Any, field: str) -> dict[str, Any]:
    return {"name": "f", "strict": True, field: schema}


async def plain(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> tuple[str, str | None]:
    choice = (await client.chat.completions.create(**fields)).choices[0]
    calls = choice.message.tool_calls or []
    return calls[0].function.arguments if calls else choice.message.content or "", choice.finish_reason


async def streamed(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> tuple[str, str | None]:
    text, finish_reason = "", None
    async for chunk in await client.chat.completions.create(stream=True, **fields):
        (choice,) = chunk.choices
        finish_reason = choice.finish_reason or finish_reason
        text += choice.delta.content or ""
        text += "".join(call.function.arguments or "" for call in choice.delta.tool_calls or [])
    return text, finish_reason


def follows(schema: Any, text: str) -> bool:
    try:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))
    except json.JSONDecodeError:
        return False


WAYS = [(make, ask) for make in (as_format, as_call) for ask in (plain, streamed)]


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.rounds)])
async def test_what_is_accepted_as_strict_is_kept_by_the_engine(client: openai.AsyncOpenAI, count: int) -> None:
    waiting = iter(list(zip(drawn(count), cycle(WAYS), strict=False)))
    outcomes: Counter[str] = Counter()
    broken = []

    async def ask_for(schema: Any, make: Any, ask: Any, seed: int) -> str:
        whole, form = make(schema)
        asked = {"model": MODEL, "messages": HELLO, "max_tokens": 200, "temperature": 1.5, "seed": seed, **form}
        try:
            text, finish_reason = await ask(client, asked)
        except openai.BadRequestError as refused:
            return str(refused.code)
        if finish_reason == "length":
            return "length"
        if not follows(whole, text):
            broken.append((make.__name__, ask.__name__, json.dumps(whole), text))
        return f"{make.__name__} {ask.__name__}"

    async def worker() -> None:
        for schema, (make, ask) in waiting:
            outcomes[await ask_for(schema, make, ask, len(outcomes))] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_A_TIME):
            group.create_task(worker())
    logging.getLogger(__name__).info("%s", dict(outcomes))  # shown with -o log_cli=true
    assert not broken
    assert outcomes.total() == count
    assert outcomes.keys() <= {f"{make.__name__} {ask.__name__}" for make, ask in WAYS} | {
        "length",
        "invalid_value",
        "schema_too_complex",
    }
    kept = sum(outcomes[f"{make.__name__} {ask.__name__}"] for make, ask in WAYS)
    assert kept > ACCEPTED_SHARE * count, outcomes
