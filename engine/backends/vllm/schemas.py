"""Which JSON schemas a grammar enforces as JSON Schema means them, and how others are written so that it does.

xgrammar looks at one of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and `type`, in this order, and leaves out
what stands beside it. `enforceable` merges what it can; `unenforced` names what is left. Pure functions over parsed
JSON.
"""

import json
from collections.abc import Callable, Iterator
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
# Whatever else stands in a schema constrains nothing.
_CONSTRAINTS = frozenset({"type", *_LEADING, *_NEVER}).union(*_BY_TYPE.values())
_FORMATS = frozenset({"email", "date", "time", "date-time", "duration", "ipv6", "hostname", "uuid", "uri"})
_CHOICES = ("anyOf", "oneOf")
_VALUES = frozenset({"const", "enum", "default", "examples"})  # of a document, which are no schemas
_OBJECT = _BY_TYPE["object"]
_TYPED = frozenset[str]().union(*_BY_TYPE.values())
_SHAPES: dict[type, tuple[str, ...]] = {
    dict: ("$defs", "definitions", "properties"),
    list: ("required", "enum", "anyOf", "oneOf", "allOf", "prefixItems"),
    str: ("$ref", "pattern", "format"),
}
# Numbers are the exception: a whole one is an integer, too.
_JSON_TYPES = {bool: "boolean", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}


def malformed(schema: Any) -> bool:
    """Whether it is no JSON schema: a keyword has a value of another type than it takes, or nothing to choose from."""
    if not isinstance(schema, dict):
        return not isinstance(schema, bool)
    shaped = all(isinstance(schema.get(name, kind()), kind) for kind, names in _SHAPES.items() for name in names)
    named = shaped and all(isinstance(name, str) for name in schema.get("required", []))
    chosen = all(schema.get(name) != [] for name in ("anyOf", "oneOf", "allOf"))
    return not (named and chosen) or any(map(malformed, parts(schema)))


def applicable(schema: Any) -> Any:
    """Return the schema without keywords of types that it is not of: they constrain nothing, whatever they hold."""
    return _everywhere(schema, _of_its_types)


def _of_its_types(schema: dict[str, Any]) -> dict[str, Any]:
    others = _TYPED.difference(*(_BY_TYPE.get(kind, _TYPED) for kind in _types(schema))) if _types(schema) else ()
    return {name: value for name, value in schema.items() if name not in others}


def enforceable(schema: Any) -> Any:
    """Return an equivalent of a schema that is not `malformed`, of which a grammar enforces more.

    Choices are merged with the object that they stand beside, and required properties that are not described become
    properties of any value.
    """
    return _everywhere(schema, _equivalent)


def of_the_type(schema: Any) -> Any:
    """Return an `enforceable` schema without what would have a grammar leave out the `type` that stands beside it."""
    return _everywhere(schema, _typed_first)


def _everywhere(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if isinstance(schema, list):
        return [_everywhere(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: value if name in _VALUES else _everywhere(value, change) for name, value in schema.items()}
    return change(parts)


def _equivalent(schema: dict[str, Any]) -> dict[str, Any]:
    for choice in _CHOICES:
        beside = {name: value for name, value in schema.items() if name in _CONSTRAINTS - {choice}}
        branches = schema.get(choice)
        if beside and branches:
            merged = [_merged(beside, branch) for branch in branches]
            if None not in merged:
                return {name: value for name, value in schema.items() if name not in _CONSTRAINTS} | {choice: merged}
    return _described(schema)


def _typed_first(schema: dict[str, Any]) -> dict[str, Any]:
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
    """Return what holds both, of objects; None where that cannot be written down."""
    if not isinstance(branch, dict):
        return None
    own = {name: value for name, value in branch.items() if name in _CONSTRAINTS}
    if not (_is_object(base) and _is_object(own)) or (base.keys() & own.keys()) - {"type", "properties", "required"}:
        return None
    wide, narrow = base.get("properties", {}), dict(own.get("properties", {}))
    for name in [name for name in wide.keys() & narrow.keys() if narrow[name] in ({}, True)]:
        del narrow[name]  # any value: what stands in `wide` holds
    # A property of one side is another one to the `additionalProperties` of the other.
    closed = (base | own).get("additionalProperties", True) is not True
    shared = wide.keys() & narrow.keys()
    if (closed and wide.keys() ^ narrow.keys()) or not all(_narrows(wide[name], narrow[name]) for name in shared):
        return None
    required = dict.fromkeys([*base.get("required", []), *own.get("required", [])])
    return _described({**base, **own, "type": "object", "properties": wide | narrow, "required": list(required)})


def _is_object(schema: dict[str, Any]) -> bool:
    return schema.get("type", "object") == "object" and schema.keys() <= _OBJECT | {"type"}


def _narrows(wide: Any, narrow: Any) -> bool:
    """Whether all values of `narrow` are values of `wide`, as far as can be seen at a glance."""
    if wide in (True, {}) or _same(wide, narrow):
        return True
    if not isinstance(wide, dict) or not isinstance(narrow, dict) or "const" not in narrow:
        return False
    of_type = "type" not in wide or _fits(narrow["const"], wide)
    listed = "enum" not in wide or any(_same(narrow["const"], value) for value in wide["enum"])
    return of_type and listed and wide.keys() & _CONSTRAINTS <= {"type", "enum"}


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)  # to Python, 1 equals true


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
    if isinstance(schema, bool) or schema is None:
        return
    if not isinstance(schema, dict):
        yield "type"
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
    """Yield what stands within a schema where schemas do."""
    for name in _SHAPES[dict]:
        yield from schema.get(name, {}).values()
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        yield from schema.get(name, ())
    yield from (schema[name] for name in ("items", "additionalProperties") if name in schema)


def _beside(leading: str, schema: dict[str, Any], others: set[str]) -> Iterator[str]:
    """What stands beside a keyword that xgrammar takes alone."""
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


def _types(schema: dict[str, Any]) -> frozenset[str]:
    kinds = schema.get("type")
    return frozenset(kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is of the schema's type."""
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    kinds = {"integer", "number"} if whole else {_JSON_TYPES[type(value)]}
    return not kinds.isdisjoint(_types(schema))


def _apart(branches: Any) -> bool:
    """Whether no value satisfies two of them: of different types, or told apart by the constants of one property."""
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
        part = branch.get("properties", {}).get(name, {})
        values = [part["const"]] if isinstance(part, dict) and "const" in part else part.get("enum", [])
        if not values or any(value in seen for value in values):
            return False
        seen += values
    return all(branch.get("type") == "object" for branch in branches)
