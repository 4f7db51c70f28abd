"""Types and checks that bodies, queries and answers of several endpoints share.

Types of bodies are strict and numbers bounded. Unknown fields are ignored, since clients send many; fields that would
set options of the engine are refused by name. A check takes the value as it was sent and returns it as the schema keeps
it, or raises `ValueError` with words that follow the field's name. No message repeats a value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from server.validation import iso, spelled

Iso = Annotated[str | None, BeforeValidator(iso)]
_T = TypeVar("_T")
MAX_MESSAGES = 4096  # the most for the setting, too: each may be a finding of pydantic
INT64_MAX = 2**63 - 1
MOST_TOOLS = 512  # agents with several MCP servers send over 128
MAX_TOKENS = 2**18  # each is checked; no context is longer


def refused(sentence: str, when: Callable[[Any], bool] = lambda value: value is not None) -> Callable[[Any], Any]:
    """Return a check that raises `ValueError` for a value for which `when` holds."""

    def check(value: Any) -> Any:
        if when(value):
            raise ValueError(sentence)
        return value

    return check


def text_or_array(of: str = "") -> BeforeValidator:
    """Return a check for a union of both, so that an error names the part and not a branch of the union."""
    return BeforeValidator(
        refused(f"must be a string or an array{of}", lambda value: not isinstance(value, (str, list)))
    )


def stop_texts(value: Any) -> Any:
    if value is None:
        return ()
    sequences = [value] if isinstance(value, str) else value
    good = isinstance(sequences, list) and len(sequences) <= 4
    if not good or not all(isinstance(item, str) and 1 <= len(item) <= 256 for item in sequences):
        raise ValueError("must be a string or an array of at most 4 strings, each of 1 to 256 characters")
    return tuple(sequences)


def _labels(value: Any) -> Any:
    """Check all entries together, so that no error names a key: the client chose it."""
    if (
        not isinstance(value, dict)
        or len(value) > 16
        or not all(
            isinstance(name, str) and len(name) <= 64 and isinstance(text, str) and len(text) <= 512
            for name, text in value.items()
        )
    ):
        raise ValueError("must map at most 16 names of up to 64 characters to texts of up to 512")
    return value


def texts_or_token_ids(value: Any, most: int, most_ids: int) -> Any:
    """Check a text, an array of token ids, or an array of either. Not a union: no error names a branch."""
    one = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(value[0]) is int)
    given = [value] if one else value
    if not isinstance(given, list) or not 1 <= len(given) <= most:
        raise ValueError(f"must be a string, an array of token ids, or an array of 1 to {most} of either")
    if not all(isinstance(item, (str, list)) and item for item in given):
        raise ValueError("must hold texts of at least 1 character, or arrays of at least 1 token id")
    if sum(len(item) for item in given if isinstance(item, list)) > most_ids:
        raise ValueError(f"must hold at most {most_ids} token ids")
    return tuple(item if isinstance(item, str) else _token_ids(item) for item in given)


def _token_ids(given: list[Any]) -> tuple[int, ...]:
    if len(given) > MAX_TOKENS:
        raise ValueError(f"must hold at most {MAX_TOKENS} token ids in one array")
    if not all(type(token) is int and 0 <= token < 2**31 for token in given):
        raise ValueError("must hold token ids as whole numbers from 0, and nothing else in the same array")
    return tuple(given)


def described_form(body: type[BaseModel], *, more: dict[str, Any] | None = None, **files: str) -> dict[str, Any]:
    """Describe a form for `/openapi.json`: `files`, of which the first is required, the body's fields, and `more`."""
    schema = body.model_json_schema()
    refused = {name for name, field in body.model_fields.items() if field.annotation is Any}
    fields = {name: field for name, field in schema["properties"].items() if name not in refused}
    shown = {name: {"type": "string", "format": "binary", "description": text} for name, text in files.items()}
    form = {
        "type": "object",
        "required": [*list(files)[:1], *schema["required"]],
        "properties": {**shown, **fields, **(more or {})},
    }
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}


ShortText = Annotated[str, Field(min_length=1, max_length=256)]
FunctionName = Annotated[
    str, spelled(r"^[A-Za-z0-9_-]{1,128}$", "must have 1 to 128 letters, digits, `_`, `-`, and nothing else")
]
PositiveInt = Annotated[int, Field(ge=1, le=INT64_MAX)]
RandomSeed = Annotated[int, Field(ge=0, le=INT64_MAX)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Labels = Annotated[dict[str, str], BeforeValidator(_labels)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
_EngineField = Annotated[
    Any, BeforeValidator(refused("is set by your administrator and cannot be sent with a request"))
]

_GuidedField = Annotated[
    Any, BeforeValidator(refused("is not supported: use `response_format` of chat, or its `structured_outputs`"))
]


class Strict(BaseModel):
    """Strict types; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)


class ModelBody(Strict):
    """A body that names a model. Fields that would set options of the engine are refused."""

    model: ShortText
    """An id from `GET /v1/models`."""
    chat_template: _EngineField = None
    mm_processor_kwargs: _EngineField = None
    media_io_kwargs: _EngineField = None
    prompt_embeds: _EngineField = None
    extra_args: _EngineField = None
    guided_json: _GuidedField = None
    guided_regex: _GuidedField = None
    guided_choice: _GuidedField = None
    guided_grammar: _GuidedField = None


class Asked(BaseModel):
    """The query of an address. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Shown(BaseModel, from_attributes=True, use_attribute_docstrings=True):
    """Part of an answer; `model_validate` makes it from an object of ours."""


class LimitsInForce(Shown):
    """Limits of a key: its own, else its tier's. Limits of a tier: those of its keys. null: no limit; 0: nothing."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    parallel_requests: int | None
    batch_items: int | None
    images_per_day: int | None


def _in_order(scopes: Collection[str]) -> list[str]:
    from server.store.keys import SCOPES  # not at the top: `hearth voices` imports this file and needs no database

    return [scope for scope in SCOPES if scope in scopes]


class AnyKey(Shown):
    """The fields that every view of a key shows; never its secret."""

    public_id: str
    name: str
    tier: str
    scopes: Annotated[list[str], BeforeValidator(_in_order)]
    models: list[str] | None
    """null: all models of the tier."""
    created_at: Iso
    expires_at: Iso


class Listed(BaseModel, Generic[_T]):
    object: Literal["list"] = "list"
    data: list[_T]


class Model(Shown):
    """A model that the key may use. `context_length` and `max_output_tokens` are in tokens; `sizes` of images."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    tier: str
    capabilities: list[str]
    status: Literal["unloaded", "loading", "ready", "sleeping", "failed"]
    context_length: int | None
    max_model_len: int | None
    """The same as `context_length`, by vLLM's name."""
    max_output_tokens: int | None
    sizes: list[str] | None
    dimensions: int | None
    """The length of its vectors."""
    max_input_tokens: int | None
    """The most tokens of one input, for embeddings or reranking."""
    parent: str | None
    """The base model of an adapter."""
    running: int
    """Sequences, images or texts that run."""
    waiting: int
    """Requests that wait for their turn, or for the model to be loaded."""
    description: str
    demo: bool
