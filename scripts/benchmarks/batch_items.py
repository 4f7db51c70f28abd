"""The items of a benchmarked batch: chat bodies that differ in all that may differ, and some that must be refused.

Which items are bad and how long each answer may be depends on the numbers alone, so that all runs do the same work;
the label sets their prompts apart.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_TEXT = "Write a few sentences about the weather, the garden and the people who meet there in the evening."
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["town"],
        },
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"topic": {"type": "string", "maxLength": 40}, "stars": {"type": "integer"}},
    "required": ["topic", "stars"],
    "additionalProperties": False,
}
# A picture in form only: models that see refuse it too.
_BROKEN_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

_GREEDY = {"temperature": 0, "ignore_eos": True}
# One after the other; three in eight are plain and greedy, like most of what a script sends.
_KINDS: tuple[dict[str, Any], ...] = (
    _GREEDY,
    {"temperature": 0.8, "top_p": 0.9, "seed": 1, "ignore_eos": True},
    {"tools": [_TOOL], "temperature": 0, "ignore_eos": True},
    _GREEDY,
    {"response_format": {"type": "json_schema", "json_schema": {"name": "note", "schema": _SCHEMA}}, "temperature": 0},
    {"frequency_penalty": 0.5, "presence_penalty": 0.2, "seed": 2, "ignore_eos": True},
    _GREEDY,
    {"logprobs": True, "top_logprobs": 2, **_GREEDY},
)
_BAD: tuple[Callable[[dict[str, Any]], Any], ...] = (
    lambda body: body | {"max_tokens": "many"},
    lambda body: body | {"model": "no-such-model"},
    lambda body: body | {"max_tokens": 2**31},
    lambda body: body | {"stream": True},
    lambda body: body | {"messages": []},
    lambda body: body | {"messages": [{"role": "user", "content": [_BROKEN_PICTURE]}]},
    lambda body: body["messages"],
)


def bad_places(items: int, bad: float) -> frozenset[int]:
    """Return which of `items` are the bad ones: the part `bad` of them, here and there."""
    chance = random.Random(items)  # noqa: S311  # no secret
    return frozenset(chance.sample(range(items), round(items * bad)))


def custom_id(label: str, index: int) -> str:
    """Return what item number `index` is called by its sender."""
    return f"{label}-{index}"


def batch_items(model: str, items: int, bad: float, max_tokens: int, label: str) -> list[Any]:
    """Return the bodies in order. A good answer may have `max_tokens` tokens on average, half to one and a half."""
    lengths = random.Random(items)  # noqa: S311  # no secret
    bodies: list[Any] = [
        _good(model, index, lengths.randint(max(1, max_tokens // 2), max_tokens + max_tokens // 2), label)
        for index in range(items)
    ]
    for number, place in enumerate(sorted(bad_places(items, bad))):
        bodies[place] = _BAD[number % len(_BAD)](bodies[place])
    return bodies


def _good(model: str, index: int, max_tokens: int, label: str) -> dict[str, Any]:
    name = custom_id(label, index)
    # The label comes first: nothing but the start of the template is in the cache.
    messages = [{"role": "user", "content": f"{name}. {_TEXT}"}]
    if index % 3 == 0:
        messages += [{"role": "assistant", "content": "The garden is green."}, {"role": "user", "content": "Go on."}]
    return {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "custom_id": name,
        **_KINDS[index % len(_KINDS)],
    }
