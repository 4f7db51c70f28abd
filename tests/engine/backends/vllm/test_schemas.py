"""A schema that is accepted as strict cannot be broken: random schemas, random answers of their grammars, jsonschema as judge."""

import json
import random
import re
from collections.abc import Callable
from datetime import date, datetime, time
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from uuid import UUID

import jsonschema
import pytest
import xgrammar
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_schemas import SCHEMAS, with_definitions
from serving import ROOT

from engine.backends.vllm.schemas import (
    _FORMATS,
    _NEVER,
    _TYPED,
    applicable,
    enforceable,
    malformed,
    of_the_type,
    unenforced,
)
from server.api.json_schema import object_schema

# A vocabulary of single bytes and an end.
_END = 256
_VOCABULARY = xgrammar.TokenizerInfo(
    [bytes([number]) for number in range(256)] + [b"</s>"],
    vocab_type=xgrammar.VocabType.RAW,
    vocab_size=257,
    stop_token_ids=[_END],
)
_COMPILER = xgrammar.GrammarCompiler(_VOCABULARY, cache_enabled=False)


def answer_of(schema: Any, chance: random.Random) -> Any:
    """A random answer that the schema's grammar lets through. Raises `RuntimeError` where there is no grammar."""
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}}
    grammar = xgrammar.Grammar.from_structural_tag(json.dumps(tag))
    matcher = xgrammar.GrammarMatcher(_COMPILER.compile_grammar(grammar))
    mask, text = xgrammar.allocate_token_bitmask(1, 257), bytearray()
    for place in range(1000):
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [token for token in range(257) if words[token >> 5] >> (token & 31) & 1]
        if _END in allowed and (len(allowed) == 1 or chance.random() < 0.5 or place > 300):
            return json.loads(text)
        printable = [token for token in allowed if 32 <= token < 127]
        closing = [token for token in printable if token in b'"]}']
        token = chance.choice((closing if place > 60 or chance.random() < 0.3 else []) or printable or allowed)
        assert matcher.accept_token(token)
        text.append(token)
    raise RuntimeError("no end")


def _is_broken(schema: Any, *, seed: int) -> bool:
    """Whether one of a few answers breaks the schema, given that it is accepted as strict."""
    made, judge, chance = enforceable(schema), jsonschema.Draft202012Validator(schema), random.Random(seed)  # noqa: S311
    if unenforced(made) is not None:
        return False
    try:
        object_schema(schema)
    except ValueError:  # the server refuses it: with a `$ref` to itself
        return False
    try:
        return not all(judge.is_valid(answer_of(made, chance)) for _ in range(4))
    except RuntimeError:  # refused when it is compiled, or an answer that would be cut off
        return False


_RANDOM = settings(database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", sorted(_TYPED | {"type", "enum", "const", "anyOf", "$ref", "$defs", "not", "x-own"}))
def test_a_property_may_have_the_name_of_a_keyword(name: str) -> None:
    schema = {"type": "object", "properties": {name: {"type": "string", "pattern": "^a+$"}}, "required": [name]}
    assert not malformed(schema)
    assert enforceable(schema) == applicable(schema) == of_the_type(schema) == schema
    assert unenforced(schema) is None
    assert enforceable({"type": "object", "x-own": {name: 1}}) == {"type": "object", "x-own": {name: 1}}


@settings(_RANDOM, max_examples=150)
@given(SCHEMAS, SCHEMAS, st.integers())
def test_what_is_accepted_as_strict_is_kept(schema: Any, one: Any, seed: int) -> None:
    assert not _is_broken(with_definitions(schema, one), seed=seed)


@pytest.mark.rounds
@pytest.mark.timeout(1800)
@settings(_RANDOM, max_examples=2000)
@given(SCHEMAS, SCHEMAS, st.integers())
def test_what_is_accepted_as_strict_is_kept_of_thousands(schema: Any, one: Any, seed: int) -> None:
    assert not _is_broken(with_definitions(schema, one), seed=seed)


_SECTION = (ROOT / "docs/api.md").read_text().split("\nNot enforced:\n")[1].split("\n###")[0]


def test_the_documentation_names_what_is_never_enforced_and_the_formats_that_are():
    assert set(_NEVER) <= set(re.findall("`([^` ]+)`", _SECTION))
    (formats,) = (line for line in _SECTION.splitlines() if line.startswith("- formats other than"))
    assert set(re.findall("`([^`]+)`", formats)) == _FORMATS


@settings(_RANDOM, max_examples=200)
@given(SCHEMAS, SCHEMAS)
def test_the_documentation_names_what_a_strict_schema_is_refused_for(schema: Any, one: Any) -> None:
    keyword = unenforced(enforceable(with_definitions(schema, one)))
    # Those of one type are refused beside another, which is said of all of them.
    assert keyword is None or f"`{keyword}`" in _SECTION or keyword in _TYPED


_A, _B = {"a": {"type": "integer"}}, {"b": {"type": "integer"}}
_DEFS = {"$defs": {"one": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "object", "properties": _A, "oneOf": [{"required": ["b"]}, {"required": ["c"]}]}, "oneOf"),
        ({"oneOf": [{"type": "object", "properties": {"a": True}, "required": ["a"]}] * 2}, "oneOf"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/one", "minimum": 1000}}, **_DEFS}, "$ref"),
        ({"type": "integer", "not": {"minimum": 0}}, "not"),
        ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
        ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
        ({"type": "string", "enum": ["a", 1]}, "enum"),
        ({"type": "string", "const": 1}, "const"),
        ({"$dynamicRef": "#one"}, "$dynamicRef"),
        ({"type": "object", "properties": _A, "required": ["b"], "additionalProperties": False}, "required"),
        ({"minimum": 5}, "minimum"),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "allOf"),
        ({"type": "object", "properties": {"deep": {"type": "array", "items": {"not": {}}}}}, "not"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: Any, keyword: str) -> None:
    assert unenforced(enforceable(schema)) == keyword


_TAGGED = [
    {"type": "object", "properties": {"kind": {"const": kind}, **fields}, "required": ["kind", *fields]}
    for kind, fields in (("a", _A), ("b", _B))
]


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": _TAGGED, "discriminator": {"propertyName": "kind"}},
        {"type": "object", "properties": {"kind": {"type": "string"}}, "required": ["kind"], "oneOf": _TAGGED},
        {"type": "object", "properties": _A, "required": ["a"], "anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
        {"type": "object", "properties": _A, "required": ["b"]},
        {
            "type": "object",
            "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
            "x-note": {"not": 1},
        },
        {"type": "array", "items": {"$ref": "#/$defs/one", "description": "a number"}, **_DEFS},
    ],
)
def test_usual_schemas_are_accepted_and_kept(schema: Any) -> None:
    made, judge, chance = enforceable(schema), jsonschema.Draft202012Validator(schema), random.Random(1)  # noqa: S311
    assert unenforced(made) is None
    assert all(judge.is_valid(answer_of(made, chance)) for _ in range(30))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "anyOf": [{"type": "integer"}, {"minimum": 3}]},
        {"type": "string", "enum": ["a", 1]},
        {"type": "string", "const": 1},
        {"type": "object", "properties": _A, "oneOf": [{"required": ["b"]}, {"not": {"required": ["b"]}}]},
    ],
)
def test_without_strict_an_answer_has_the_demanded_type(schema: Any) -> None:
    made, chance = of_the_type(enforceable(schema)), random.Random(1)  # noqa: S311
    judge = jsonschema.Draft202012Validator({"type": schema["type"]})
    assert all(judge.is_valid(answer_of(made, chance)) for _ in range(30))


def test_choices_beside_an_object_keep_what_no_grammar_counts():
    branch = {"properties": {"a": {"type": "string"}}, "required": ["a"]}
    schema = {"type": "object", "minProperties": 1, "anyOf": [branch]}
    assert enforceable(schema) == {"anyOf": [{"type": "object", "minProperties": 1, **branch}]}
    assert unenforced(enforceable(schema)) == "minProperties"


_BRANCHES = [{"properties": {"k": {"const": "x"}}}, {"properties": {"k": {"const": "y"}}, "required": ["b"]}]


def test_choices_that_require_described_properties_are_merged():
    described = {"k": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}
    schema = {"type": "object", "properties": described, "required": ["k"], "anyOf": _BRANCHES}
    first, second = enforceable(schema)["anyOf"]
    assert unenforced(enforceable(schema)) is None
    assert (first["properties"], first["required"]) == (described | {"k": {"const": "x"}}, ["k"])
    assert (second["properties"], second["required"]) == (described | {"k": {"const": "y"}}, ["k", "b"])


@pytest.mark.parametrize(
    "part",
    [
        {"enum": ["x", "y"], "not": {"const": "x"}},
        {"enum": ["x", "y"], "minLength": 2},
        {"enum": [True, "y"], "type": ["boolean", "string"]},
        {"const": True},
    ],
)
def test_a_choice_does_not_replace_what_it_does_not_narrow(part: dict[str, Any]):
    value = "x" if "x" in part.get("enum", []) else 1
    schema = {"type": "object", "properties": {"k": part}, "anyOf": [{"properties": {"k": {"const": value}}}]}
    assert unenforced(enforceable(schema)) == "anyOf"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"properties": 5}, {"properties": None}, {"properties": {"a": None}}, {"required": None}, {"required": [{}]}),
        *({"anyOf": []}, {"oneOf": []}, {"allOf": []}, {"anyOf": 5}, {"enum": 5}, {"format": ["x"]}, {"$ref": 1}),
        *({"items": "nonsense"}, {"items": {"pattern": 3}}, {"$defs": {"a": {"required": "a"}}}),
    ],
)
def test_what_is_no_schema_is_noticed(wrong: dict[str, Any]):
    assert malformed(wrong)
    assert malformed({"type": "object", "properties": {"deep": wrong}})
    assert not malformed({"type": "object", "properties": {"deep": {"default": wrong, "const": wrong}}})


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        *(("date", date.fromisoformat), ("time", time.fromisoformat), ("date-time", datetime.fromisoformat)),
        *(("ipv4", IPv4Address), ("ipv6", IPv6Address), ("uuid", UUID)),
    ],
)
def test_a_text_of_a_format_is_one(kind: str, read: Callable[[str], Any]):
    schema, chance = enforceable({"type": "string", "format": kind}), random.Random(1)  # noqa: S311
    assert unenforced(schema) is None
    for _ in range(40):
        read(answer_of(schema, chance))


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        *(('^"a"$', False), (r"^\\$", False), (r"^\n$", False), ('^["]$', False), ("^.é$", False), ("^[^é]$", False)),
        *(
            (r"^\S+@\S+$", True),
            (r"^[^\n]$", True),
            ("^[A-Za-zÀ-ÿ -]+$", True),
            ('^[a"]$', True),
            ("^(?:é|x){2}$", True),
        ),
    ],
)
def test_a_pattern_that_would_break_the_json_is_refused_or_left_out(pattern: str, *, written: bool):
    schema = enforceable({"type": "string", "pattern": pattern})
    assert unenforced(schema) == (None if written else "pattern")
    assert ("pattern" in of_the_type(schema)) == written


@pytest.mark.parametrize(
    ("bound", "read"),
    [
        *(({"minimum": 1e-7}, False), ({"maximum": 0.1234567}, False), ({"exclusiveMinimum": 2**53}, False)),
        *(({"minimum": -0.000001}, True), ({"exclusiveMaximum": 10**15}, True), ({"maximum": 1e20}, True)),
    ],
)
def test_a_bound_that_would_not_be_read_as_it_is_is_refused_or_left_out(bound: dict[str, float], *, read: bool):
    schema = enforceable({"type": "number", **bound})
    assert unenforced(schema) == (None if read else next(iter(bound)))
    assert (bound.keys() <= of_the_type(schema).keys()) == read


_ATOMS = [
    "a",
    "b",
    '"',
    r"\\",
    r"\n",
    "é",
    ".",
    r"\w",
    r"\s",
    r"\S",
    r"\D",
    "[^a]",
    "[^é]",
    '[a"]',
    '[é"]',
    "[!-~]",
    "[a-zé]",
]
_ENDS = ["", "", "?", "+", "*", "{2}"]
_PLACES = st.lists(st.tuples(st.sampled_from(_ATOMS), st.sampled_from(_ENDS)).map("".join), min_size=1, max_size=3)


@settings(_RANDOM, max_examples=60)
@given(st.lists(_PLACES.map("".join), min_size=1, max_size=2), st.integers())
def test_texts_of_random_patterns_match_them(branches: list[str], seed: int):
    pattern = f"^(?:{'|'.join(branches)})?c$"
    assert not _is_broken({"type": "string", "pattern": pattern}, seed=seed)


@pytest.mark.parametrize(
    "part",
    [
        *({"type": "string", "required": True}, {"type": "integer", "format": None}, {"type": "string", "items": None}),
        {"type": ["string", "null"], "properties": None},
    ],
)
def test_keywords_of_other_types_are_no_reason_to_refuse(part: dict[str, Any]):
    schema = {"type": "object", "properties": {"a": part, "type": {"type": "string"}}, "required": ["a"]}
    assert malformed(schema)
    expected = {"a": {"type": part["type"]}, "type": {"type": "string"}}
    assert applicable(schema) == {"type": "object", "properties": expected, "required": ["a"]}
    assert not malformed(applicable(schema))
