"""What the bodies, queries and answers of several endpoints share.

Types of bodies are strict, numbers bounded, unknown fields ignored, since real clients send many; fields that would
reach into the engine are refused by name. A check takes the value as it was sent and returns it as the schema keeps
it, or raises `ValueError` with a sentence that follows the field's name. No message repeats a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_T = TypeVar("_T")
MAX_MESSAGES = 4096  # whatever the setting says: each of them may be wrong, and be a finding
INT64_MAX = 2**63 - 1


def refused(sentence: str, when: Callable[[Any], bool] = lambda value: value is not None) -> Callable[[Any], Any]:
    """Make a check that lets through what `when` does not hold for."""

    def check(value: Any) -> Any:
        if when(value):
            raise ValueError(sentence)
        return value

    return check


def text_or_array(of: str = "") -> BeforeValidator:
    """Tell the two apart before the union does, so that an error names the part and not a branch."""
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


ShortText = Annotated[str, Field(min_length=1, max_length=256)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
PositiveInt = Annotated[int, Field(ge=1, le=INT64_MAX)]
RandomSeed = Annotated[int, Field(ge=0, le=INT64_MAX)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
EngineField = Annotated[Any, BeforeValidator(refused("is set by your administrator and cannot be sent with a request"))]


class Strict(BaseModel):
    """Strict types; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)


class ModelBody(Strict):
    """A body that names a model, and in which no field of the engine's own may be set."""

    model: ShortText
    """An id from `GET /v1/models`."""
    chat_template: EngineField = None
    mm_processor_kwargs: EngineField = None
    media_io_kwargs: EngineField = None
    prompt_embeds: EngineField = None
    extra_args: EngineField = None
    guided_json: EngineField = None
    guided_regex: EngineField = None
    guided_choice: EngineField = None
    guided_grammar: EngineField = None


class Asked(BaseModel):
    """What stands behind the `?` of an address. What is not known there is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Shown(BaseModel, from_attributes=True, use_attribute_docstrings=True):
    """Part of an answer, made of an object of ours with `model_validate`."""


class Listed(BaseModel, Generic[_T]):
    """A list, in the order that the route names."""

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
    """Numbers in a vector."""
    max_input_tokens: int | None
    """Of one input to a model for embeddings or reranking."""
    parent: str | None
    """Of an adapter: the model that it is put on."""
    running: int
    """Sequences, images or texts at work."""
    waiting: int
    """Requests that wait for their turn, or for the model to be loaded."""
    description: str
    demo: bool
