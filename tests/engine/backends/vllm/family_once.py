"""A program: makes the tiny model of a family, serves it by our own engine on the CPU, and prints what it answers as JSON."""

import asyncio
import base64
import io
import json
import logging
import sys
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from family_models import FAMILIES, TOOLS, Conversation, make, picture

from engine import ChatRequest, Engine, load_config
from engine.stream import TokenStream, fold
from engine.types import ChatStep

MODEL = "service-pro"
# Closed: nothing in it can go on until `max_tokens`.
FORECAST = {
    "type": "object",
    "properties": {"city": {"enum": ["Adama", "Mekelle"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORCED = [{"type": "function", "function": {"name": "forecast", "parameters": FORECAST}}]
GREETING = {
    "type": "object",
    "properties": {"greeting": {"const": "hello"}},
    "required": ["greeting"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "greeting", "schema": GREETING}}
COSTS = {250: 16, 8000: 1}
"""Tokens of an answer, and how many answers: the short ones are over before anything can be told of them."""


async def main(family: str, folder: Path) -> None:
    """Train, load, ask, end."""
    logging.basicConfig(level=logging.INFO)
    loss = make(family, folder / "own")
    known = FAMILIES[family]
    capabilities = [
        "chat",
        "streaming",
        *(["function_calling"] if known.calls else []),
        *(["vision"] if known.sees else []),
    ]
    (folder / "models.yaml").write_text(
        f"models:\n  {MODEL}: {{task: chat, tier: t, capabilities: [{', '.join(capabilities)}], weights: own,"
        " engine: {kv_cache_gib: 0.25, context_length: 12288}}\ntiers:\n  t: {models: [t]}\n"
    )
    engine = Engine(load_config(folder / "models.yaml"), weights_dir=folder)
    await engine.start()
    while engine.health()[0].status not in {"ready", "failed"}:
        await engine.wait_for_change()
    said: dict[str, Any] = {"loss": loss, "error": engine.health()[0].error}
    try:
        if said["error"] is None:
            added = json.loads((folder / "own" / "tokenizer.json").read_text())["added_tokens"]
            said |= await _asked(engine, family, {str(each["id"]): -100.0 for each in added if each["special"]})
    finally:
        await engine.stop()
    sys.stdout.write(json.dumps(said) + "\n")


async def _asked(engine: Engine, family: str, no_marks: dict[str, float]) -> dict[str, Any]:
    known = FAMILIES[family]
    answers = [[await _answer(engine, one, whole=whole) for whole in (True, False)] for one in known.conversations]
    (info,) = engine.models()
    said: dict[str, Any] = {"answers": answers, "capabilities": list(info.capabilities)}
    said["json"] = await _read(engine, replace(_request(known.conversations[0]), response_format=FORMAT))
    if known.calls:
        asked = _request(known.conversations[1])
        forced = replace(asked, tools=FORCED, tool_choice="required", max_tokens=200)
        said["forced"] = [await _read(engine, replace(forced, whole=whole)) for whole in (True, False)]
    # Marks have no text, and tokenizers decodes all of them again with each that follows.
    going_on = replace(_request(known.conversations[0]), ignore_eos=True, logit_bias=no_marks)
    said["token_seconds"] = [await _cost(engine, going_on, *one) for one in COSTS.items()]
    return said


async def _answer(engine: Engine, one: Conversation, *, whole: bool) -> dict[str, Any]:
    return await _read(engine, replace(_request(one), whole=whole))


def _request(one: Conversation) -> ChatRequest:
    messages = [dict(message) for message in one.messages]
    if one.picture:
        file = io.BytesIO()
        picture(one.picture).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        seen = {"type": "image_url", "image_url": {"url": url}}
        messages = [{"role": "user", "content": [seen, {"type": "text", "text": messages[0]["content"]}]}]
    return ChatRequest(
        request_id=_new_id(),
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=120,
        tools=TOOLS if one.tools else None,
        chat_template_kwargs=None if one.thinking else {"enable_thinking": False},
    )


def _new_id() -> str:
    """One of its own for each request, as from the server: vLLM keeps a hybrid's states by it."""
    return uuid.uuid4().hex


async def _read(engine: Engine, request: ChatRequest) -> dict[str, Any]:
    result = await fold(await engine.chat(replace(request, request_id=_new_id()), TokenStream()))
    (choice,) = result.choices
    return {
        "content": choice.content,
        "reasoning": choice.reasoning,
        "calls": [[call.name, call.arguments] for call in choice.tool_calls],
        "ended": choice.finish_reason,
        "reasoning_tokens": result.usage.reasoning_tokens,
        "tokens": result.usage.completion_tokens,
    }


async def _cost(engine: Engine, request: ChatRequest, tokens: int, answers: int) -> float:
    """Return seconds of this process (the API's) for each token of answers that go on and on."""
    seconds, made = 0.0, 0
    for _ in range(answers):
        asked = replace(request, request_id=_new_id(), max_tokens=tokens)
        stream = await engine.chat(asked, TokenStream())
        begun = time.process_time()
        steps: list[ChatStep] = [step async for step in stream]
        seconds, made = seconds + time.process_time() - begun, made + _tokens(steps)
    return seconds / made


def _tokens(steps: Iterable[ChatStep]) -> int:
    return max(step.usage.completion_tokens for step in steps)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
