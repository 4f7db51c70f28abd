"""Random JSON schemas, with what grammars enforce and what they do not. No tests."""

from typing import Any

from hypothesis import strategies as st

_NAMES = st.sampled_from(["a", "b", "kind"])
_NUMBERS = st.integers(-3, 6)
_VALUES = st.one_of(st.none(), st.booleans(), _NUMBERS, st.sampled_from([0.5, 2.0, "a", "b", "xy"]))
_ENUM = st.lists(_VALUES, min_size=1, max_size=3, unique_by=repr)
_TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])


def _some(kinds: st.SearchStrategy[Any] | None, **optional: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({} if kinds is None else {"type": kinds}, optional=optional)


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    strings = _some(
        st.just("string"),
        minLength=st.integers(0, 3),
        maxLength=st.integers(3, 6),
        pattern=st.sampled_from(["^[ab]+$", "a{2,3}"]),
        format=st.sampled_from(["date", "uuid", "regex"]),
        enum=_ENUM,
    )
    numbers = _some(
        st.sampled_from(["integer", "number"]),
        minimum=_NUMBERS,
        maximum=st.integers(7, 20),
        exclusiveMinimum=_NUMBERS,
        multipleOf=st.integers(1, 3),
    )
    arrays = _some(
        st.just("array"),
        items=inner,
        prefixItems=several,
        minItems=st.integers(0, 3),
        maxItems=st.integers(3, 5),
        uniqueItems=st.booleans(),
        contains=inner,
    )
    described = {"properties": st.dictionaries(_NAMES, inner, max_size=3), "required": st.lists(_NAMES, unique=True)}
    objects = _some(st.just("object"), **described, additionalProperties=st.one_of(st.booleans(), inner))
    unions = _some(st.just("object"), **described, anyOf=several, oneOf=several)
    anything = _some(
        None,
        **described,
        type=_TYPES,
        anyOf=several,
        oneOf=several,
        allOf=several,
        enum=_ENUM,
        const=_VALUES,
        minProperties=st.integers(0, 2),
        dependentSchemas=st.dictionaries(_NAMES, inner, max_size=1),
        patternProperties=st.dictionaries(st.just("^a"), inner, max_size=1),
        **{"not": inner, "if": inner, "then": inner, "$ref": st.sampled_from(["#/$defs/one", "#/$defs/two"])},
    )
    choices = st.one_of(_some(None, anyOf=several, type=_TYPES), _some(None, oneOf=several))
    of_types = _some(st.lists(_TYPES, min_size=1, max_size=3, unique=True), minimum=_NUMBERS, minLength=_NUMBERS)
    return st.one_of(strings, numbers, arrays, objects, unions, choices, of_types, anything)


_LEAVES = st.sampled_from([{"type": "string"}, {"type": "integer"}, {}, {"const": "a"}, {"enum": [1, "a"]}])
SCHEMAS = st.recursive(_LEAVES, _larger, max_leaves=6)


def with_definitions(schema: Any, one: Any) -> Any:
    """What `$ref` in it leads to stands there."""
    return {**schema, "$defs": {"one": one, "two": {"type": "integer"}}}
