"""Checks data against a spec class and says in plain words what does not fit; the specs are not its own."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from engine.config.yaml import Document, Location, shown

SpecT = TypeVar("SpecT", bound=BaseModel)
_PLAIN = "plain_words"


def plain_error(message: str) -> PydanticCustomError:
    """Make an error for a pydantic validator to raise; its message reaches the reader as it is."""
    return PydanticCustomError(_PLAIN, "{message}", {"message": message})


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean ...?` for a near miss, else the empty string."""
    near = near_miss(word, choices)
    return f"; did you mean `{shown(near)}`?" if near else ""


def near_misses(word: str, choices: Iterable[str], most: int) -> list[str]:
    """Return what `word` may have been meant to be, the most similar first. `word` may come from a client."""
    return difflib.get_close_matches(word[:64], list(choices), n=most)


def near_miss(word: str, choices: Iterable[str]) -> str | None:
    """Return the most similar choice; None if none is near."""
    return next(iter(near_misses(word, choices, 1)), None)


def unknown_key(key: str, choices: Iterable[str]) -> str:
    choices = list(choices)
    return f"unknown key{did_you_mean(key, choices) or f'; known here: {_listed(choices)}'}"


def check_spec(
    spec: type[SpecT], entry: Mapping[str, object], location: Location, document: Document, context: object
) -> SpecT | None:
    """Build `spec` from the mapping at `location`, which ends in its id; None when problems were added."""
    fields = {**entry, "id": location[-1]}
    if "id" in entry:
        document.add_problem((*location, "id"), f"unknown key; the id is the name above, `{location[-1]}`")
    try:
        return spec.model_validate(fields, context=context)
    except ValidationError as error:
        add_problems(error.errors(include_url=False), spec, location, document)
    return None


def add_problems(errors: list[ErrorDetails], spec: type[BaseModel], location: Location, document: Document) -> None:
    """Say in `document` what pydantic found wrong with the mapping at `location`."""
    schema = spec.model_json_schema()
    meant: set[Location] = set()
    for error in errors:
        if error["type"] == "extra_forbidden":
            *parent, key = error["loc"]
            known = [name for name in _schema_at(schema, tuple(parent))["properties"] if name != "id"]
            document.add_problem((*location, *error["loc"]), unknown_key(str(key), known))
            meant.add((*parent, near_miss(str(key), known) or ""))
    for error in errors:
        place = error["loc"]
        # A misspelt key is one problem, not also a missing one.
        if error["type"] == "extra_forbidden" or (error["type"] == "missing" and place in meant):
            continue
        where = location if place == ("id",) else (*location, *place)
        document.add_problem(where, _message(error, _schema_at(schema, place)))


def _message(error: ErrorDetails, schema: dict[str, Any]) -> str:
    if error["type"] == _PLAIN:
        return error["msg"]
    expected = _expected(schema)
    if error["type"] == "missing":
        return f"is missing; it must be {expected}"
    value = error["input"]
    choices = schema.get("anyOf", [schema])[0].get("enum", [])
    hint = did_you_mean(value, choices) if isinstance(value, str) else ""
    return f"must be {expected}, not {_described(value)}{hint}"


def _schema_at(schema: dict[str, Any], location: Location) -> dict[str, Any]:
    found: dict[str, Any] = schema
    for part in location:
        found = found["anyOf"][0] if "anyOf" in found else found  # a mapping, or null
        found = _resolved(found, schema)
        found = found["items"] if isinstance(part, int) else found["properties"][part]
    if "anyOf" in found:
        return {**found, "anyOf": [_resolved(choice, schema) for choice in found["anyOf"]]}
    return _resolved(found, schema)


def _resolved(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][part["$ref"].rsplit("/", 1)[-1]] if "$ref" in part else part


def _expected(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return f"{_expected(schema['anyOf'][0])}, or null"
    if "const" in schema or "enum" in schema:
        choices = schema.get("enum") or [schema["const"]]
        return f"one of {_listed(choices)}" if len(choices) > 1 else f"`{choices[0]}`"
    if "patternErrorMessage" in schema:
        return str(schema["patternErrorMessage"])
    kinds = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "text",
        "object": "a mapping (indented `key: value` lines)",
    }
    if schema["type"] == "array":
        at_least = " of at least one" if schema.get("minItems") else ""
        return f"a list{at_least}, like [{', '.join(schema['items'].get('enum', ['one', 'two'])[:2])}]"
    return f"{kinds[schema['type']]}{_range(schema)}"


def _range(schema: dict[str, Any]) -> str:
    if schema["type"] == "string":
        limit = schema.get("maxLength")
        return f" of {schema.get('minLength', 0)} to {limit} characters" if limit else ""
    low, above, high = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if low is not None:
        return f" from {low} to {high}" if high is not None else f" of at least {low}"
    if above is not None:
        return f" above {above:g}" + (f" and at most {high:g}" if high is not None else "")
    return ""


def _described(value: object) -> str:
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{shown(value)}"' if isinstance(value, str) and value.isprintable() else shown(str(value))


def _listed(choices: Iterable[str]) -> str:
    return ", ".join(f"`{choice}`" for choice in choices)
