"""`structured_outputs`, vLLM's own field for what an answer has to look like: one constraint, within our limits."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from server.api import schema as shared
from server.api.json_schema import object_schema, plain_pattern
from server.errors import ApiError
from server.http.routing import parse_strict_json

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_MOST_CHARACTERS = 64 * 2**10
_no_option = shared.refused("is not supported: leave it out", bool)


def _parsed(text: str) -> Any:
    try:
        return parse_strict_json(text.encode())
    except ApiError as error:
        raise ValueError("must be an object, or the JSON text of one") from error


def _json(value: Any) -> Any:
    schema = _parsed(value) if isinstance(value, str) else value
    return None if schema is None else object_schema(schema, otherwise="send it as `response_format` without `strict`")


def _structural_tag(value: Any) -> Any:
    tag = _parsed(value) if isinstance(value, str) else value
    if tag is None:
        return None
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or not isinstance(tag.get("format"), dict):
        raise ValueError("must be the JSON text of an object with the `type` structural_tag and a `format`")
    text = json.dumps(tag)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"must have at most {_MOST_CHARACTERS} characters")
    return text


_Choice = Annotated[str, Field(min_length=1, max_length=1024)]


class StructuredOutputs(shared.Strict):
    """What the answer has to satisfy: exactly one of these."""

    json_: Annotated[dict[str, Any] | None, BeforeValidator(_json), Field(alias="json")] = None
    """A JSON schema, all of which can be enforced."""
    regex: Annotated[str, Field(min_length=1), AfterValidator(plain_pattern)] | None = None
    choice: Annotated[list[_Choice], Field(min_length=1, max_length=256)] | None = None
    """The answer is one of these."""
    grammar: Annotated[str, Field(min_length=1, max_length=_MOST_CHARACTERS)] | None = None
    """In EBNF, as xgrammar reads it, or in Lark's form."""
    json_object: bool | None = None
    structural_tag: Annotated[str | None, BeforeValidator(_structural_tag)] = None
    """xgrammar's: JSON text with the `type` structural_tag and a `format`."""
    whitespace_pattern: Annotated[Any, BeforeValidator(_no_option)] = None
    disable_any_whitespace: Annotated[Any, BeforeValidator(_no_option)] = None
    disable_additional_properties: Annotated[Any, BeforeValidator(_no_option)] = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if len(self.given) != 1:
            raise ValueError(f"must hold exactly one of {', '.join(f'`{kind}`' for kind in _KINDS)}")
        return self

    @property
    def given(self) -> dict[str, Any]:
        """The constraint, by its name."""
        values = self.model_dump(by_alias=True, include={"json_", *_KINDS}, exclude_none=True)
        return {name: value for name, value in values.items() if value is not False}
