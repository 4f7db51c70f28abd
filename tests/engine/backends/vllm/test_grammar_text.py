"""The grammars that vLLM is given: no endless whitespace, and a safe line below which nothing is tried out first."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.vllm.grammars import format_tag, is_light, without_padding

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tag(schema: Any) -> str:
    form = SimpleNamespace(type="json_schema", json_schema=SimpleNamespace(json_schema=schema))
    made = format_tag(form)
    assert made is not None
    return made


def accepts(structural_tag: str, text: str) -> bool:
    """Whether the real compiler's grammar takes the text as a whole. A vocabulary of bytes is enough."""
    import xgrammar

    vocabulary = [bytes([byte]) for byte in range(256)]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[0])
    grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(structural_tag)
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return bool(matcher.accept_string(text) and matcher.is_terminated())


@pytest.mark.parametrize("schema", [CITY, {"type": "object"}, {}], ids=["schema", "object", "anything"])
def test_json_may_be_compact_or_spaced_but_not_padded(schema: dict[str, Any]) -> None:
    assert accepts(tag(schema), '{"city":"Rome"}')
    assert accepts(tag(schema), '{"city": "New  York"\n}')
    assert not accepts(tag(schema), '{"city":  "Rome"}')
    assert not accepts(tag(schema), '{\n\n"city": "Rome"}')


def test_a_json_object_is_any_object_and_text_has_no_grammar() -> None:
    made = format_tag(SimpleNamespace(type="json_object"))
    assert made is not None
    assert accepts(made, '{"a": [1, {"b": null}]}')
    assert not accepts(made, "[1]")
    assert format_tag(SimpleNamespace(type="text")) is None
    assert format_tag(None) is None


def test_a_tool_parsers_tag_is_bounded_within_and_untouched_elsewhere() -> None:
    schema = {"type": "json_schema", "json_schema": {}, "enum": [{"type": "json_schema", "json_schema": 1}]}
    content = {"type": "json_schema", "json_schema": schema, "style": "json", "max_whitespace_cnt": None}
    qwen = {"type": "json_schema", "json_schema": CITY, "style": "qwen_xml", "max_whitespace_cnt": None}
    other = qwen | {"style": "minimax_xml"}
    elements = [{"type": "tag", "content": content}, qwen, other]
    whole = {"type": "structural_tag", "format": {"type": "or", "elements": elements}}
    made = json.loads(without_padding(json.dumps(whole), "tools"))
    bounded = {"max_whitespace_cnt": 1}
    assert made["format"]["elements"] == [{"type": "tag", "content": content | bounded}, qwen | bounded, other]


@pytest.mark.parametrize(
    "schema",
    [
        CITY,
        {},
        {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "d" * 99} for i in range(20)}},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "array", "items": {"enum": ["a", "b"]}},
        {"type": "object", "properties": {"pattern": {"type": "string"}}, "additionalProperties": False},
        {"type": "object", "additionalProperties": {"type": "number"}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_small_plain_schemas_are_light(schema: dict[str, Any]) -> None:
    assert is_light(tag(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(30)}},
        {"type": "string", "pattern": "^a$"},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "maxLength": 9}}}},
        {"anyOf": [{"type": "string"}, {"minItems": 3}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {}}},
        {"enum": list(range(65))},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "minProperties": 1},
        {"patternProperties": {"^a": {}}},
        {"description": "d" * 20_000},
        {"unheard-of": 1},
    ],
    ids=lambda value: str(value)[:40],
)
def test_anything_else_is_compiled_outside_the_engine_first(schema: dict[str, Any]) -> None:
    assert not is_light(tag(schema))


def test_the_arguments_of_a_call_of_gpt_oss_are_json_and_no_mark_in_letters() -> None:
    content = {"type": "json_schema", "json_schema": CITY}
    call = {"type": "tag", "begin": " to=f<|message|>", "content": content, "end": ["<|end|>", ""]}
    whole = json.dumps({"type": "structural_tag", "format": call})
    mended = without_padding(whole, "tools")
    said = ' to=f<|message|>{"city": "Rome"}'
    assert accepts(whole, said + "<|end|>")
    assert not accepts(mended, said + "<|end|>")
    assert accepts(mended, said)
