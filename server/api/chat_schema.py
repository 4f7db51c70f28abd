"""The body of a chat request, checked field by field, and what other bodies share with it.

Types are strict, numbers bounded, unknown fields ignored, since real clients send many; fields that would reach into
the engine are refused by name. A check takes the value as it was sent and returns it as the schema keeps it, or raises
`ValueError` with a sentence that follows the field's name. No message repeats a value.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from server.api.json_schema import check_schema
from server.errors import ApiError
from server.http.routing import parse_strict_json
from server.validation import FieldError

MAX_MESSAGES = 4096  # whatever the setting says: each of them may be wrong, and be a finding
_INT64_MAX = 2**63 - 1
_NOT_FOR_REQUESTS = "is set by whoever runs this server and cannot be sent with a request"


def token_biases(value: Any) -> Any:
    """The keys are the client's, so they are checked as a whole: no path of an error may name one."""
    if value is None:
        return value
    sentence = "must map at most 1024 token ids (digits) to numbers from -100 to 100"
    if not isinstance(value, dict) or len(value) > 1024:
        raise ValueError(sentence)
    for token, bias in value.items():
        number = isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not number or not re.fullmatch(r"[0-9]{1,9}", token):
            raise ValueError(sentence)
    return value


def template_switches(value: Any) -> Any:
    if value is None:
        return value
    known = isinstance(value, dict) and set(value) <= {"enable_thinking"}
    if not known or not all(isinstance(switch, bool) for switch in value.values()):
        raise ValueError("may hold `enable_thinking` (true or false) only")
    return value


def object_schema(value: Any) -> Any:
    """A JSON schema has to be an object of limited size, or null."""
    if value is None:
        return value
    if not isinstance(value, dict):
        raise ValueError("must be an object")  # noqa: TRY004  # pydantic makes a finding of a ValueError only
    check_schema(value)
    return value


def call_arguments(arguments: str) -> str:
    """Text that is no JSON is a call the model never finished, and taken for no arguments further down.

    JSON that only a lenient parser reads (lone surrogates, NaN, thousands of levels or digits) would fail there.
    """
    sentence = "must be JSON text without NaN, lone surrogates, huge numbers or deep nesting"
    try:
        json.loads(arguments)
        parse_strict_json(arguments.encode())
    except json.JSONDecodeError:
        return arguments
    except (ValueError, RecursionError, ApiError) as error:
        raise ValueError(sentence) from error
    return arguments


def stop_sequences(value: Any) -> Any:
    if value is None:
        return ()
    sequences = [value] if isinstance(value, str) else value
    good = isinstance(sequences, list) and len(sequences) <= 4
    if not good or not all(isinstance(item, str) and 1 <= len(item) <= 256 for item in sequences):
        raise ValueError("must be a string or an array of at most 4 strings, each of 1 to 256 characters")
    return tuple(sequences)


def _refused(sentence: str) -> BeforeValidator:
    def refuse(value: Any) -> Any:
        if value is not None:
            raise ValueError(sentence)
        return value

    return BeforeValidator(refuse)


EngineField = Annotated[Any, _refused(_NOT_FOR_REQUESTS)]
GuidedField = Annotated[Any, _refused("is not supported: use `response_format` with a JSON schema instead")]
PositiveInt = Annotated[int, Field(ge=1, le=_INT64_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class Strict(BaseModel):
    """Strict types; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)


class NoEngineFields(Strict):
    """A body in which none of them may be set."""

    chat_template: EngineField = None
    mm_processor_kwargs: EngineField = None
    media_io_kwargs: EngineField = None
    prompt_embeds: EngineField = None
    extra_args: EngineField = None
    guided_json: EngineField = None
    guided_regex: EngineField = None
    guided_choice: EngineField = None
    guided_grammar: EngineField = None


class TextPart(Strict):
    """Text within a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """An image; `url` is a `data:` URI."""

    url: Annotated[str, Field(min_length=1)]
    detail: str | None = None


class ImagePart(Strict):
    """An image within a user's message, for models with the capability `vision`."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def _string_or_parts(value: Any) -> Any:
    """Told apart by hand, so that an error names the part and not a branch of the union."""
    if isinstance(value, (str, list)):
        return value
    raise ValueError("must be a string or an array of parts")


def _null_or_parts(value: Any) -> Any:
    return value if value is None else _string_or_parts(value)


_Count = Field(min_length=1, max_length=1024)
TextParts = Annotated[list[TextPart], _Count]
TextContent = Annotated[str | TextParts, BeforeValidator(_string_or_parts)]
UserContent = Annotated[str | Annotated[list[Part], _Count], BeforeValidator(_string_or_parts)]
AssistantContent = Annotated[str | TextParts | None, BeforeValidator(_null_or_parts)]


class SystemMessage(Strict):
    """Instructions; `developer` means the same as `system`."""

    role: Literal["system", "developer"]
    content: TextContent


class UserMessage(Strict):
    """What the user says, with images if the model sees."""

    role: Literal["user"]
    content: UserContent


class CalledFunction(Strict):
    """The function of an earlier tool call; `arguments` is JSON text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[str, Field(max_length=2**20), AfterValidator(call_arguments)]


class ToolCallMessagePart(Strict):
    """An earlier tool call of the model."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Strict):
    """What the model said earlier. `content` may be null when there are `tool_calls`."""

    role: Literal["assistant"]
    content: AssistantContent = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCallMessagePart], Field(min_length=1, max_length=128)] | None = None


class ToolMessage(Strict):
    """A tool's answer to the call `tool_call_id`."""

    role: Literal["tool"]
    content: TextContent
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)]


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionDefinition(Strict):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(object_schema)] = None
    strict: bool | None = None


class ToolDefinition(Strict):
    """A tool. Only functions exist."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    """The function to call."""

    name: str


class NamedToolChoice(Strict):
    """Makes the model call this function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchemaFormat(Strict):
    """A named JSON schema that the answer has to satisfy."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any], BeforeValidator(object_schema), Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Strict):
    """Free text, the default; or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[TextFormat | SchemaFormat, Field(discriminator="type")]


class StreamOptions(Strict):
    """Only together with `stream: true`."""

    include_usage: bool | None = None
    """Adds one last chunk with `usage` and no choices."""


class ChatCompletionBody(Strict):
    """The body of `POST /v1/chat/completions`."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    """An id from `GET /v1/models`."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    """Higher is more random; 0 always takes the likeliest token. Default 1."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    n: Annotated[int, Field(ge=1, le=8)] | None = None
    """How many answers. Default 1."""
    max_tokens: PositiveInt | None = None
    """Upper bound on generated tokens. Default: as many as the model allows."""
    max_completion_tokens: PositiveInt | None = None
    """The same under its newer name; wins over `max_tokens`."""
    stop: Annotated[tuple[str, ...], BeforeValidator(stop_sequences)] = ()
    seed: Annotated[int, Field(ge=-(2**63), le=_INT64_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[Any, AfterValidator(token_biases)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Needs `logprobs: true`."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[ToolDefinition], Field(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    chat_template_kwargs: Annotated[Any, AfterValidator(template_switches)] = None
    """`enable_thinking` only."""
    ignore_eos: bool | None = None
    """Go on until `max_tokens`, for benchmarks."""

    chat_template: EngineField = None
    mm_processor_kwargs: EngineField = None
    media_io_kwargs: EngineField = None
    prompt_embeds: EngineField = None
    extra_args: EngineField = None
    guided_json: GuidedField = None
    guided_regex: GuidedField = None
    guided_choice: GuidedField = None
    guided_grammar: GuidedField = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "needs `stream: true`")
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "needs `logprobs: true`")
        names = {tool.function.name for tool in self.tools or ()}
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise FieldError("tool_choice", "names a function that is not in `tools`")
        if self.tool_choice == "required" and not names:
            raise FieldError("tool_choice", "needs `tools`")
        return self
