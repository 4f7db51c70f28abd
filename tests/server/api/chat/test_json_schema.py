"""Schemas that would keep the grammar compiler busy, or that no value can satisfy, are refused before it sees them."""

import time
from typing import Any

import pytest

from server.api.json_schema import SchemaTooComplexError, object_schema


def properties(count: int) -> dict[str, Any]:
    return {f"p{i}": {"type": "string"} for i in range(count)}


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"enum": ["x" * 20] * 5000}, "64 KiB"),
        ({"properties": properties(1025)}, "1024 properties"),
        ({"items": {"properties": {**properties(1000), "p0": {"properties": properties(25)}}}}, "1024 properties"),
        ({"type": "array", "minItems": 10**7}, "at most 1000"),
        ({"type": "array", "maxItems": 1e7}, "at most 1000"),
        ({"anyOf": [{"type": "string", "maxLength": 1001}]}, "at most 1000"),
        ({"type": "string", "pattern": "a{5000}"}, "2000 symbols"),
        ({"type": "string", "pattern": "(b{1,5000})"}, "2000 symbols"),
        ({"type": "string", "pattern": "a" * 257}, "256 characters"),
        ({"type": "string", "pattern": "^(((a{1,1000}){1,1000}){1,1000})$"}, "2000 symbols"),
        ({"type": "string", "pattern": "^(a0|b|[a-z]+){1,1000}$"}, "2000 symbols"),
        ({"items": [{"type": "string", "pattern": "a{1,900}"}] * 3}, "2000 symbols"),
        ({"type": "string", "pattern": "^(?=a)b"}, "without lookaround"),
        ({"type": "string", "pattern": r"\p{L}"}, "without lookaround"),
        ({"type": "string", "pattern": "a{ 1,100}"}, "without lookaround"),
        ({"type": "string", "pattern": r"(a)\1"}, "references"),
        ({"type": "string", "pattern": "("}, "plain regular expressions"),
        ({"properties": {"a": {}}, "minProperties": 100}, "16 of its named properties"),
        ({"$ref": "#"}, "refer to itself"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#"}]}, "refer to itself"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"oneOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
            "refer to itself",
        ),
        ({"$ref": "http://127.0.0.1/schema"}, "parts of itself"),
        ({"items": {"$ref": "file:///etc/passwd"}}, "parts of itself"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_beyond_the_limits_is_refused(schema: dict[str, Any], complaint: str):
    with pytest.raises(SchemaTooComplexError, match=complaint) as caught:
        object_schema(schema)
    assert caught.value.code == "schema_too_complex"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": properties(1024)},
        {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}},
        {"$defs": {"a/b": {"type": "string"}}, "anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/a~1b"}]},
        {"$ref": "#/nowhere/0/x"},
        {"properties": {"$ref": {"type": "string"}, "pattern": {"type": "string"}}},
        {"type": "string", "minLength": 1000, "pattern": "^[a-z]{1,1000}$"},
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_ordinary_schema_passes(schema: dict[str, Any]):
    object_schema(schema)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ({"type": "string", "maxLength": 524288, "minLength": 3}, {"type": "string", "minLength": 3}),
        ({"items": [{"minItems": 10**7, "x": [1, "a"]}]}, {"items": [{"x": [1, "a"]}]}),
        ({"properties": {"a": {}}, "maxProperties": 100}, {"properties": {"a": {}}}),
        ({"properties": {"pattern": {"pattern": "(?i)a"}}}, {"properties": {"pattern": {}}}),
        (
            {"items": [{"pattern": "a{1,900}"}] * 2 + [{"pattern": "b{900}"}]},
            {"items": [{"pattern": "a{1,900}"}] * 2 + [{}]},
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_without_strict_what_goes_too_far_is_left_out(sent: dict[str, Any], kept: dict[str, Any]):
    before = str(sent)
    assert object_schema(sent, strict=False) == kept
    assert str(sent) == before


def test_a_strict_schema_is_told_which_keyword_it_is_escaped_and_cut():
    schema = {"properties": {"a": {"items": [{"pattern": "\u2028(?=" + "x" * 200}]}}}
    with pytest.raises(SchemaTooComplexError) as caught:
        object_schema(schema)
    assert '`properties.a.items.0.pattern` of "\\u2028(?=xxx' in str(caught.value)
    assert len(str(caught.value)) < 300
    with pytest.raises(SchemaTooComplexError, match="64 KiB"):
        object_schema({"enum": ["x" * 20] * 5000}, strict=False)


def test_the_worst_schema_that_fits_is_checked_in_no_time():
    many = 2500
    schema = {"$defs": {"a": {}}, "anyOf": [{"$ref": "#/$defs/a"}] * many}
    started = time.perf_counter()
    object_schema(schema)
    assert time.perf_counter() - started < 0.5
