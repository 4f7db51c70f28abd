"""What vLLM is given to compile: JSON without endless whitespace, and which of it is too small to be a danger.

Pure functions over requests and structural tags; nothing is compiled here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# A weak model pads with spaces and newlines until `max_tokens` where the grammar lets it: one at a time is enough.
_MOST_WHITESPACE = 1

_LIGHT_BYTES = 16 * 2**10
_LIGHT_NODES = 24
_LIGHT_ENUM = 64
# Keywords that make no grammar, and those that make one no larger than what is written down.
_SILENT = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "deprecated", "readOnly", "strict"}
)
_PLAIN = frozenset({"type", "required", "const"})
_NESTED = frozenset({"items", "additionalProperties", "anyOf", "oneOf", "properties"})


def format_tag(form: Any) -> str | None:
    """Return the structural tag of a `response_format` (vLLM's object), None where it asks for text."""
    if form is None or form.type not in {"json_object", "json_schema"}:
        return None
    schema: Any = {"type": "object"}
    if form.type == "json_schema":
        schema = form.json_schema.json_schema
        schema = True if schema is None else schema
    return json.dumps(
        {
            "type": "structural_tag",
            "format": {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_WHITESPACE},
        }
    )


def without_padding(tag: str) -> str:
    """Bound the whitespace of all JSON in a structural tag, like the one that a tool parser makes.

    The XML-like styles of some models are left alone: whitespace is part of what these were trained on.
    """
    whole = json.loads(tag)
    for node in _schemas(whole):
        if node.get("style", "json") == "json":
            node["max_whitespace_cnt"] = _MOST_WHITESPACE
    return json.dumps(whole)


def is_light(tag: str) -> bool:
    """Whether a structural tag compiles in no time, whatever it says.

    The line is drawn at keywords whose grammar is no larger than their text, `_LIGHT_NODES` schemas in all.
    """
    if len(tag) > _LIGHT_BYTES:
        return False
    left = _LIGHT_NODES
    waiting = [node["json_schema"] for node in _schemas(json.loads(tag))]
    while waiting:
        schema = waiting.pop()
        left -= 1
        if left < 0 or not _is_plain(schema):
            return False
        if isinstance(schema, dict):
            waiting += _parts(schema)
    return True


def _schemas(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the formats of a structural tag that hold a JSON schema. What is within a schema is the client's."""
    if isinstance(node, list):
        for item in node:
            yield from _schemas(item)
    elif isinstance(node, dict) and node.get("type") == "json_schema" and "json_schema" in node:
        yield node
    elif isinstance(node, dict):
        for item in node.values():
            yield from _schemas(item)


def _is_plain(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    enum = schema.get("enum", [])
    known = set(schema) <= _SILENT | _PLAIN | _NESTED | {"enum"}
    # Any other name means a grammar that excludes all the named ones: 1.6 s for 38 of them.
    open_ended = schema.get("additionalProperties", False) is not False and "properties" in schema
    return known and not open_ended and isinstance(enum, list) and len(enum) <= _LIGHT_ENUM


def _parts(schema: dict[str, Any]) -> list[Any]:
    parts: list[Any] = []
    for keyword in _NESTED & set(schema):
        value = schema[keyword]
        if isinstance(value, list):
            parts += value
        elif keyword == "properties" and isinstance(value, dict):
            parts += value.values()
        else:
            parts.append(value)
    return parts
