"""`structured_outputs`, vLLM's own field for what an answer has to look like: one constraint, within our limits.

Free grammars are refused: after some hundred tokens an ambiguous one (`root ::= root root | "a"`) takes xgrammar a
second for each, in the engine, where it would hold up everybody. Structural tags may hold such grammars.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from server.api import schema as shared
from server.api.json_schema import object_schema, plain_pattern
from server.errors import ApiError
from server.http.routing import parse_strict_json

_KINDS = ("json", "json_object", "choice", "regex")
_no_option = shared.refused("is not supported: leave it out", bool)
_no_grammar = shared.refused("is not supported, since it could hold up other answers: use `regex`, `choice` or `json`")
_no_tag = shared.refused("is not supported, since it could hold up other answers: use `json`, or `tools` for calls")


def _json(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = parse_strict_json(value.encode())
        except ApiError as error:
            raise ValueError("must be a JSON schema, an object or the JSON text of one") from error
    return None if value is None else object_schema(value, otherwise="send it as `response_format` without `strict`")


_Choice = Annotated[str, Field(min_length=1, max_length=1024)]


class StructuredOutputs(shared.Strict):
    """What the answer has to satisfy: exactly one of these."""

    json_: Annotated[dict[str, Any] | None, BeforeValidator(_json), Field(alias="json")] = None
    """A JSON schema, all of which can be enforced."""
    json_object: bool | None = None
    """True: any JSON object."""
    choice: Annotated[list[_Choice], Field(min_length=1, max_length=256)] | None = None
    """The answer is one of these."""
    regex: Annotated[str, Field(min_length=1), AfterValidator(plain_pattern)] | None = None
    grammar: Annotated[Any, BeforeValidator(_no_grammar)] = None
    structural_tag: Annotated[Any, BeforeValidator(_no_tag)] = None
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
