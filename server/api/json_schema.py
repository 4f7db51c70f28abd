"""Limits of JSON schemas from clients: a larger schema would keep the grammar compiler busy for minutes.

Patterns count with their repeats written out, as the compiler does. Keywords beyond a limit are left out, or refused if
the schema is strict. Whether a schema makes sense is left to vLLM. Pure functions over parsed JSON of at most 64
levels.
"""

import json
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from re import _constants as kinds  # type: ignore[attr-defined]  # Python's own parser; not public
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import msgspec
from pydantic import ValidationInfo

_MAX_BYTES = 64 * 2**10
_MAX_PROPERTIES = 1024
_MAX_REPEATS = 1000
_MAX_PATTERN_SIZE = 2000
_REPEATS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_MAX_COUNTED_PROPERTIES = 16
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_MAX_CHARACTERS = 256
_MOST_SHOWN = 80
_ENDLESS = 4  # what `+` and `*` count for, within another repeat or alone
_BRACES = re.compile(r"(?<!\\)\{(?!\d{1,6}(,\d{0,6})?\})")


class SchemaTooComplexError(ValueError):
    """A schema beyond a limit. The message follows the name of the field."""

    code = "schema_too_complex"


def sent_schema(schema: Any, info: ValidationInfo) -> Any:
    """Check a schema field of a model, in which the field `strict` comes earlier."""
    return object_schema(schema, strict=bool(info.data.get("strict")))


def plain_pattern(pattern: str) -> str:
    """Check a pattern outside of a schema by the same limits."""
    if _pattern_size(pattern) > _MAX_PATTERN_SIZE:
        raise SchemaTooComplexError(f"must stand for at most {_MAX_PATTERN_SIZE} symbols, repeats written out")
    return pattern


def object_schema(schema: Any, *, strict: bool = True, otherwise: str = "leave `strict` out") -> Any:
    """Return a schema of limited size that a finite value can satisfy. Raises `SchemaTooComplexError`, `ValueError`.

    Bounds and patterns that are too large are refused if `strict`, and else left out of the returned schema.
    `otherwise` is the advice of a refusal, besides changing the schema.
    Measured with xgrammar on a CPU: 1024 optional properties compile for 14 s (512: 3 s), required ones for 0.2 s,
    `minItems: 10000000` for more than 20 s. Nothing stops it there; a schema that is its own `$ref` kills the request.
    """
    if not isinstance(schema, dict):
        raise ValueError("must be an object")  # noqa: TRY004  # pydantic makes a finding of a ValueError only
    if len(msgspec.json.encode(schema)) > _MAX_BYTES:
        raise SchemaTooComplexError(f"must be at most {_MAX_BYTES // 2**10} KiB long")
    properties = size = 0
    left_out: set[tuple[int, str]] = set()
    substitutes: TopologicalSorter[int] = TopologicalSorter()
    for path, node in _objects(schema):
        listed = node.get("properties")
        properties += len(listed) if isinstance(listed, dict) else 0
        problems = _too_large(node)
        if "pattern" not in problems and isinstance(node.get("pattern"), str):
            more = _pattern_size(node["pattern"])
            if size + more > _MAX_PATTERN_SIZE:
                problems["pattern"] = (
                    f"must have patterns that stand for at most {_MAX_PATTERN_SIZE} symbols in all, repeats written out"
                )
            else:
                size += more
        for keyword, sentence in problems.items():
            if strict:
                named = _shown(path, keyword, node[keyword])
                raise SchemaTooComplexError(f"{sentence}, and has {named}: change it, or {otherwise}")
            left_out.add((id(node), keyword))
        substitutes.add(id(node), *map(id, _substitutes(node, schema)))
    if properties > _MAX_PROPERTIES:
        raise SchemaTooComplexError(f"must have at most {_MAX_PROPERTIES} properties in all")
    try:
        substitutes.prepare()
    except CycleError:
        raise SchemaTooComplexError("must not refer to itself without a property or an item in between") from None
    return _without(schema, left_out) if left_out else schema


def _objects(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    if isinstance(schema, dict):
        yield path, schema
    if isinstance(schema, (dict, list)):
        for name, item in schema.items() if isinstance(schema, dict) else enumerate(schema):
            if isinstance(item, (dict, list)):
                yield from _objects(item, (*path, str(name)))


def _without(schema: Any, left_out: set[tuple[int, str]]) -> Any:
    if isinstance(schema, list):
        return [_without(item, left_out) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: item for name, item in schema.items() if (id(schema), name) not in left_out}
    return {name: _without(item, left_out) for name, item in kept.items()}


def _shown(path: tuple[str, ...], keyword: str, value: Any) -> str:
    """Return the path and value of a keyword, escaped and cut, so that it can be found among many tools."""
    text = json.dumps(value)
    shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    place = json.dumps(".".join((*path, keyword)))[1:-1][-_MOST_SHOWN:]
    return f"`{place}` of {shown}"


def _too_large(node: dict[str, Any]) -> dict[str, str]:
    """Return the keywords of one object of the schema that are beyond a limit, each with its rule."""
    counts = {key: node[key] for key in _REPEATS if isinstance(node.get(key), (int, float))}
    problems = {key: f"must be at most {_MAX_REPEATS}" for key, count in counts.items() if count > _MAX_REPEATS}
    if "properties" in node:
        for key in ("minProperties", "maxProperties"):
            if counts.get(key, 0) > _MAX_COUNTED_PROPERTIES:
                problems[key] = f"must not count more than {_MAX_COUNTED_PROPERTIES} of its named properties"
    if isinstance(node.get("pattern"), str):
        try:
            _pattern_size(node["pattern"])
        except SchemaTooComplexError as error:
            problems["pattern"] = str(error)
    return problems


def _substitutes(node: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas that a value of `node` must satisfy. A cycle of these can never end."""
    reference = node.get("$ref")
    found = [_resolve(reference, schema)] if isinstance(reference, str) else []
    for key in _ALTERNATIVES:
        options = node.get(key)
        found += options if isinstance(options, list) else []
    return [item for item in found if isinstance(item, dict)]


def _resolve(reference: str, schema: dict[str, Any]) -> Any:
    """Return what a reference within the schema names; None if nothing. Nothing is fetched."""
    if reference != "#" and not reference.startswith("#/"):
        raise SchemaTooComplexError("must refer to parts of itself only (`#/...`)")
    here: Any = schema
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, list) and re.fullmatch(r"[0-9]{1,4}", name) and int(name) < len(here):
            here = here[int(name)]
        else:
            here = here.get(name) if isinstance(here, dict) else None
    return here


def _pattern_size(pattern: str) -> int:
    """Return the number of symbols that `pattern` stands for.

    Measured with xgrammar on a CPU: `(a|b|[a-z]+){1,1000}` twenty times blocks all requests for 8 s. Lookaround is not
    followed but silently left out there, so it is refused. Raises `SchemaTooComplexError`.
    """
    if len(pattern) > _MAX_CHARACTERS:
        raise SchemaTooComplexError(f"must have patterns of at most {_MAX_CHARACTERS} characters")
    if "(?" in pattern.replace("(?:", "") or _BRACES.search(pattern):
        raise SchemaTooComplexError("must have patterns without lookaround, names or flags (`(?:...)` is fine)")
    try:
        return _size(parser.parse(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise SchemaTooComplexError("must have patterns that are plain regular expressions") from error


def _size(parsed: Any) -> int:
    return sum(_of_one(kind, value) for kind, value in parsed)


def _of_one(kind: Any, value: Any) -> int:
    if kind in {kinds.MAX_REPEAT, kinds.MIN_REPEAT}:
        least, most, repeated = value
        times = max(least, 1) * _ENDLESS if most is kinds.MAXREPEAT else max(most, 1)
        return int(times) * _size(repeated)
    if kind is kinds.BRANCH:
        return sum(_size(branch) for branch in value[1])
    if kind is kinds.SUBPATTERN:
        return _size(value[3])
    if kind in {kinds.LITERAL, kinds.NOT_LITERAL, kinds.ANY, kinds.IN, kinds.AT, kinds.CATEGORY}:
        return 1
    raise SchemaTooComplexError("must have patterns without references to their own groups")
