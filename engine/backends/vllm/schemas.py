"""Which JSON schemas a grammar enforces as JSON Schema means them, and how others are rewritten so that it does.

xgrammar reads one of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and `type`, in this order, and ignores what is
beside it. `enforceable` merges what it can; `unenforced` names the rest. Pure functions over parsed JSON.
"""

import json
import re
from collections.abc import Callable, Iterator
from re import _constants as kinds  # type: ignore[attr-defined]  # Python's own parser; not public
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_BY_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
}
_LEADING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_NEVER: tuple[str, ...] = ("not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies")
_NEVER += ("multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "additionalItems", "$dynamicRef")
_NEVER += ("unevaluatedItems", "unevaluatedProperties", "patternProperties", "propertyNames", "$recursiveRef")
# All other keywords of a schema constrain nothing.
_CONSTRAINTS = frozenset({"type", *_LEADING, *_NEVER}).union(*_BY_TYPE.values())
_HEX, _OCTET = "[0-9a-f]{1,4}", "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DAYS = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "02-(?:0[1-9]|1[0-9]|2[0-8])",
)
_LEAP_YEAR = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = f"(?:[1-9][0-9]{{3}}-(?:{'|'.join(_DAYS)})|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
_SHORTENED = (f"(?:{_HEX}:){{1,{7 - right}}}(?::{_HEX}){{1,{right}}}" for right in range(1, 7))
# xgrammar's own patterns accept invalid values: 2026-02-31, 010.1.1.1.
_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^(?:{_OCTET}\.){{3}}{_OCTET}$",
    "ipv6": f"^(?:(?:{_HEX}:){{7}}{_HEX}|(?:{_HEX}:){{1,7}}:|{'|'.join(_SHORTENED)}|:(?::{_HEX}){{1,7}}|::)$",
}
# A group with `?`, or what must not be changed: an escaped character, or a set.
_OPTIONAL_GROUP = re.compile(r"(\\.|\[(?:\\.|[^\]\\])*\])|\)\?", re.DOTALL)
_FORMATS = frozenset({"email", "duration", "hostname", "uuid", "uri", *_PATTERNS})
_CHOICES = ("anyOf", "oneOf")
_OBJECT = _BY_TYPE["object"]
_BOUNDS = _BY_TYPE["number"]
_DECIMALS = 6  # of a bound, as xgrammar reads it
_EXACT = 2**53
# Characters that JSON escapes and xgrammar writes unescaped.
_ESCAPED = frozenset({*range(32), ord('"'), ord("\\")})
_ASCII = frozenset(range(128))
_CATEGORIES = {
    getattr(kinds, f"CATEGORY_{name}"): frozenset(code for code in _ASCII if re.match(text, chr(code), re.ASCII))
    for name, text in {
        "DIGIT": r"\d",
        "NOT_DIGIT": r"\D",
        "SPACE": r"\s",
        "NOT_SPACE": r"\S",
        "WORD": r"\w",
        "NOT_WORD": r"\W",
    }.items()
}
_TYPED = frozenset[str]().union(*_BY_TYPE.values())
_SHAPES: dict[type, tuple[str, ...]] = {
    dict: ("$defs", "definitions", "properties"),
    list: ("required", "enum", "anyOf", "oneOf", "allOf", "prefixItems"),
    str: ("$ref", "pattern", "format"),
}
_LISTS, _SINGLE = ("anyOf", "oneOf", "allOf", "prefixItems"), ("items", "additionalProperties")
# Numbers are the exception: a whole one is an integer too.
_JSON_TYPES = {bool: "boolean", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}


def malformed(schema: Any) -> bool:
    """Whether it is not a JSON schema: a keyword has a value of the wrong type, or nothing to choose from."""
    if not isinstance(schema, dict):
        return not isinstance(schema, bool)
    shaped = all(isinstance(schema.get(name, kind()), kind) for kind, names in _SHAPES.items() for name in names)
    named = shaped and all(isinstance(name, str) for name in schema.get("required", []))
    chosen = all(schema.get(name) != [] for name in ("anyOf", "oneOf", "allOf"))
    return not (named and chosen) or any(map(malformed, parts(schema)))


def applicable(schema: Any) -> Any:
    """Return the schema without keywords of other types than its own: they constrain nothing."""
    return _everywhere(schema, _of_its_types)


def _of_its_types(schema: dict[str, Any]) -> dict[str, Any]:
    others = _TYPED.difference(*(_BY_TYPE.get(kind, _TYPED) for kind in _types(schema))) if _types(schema) else ()
    return {name: value for name, value in schema.items() if name not in others}


def enforceable(schema: Any) -> Any:
    """Return an equivalent of a schema that is not `malformed`, of which a grammar enforces more.

    Choices are merged with the object beside them, and required properties without a description become properties of
    any value.
    """
    return _everywhere(schema, _equivalent)


def of_the_type(schema: Any) -> Any:
    """Return an `enforceable` schema without what makes a grammar ignore its `type`, or write invalid JSON."""
    return _everywhere(schema, _typed_first)


def _everywhere(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if isinstance(schema, list):
        return [_everywhere(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    for name in _SHAPES[dict]:  # the names within are of properties, not keywords
        if isinstance(schema.get(name), dict):
            changed[name] = {key: _everywhere(each, change) for key, each in schema[name].items()}
    for name in (*_LISTS, *_SINGLE):
        if name in schema:
            changed[name] = _everywhere(schema[name], change)
    return change(changed)


def _equivalent(schema: dict[str, Any]) -> dict[str, Any]:
    for choice in _CHOICES:
        beside = {name: value for name, value in schema.items() if name in _CONSTRAINTS - {choice}}
        branches = schema.get(choice)
        if beside and branches:
            merged = [_merged(beside, branch) for branch in branches]
            if None not in merged:
                return {name: value for name, value in schema.items() if name not in _CONSTRAINTS} | {choice: merged}
    return _described(_spelled_out(schema))


def _spelled_out(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace a format by a pattern, and write a pattern as xgrammar reads it."""
    pattern = _PATTERNS.get(schema.get("format", ""))
    if "pattern" in schema:
        return schema | {"pattern": readable(schema["pattern"])}
    if pattern is None or "string" not in _types(schema) or schema.keys() & {"minLength", "maxLength"}:
        return schema
    return {name: value for name, value in schema.items() if name != "format"} | {"pattern": readable(pattern)}


def readable(pattern: str) -> str:
    """Rewrite a pattern for xgrammar, which may begin in the middle of an optional group like `(?:-[0-9]+)?`."""
    return _OPTIONAL_GROUP.sub(lambda found: found[1] or "){0,1}", pattern)


def _typed_first(schema: dict[str, Any]) -> dict[str, Any]:
    misread = _misread(schema)
    schema = {name: value for name, value in schema.items() if name not in misread}
    if not _types(schema) or not _types(schema) <= _BY_TYPE.keys():
        return schema
    out = set(_CHOICES)
    if "const" in schema and not _fits(schema["const"], schema):
        out.add("const")
    if "enum" in schema:
        fitting = [value for value in schema["enum"] if _fits(value, schema)]
        schema = schema | {"enum": fitting}
        out |= set() if fitting else {"enum"}
    return {name: value for name, value in schema.items() if name not in out}


def _merged(base: dict[str, Any], branch: Any) -> dict[str, Any] | None:
    """Return the object schema of what satisfies both; None if it cannot be written."""
    if not isinstance(branch, dict):
        return None
    own = {name: value for name, value in branch.items() if name in _CONSTRAINTS}
    if not (_is_object(base) and _is_object(own)) or (base.keys() & own.keys()) - {"type", "properties", "required"}:
        return None
    wide, narrow = base.get("properties", {}), dict(own.get("properties", {}))
    for name in [name for name in wide.keys() & narrow.keys() if narrow[name] in ({}, True)]:
        del narrow[name]  # any value: that of `wide` holds
    # A property of only one side is an additional property of the other.
    closed = (base | own).get("additionalProperties", True) is not True
    shared = wide.keys() & narrow.keys()
    if (closed and wide.keys() ^ narrow.keys()) or not all(_narrows(wide[name], narrow[name]) for name in shared):
        return None
    required = dict.fromkeys([*base.get("required", []), *own.get("required", [])])
    return _described({**base, **own, "type": "object", "properties": wide | narrow, "required": list(required)})


def _is_object(schema: dict[str, Any]) -> bool:
    return schema.get("type", "object") == "object" and schema.keys() <= _OBJECT | {"type"}


def _narrows(wide: Any, narrow: Any) -> bool:
    """Whether all values of `narrow` are surely values of `wide`."""
    if wide in (True, {}) or _same(wide, narrow):
        return True
    if not isinstance(wide, dict) or not isinstance(narrow, dict) or "const" not in narrow:
        return False
    of_type = "type" not in wide or _fits(narrow["const"], wide)
    listed = "enum" not in wide or any(_same(narrow["const"], value) for value in wide["enum"])
    return of_type and listed and wide.keys() & _CONSTRAINTS <= {"type", "enum"}


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)  # in Python 1 == True


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    """Describe required properties that are not described: xgrammar would leave them out."""
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    apart = schema.get("type", "object") != "object" or schema.keys() & {"$ref", "const", "enum", *_CHOICES}
    if apart or others is False:
        return schema
    missing = [name for name in schema.get("required", []) if name not in properties]
    more = dict.fromkeys(missing, {} if others is True else others)
    return schema | {"properties": properties | more} if missing else schema


def unenforced(schema: Any) -> str | None:
    """Return the name of the first keyword that no grammar enforces, None if all are enforced.

    `schema` is what `enforceable` returned.
    """
    return next(_unenforced(schema), None)


def _unenforced(schema: Any) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    keywords = schema.keys() & _CONSTRAINTS
    for leading in _LEADING:
        if leading in keywords:
            yield from _beside(leading, schema, keywords - {leading})
            break
    else:
        yield from _typed(schema, keywords)
    for part in parts(schema):
        yield from _unenforced(part)


def parts(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield the schemas within a schema."""
    for name in _SHAPES[dict]:
        yield from schema.get(name, {}).values()
    for name in _LISTS:
        yield from schema.get(name, ())
    yield from (schema[name] for name in _SINGLE if name in schema)


def _beside(leading: str, schema: dict[str, Any], others: set[str]) -> Iterator[str]:
    """Yield the keywords that xgrammar ignores beside a leading one."""
    if leading in {"const", "enum"} and others == {"type"}:
        values = [schema["const"]] if leading == "const" else schema["enum"]
        if all(_fits(value, schema) for value in values):
            return
        yield leading
    elif others:
        yield min(others) if leading in {"const", "enum"} else leading
    elif leading == "oneOf" and not _apart(schema["oneOf"]):
        yield "oneOf"
    elif leading == "allOf" and len(schema["allOf"]) != 1:
        yield "allOf"


def _typed(schema: dict[str, Any], keywords: set[str]) -> Iterator[str]:
    types = _types(schema)
    if "type" not in schema and keywords:
        types = frozenset({"object"}) if keywords <= _OBJECT and "properties" in keywords else frozenset()
    known = frozenset().union(*(_BY_TYPE.get(each, frozenset()) for each in types), {"type"})
    yield from sorted(keywords - known)
    yield from sorted(_misread(schema))
    if "pattern" in keywords and keywords & {"minLength", "maxLength", "format"}:
        yield "pattern"
    if "format" in keywords and (schema["format"] not in _FORMATS or keywords & {"minLength", "maxLength"}):
        yield "format"
    if keywords & {"minProperties", "maxProperties"} and keywords & {"properties", "required"}:
        yield min(keywords & {"minProperties", "maxProperties"})
    properties = schema.get("properties", {})
    if any(name not in properties for name in schema.get("required", [])):
        yield "required"
    if "prefixItems" in keywords and "items" not in keywords and keywords & {"minItems", "maxItems"}:
        yield "prefixItems"


def _misread(schema: dict[str, Any]) -> set[str]:
    """Return the keywords that xgrammar misreads, or of which it makes invalid JSON."""
    found = {name for name in _BOUNDS & schema.keys() if not _is_read(name, schema[name])}
    pattern = schema.get("pattern")
    return found if pattern is None or _is_written(pattern) else found | {"pattern"}


def _is_read(name: str, bound: Any) -> bool:
    if isinstance(bound, bool) or not isinstance(bound, (int, float)):
        return True
    return round(bound, _DECIMALS) == bound and not (name.startswith("exclusive") and abs(bound) >= _EXACT)


def _is_written(pattern: str) -> bool:
    """Whether xgrammar writes all texts of a pattern as valid JSON.

    It leaves out of a set the characters that JSON escapes, unless the set has no others or the pattern has a
    character beyond ASCII.
    """
    try:
        sets = list(_sets(parser.parse(pattern)))
    except (re.error, RecursionError, OverflowError):
        return True  # it is refused for that
    wide = any(not codes <= _ASCII for codes, _ in sets)
    return all(not inside & _ESCAPED or bool(not wide and inside - _ESCAPED) for _, inside in sets)


def _sets(parsed: Any) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Yield, for each place of a pattern, the codes that it names, and the ASCII ones that it allows."""
    for kind, value in parsed:
        if kind is kinds.ANY:
            yield frozenset(), _ASCII
        elif kind in {kinds.LITERAL, kinds.NOT_LITERAL, kinds.IN}:
            codes = frozenset(_codes(value if kind is kinds.IN else [(kinds.LITERAL, value)]))
            negated = kind is kinds.NOT_LITERAL or (kind is kinds.IN and value[0][0] is kinds.NEGATE)
            yield codes, _ASCII - codes if negated else _ASCII & codes
        elif kind in {kinds.MAX_REPEAT, kinds.MIN_REPEAT}:
            yield from _sets(value[2])
        elif kind is kinds.SUBPATTERN:
            yield from _sets(value[3])
        elif kind is kinds.BRANCH:
            for branch in value[1]:
                yield from _sets(branch)


def _codes(members: Any) -> Iterator[int]:
    for kind, value in members:
        if kind is kinds.LITERAL:
            yield value
        elif kind is kinds.RANGE:
            yield from (*range(value[0], min(value[1], len(_ASCII)) + 1), value[1])
        elif kind is kinds.CATEGORY:
            yield from _CATEGORIES[value]


def _types(schema: dict[str, Any]) -> frozenset[str]:
    kinds = schema.get("type")
    return frozenset(kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is of the schema's type."""
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    kinds = {"integer", "number"} if whole else {_JSON_TYPES[type(value)]}
    return not kinds.isdisjoint(_types(schema))


def _apart(branches: Any) -> bool:
    """Whether no value satisfies two of them: their types differ, or constants of one property do."""
    if not all(isinstance(branch, dict) for branch in branches):
        return False
    types = [_types(branch) for branch in branches]
    if all(types) and sum(map(len, types)) == len(frozenset().union(*types)):
        return not {"integer", "number"} <= frozenset().union(*types)
    names = [frozenset(branch.get("required", [])) for branch in branches]
    return any(_told_apart(branches, name) for name in frozenset.intersection(*names))


def _told_apart(branches: list[dict[str, Any]], name: str) -> bool:
    seen: list[Any] = []
    for branch in branches:
        part = branch.get("properties", {}).get(name)
        said = part if isinstance(part, dict) else {}  # `true` is any value
        values = [said["const"]] if "const" in said else said.get("enum", [])
        if not values or any(value in seen for value in values):
            return False
        seen += values
    return all(branch.get("type") == "object" for branch in branches)
