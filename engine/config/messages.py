"""Types of the fields in models.yaml, and plain messages for what does not fit them.

engine/config/models.py has the entries.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from engine.config.yaml import Document, Location, shown

SpecT = TypeVar("SpecT", bound=BaseModel)
_PLAIN = "plain_words"


def plain_error(message: str) -> PydanticCustomError:
    """Make an error for a pydantic validator to raise; its message is shown unchanged."""
    return PydanticCustomError(_PLAIN, "{message}", {"message": message})


class Spec(BaseModel):
    """A part of a file that people may edit: unknown keys and values of another type are refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


def each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    for name, times in Counter(names).most_common(1):
        if times > 1:
            raise plain_error(f"names `{shown(name)}` {times} times: keep one")
    return names


def matching(pattern: str, most: int, meaning: str) -> Any:
    """Make the field of a text of at most `most` characters; `meaning` describes the pattern."""
    # Editors show `patternErrorMessage` instead of the regular expression; our own messages use it too.
    return Field(pattern=pattern, max_length=most, json_schema_extra={"patternErrorMessage": meaning})


Id = Annotated[
    str,
    matching(
        r"^[A-Za-z0-9]([./]?[A-Za-z0-9_-])*$",
        64,
        "a name of at most 64 letters, digits and `-` `_` `.` `/`"
        " (starting with a letter or digit, without `..` or `//`)",
    ),
]
Folder = Annotated[
    str,
    matching(
        r"^[^/\\\x00-\x1f.~][^/\\\x00-\x1f]*(/[^/\\\x00-\x1f.~][^/\\\x00-\x1f]*)*$",
        255,
        "a folder below the weights directory, like `my-model` or `team/my-model`"
        " (relative, without `..`, no part starting with a dot or `~`)",
    ),
]
Word = Annotated[str, matching(r"^[a-z0-9_]+$", 64, "a name of small letters, digits and `_`")]
Name = TypeVar("Name", bound=str)
# Strict mode would refuse YAML's lists for tuples.
Names = Annotated[
    tuple[Name, ...],
    Field(strict=False, min_length=1, json_schema_extra={"uniqueItems": True}),
    AfterValidator(each_once),
]
Limit = Annotated[int, Field(ge=1, le=1_000_000_000)]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean ...?` for a near miss, else the empty string."""
    near = near_miss(word, choices)
    return f"; did you mean `{shown(near)}`?" if near else ""


def near_miss_sentence(word: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean ...?` for a near miss, else the empty string. `word` may come from a client."""
    near = near_miss(word, choices)
    return f" Did you mean `{near}`?" if near else ""


def near_misses(word: str, choices: Iterable[str], most: int) -> list[str]:
    """Return what `word` may have been meant to be, the most similar first. `word` may come from a client."""
    return difflib.get_close_matches(word[:64], list(choices), n=most)


def near_miss(word: str, choices: Iterable[str]) -> str | None:
    """Return the most similar choice; None if none is near."""
    return next(iter(near_misses(word, choices, 1)), None)


def unknown_key(key: str, choices: Iterable[str]) -> str:
    choices = list(choices)
    return f"unknown key{did_you_mean(key, choices) or f'; known here: {listed(choices)}'}"


def check_spec(spec: type[SpecT], entry: Mapping[str, object], location: Location, document: Document) -> SpecT | None:
    """Build `spec` from the mapping at `location`, which ends in its id; None when problems were added."""
    fields = {**entry, "id": location[-1]}
    if "id" in entry:
        document.add_problem((*location, "id"), f"unknown key; the id is the name above, `{location[-1]}`")
    try:
        return spec.model_validate(fields)
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
        place = tuple(part for part in error["loc"] if part != "[key]")  # the name itself is wrong
        # A misspelt key is one problem, not also a missing one; a wrong item does not make its list too short.
        if error["type"] == "extra_forbidden" or (error["type"] == "missing" and place in meant):
            continue
        if error["type"] == "too_short" and error["input"]:
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
    """Return the JSON schema of a place; if that may be null, `anyOf` has the other choice first."""

    def resolved(part: dict[str, Any]) -> dict[str, Any]:
        return schema["$defs"][part["$ref"].rsplit("/", 1)[-1]] if "$ref" in part else part

    found = schema
    for part in location:
        found = resolved(found.get("anyOf", [found])[0])
        found = found.get("items") or found.get("properties", {}).get(part) or found["additionalProperties"]
    if "anyOf" in found:
        return {**found, "anyOf": [resolved(choice) for choice in found["anyOf"]]}
    return resolved(found)


def _expected(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return f"{_expected(schema['anyOf'][0])}, or null"
    if "const" in schema or "enum" in schema:
        choices = schema.get("enum") or [schema["const"]]
        return f"one of {listed(choices)}" if len(choices) > 1 else f"`{choices[0]}`"
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
    if value == "":
        return "an empty text"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{shown(value)}"' if isinstance(value, str) and value.isprintable() else shown(str(value))


def listed(choices: Iterable[str]) -> str:
    """Return the choices, each in back quotes, with commas."""
    return ", ".join(f"`{choice}`" for choice in choices)
