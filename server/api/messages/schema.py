"""The bodies of `POST /v1/messages` and its token count, checked field by field like those of chat.

Unknown fields are ignored, `cache_control` and `metadata` among them. What the fields mean to a model is said in
prompt.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from server.api.chat_schema import MAX_MESSAGES, PositiveInt, Strict, TextPart, object_schema, stop_sequences
from server.validation import FieldError

_MAX_INPUT_BYTES = 2**20
_Count = Field(min_length=1, max_length=1024)
_Name = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
_Id = Field(min_length=1, max_length=256)


def _string_or_blocks(value: Any) -> Any:
    """Told apart by hand, so that an error names the block and not a branch of the union."""
    if isinstance(value, (str, list)):
        return value
    raise ValueError("must be a string or an array of content blocks")


def _null_string_or_blocks(value: Any) -> Any:
    return value if value is None else _string_or_blocks(value)


def _sequences(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("must be an array of strings")  # noqa: TRY004  # pydantic makes a finding of a ValueError only
    return stop_sequences(value)


def _custom_only(value: Any) -> Any:
    if value is None or value == "custom":
        return value
    raise ValueError(
        "must be `custom` or left out: this server runs no tools itself (web search, bash, text editor, computer "
        "use). Offer a tool with a `name` and an `input_schema`, and run it where your program runs"
    )


def _limited_input(value: dict[str, Any]) -> dict[str, Any]:
    if len(msgspec.json.encode(value)) > _MAX_INPUT_BYTES:
        raise ValueError(f"must be at most {_MAX_INPUT_BYTES // 2**20} MiB long")
    return value


class Base64Source(Strict):
    """An image within the request."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Annotated[str, Field(min_length=1)]


class UrlSource(Strict):
    """An image elsewhere. Which addresses are fetched is the same as for `image_url` of chat."""

    type: Literal["url"]
    url: Annotated[str, Field(min_length=1)]


class ImageBlock(Strict):
    """An image, for models with the capability `vision`."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


_Seen = Annotated[TextPart | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(Strict):
    """What a tool gave back for the call `tool_use_id`."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, _Id]
    content: Annotated[
        str | Annotated[list[_Seen], Field(max_length=1024)] | None, BeforeValidator(_null_string_or_blocks)
    ] = None
    is_error: bool | None = None


class ToolUseBlock(Strict):
    """An earlier tool call of the model."""

    type: Literal["tool_use"]
    id: Annotated[str, _Id]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: Annotated[dict[str, Any], AfterValidator(_limited_input)]


class ThinkingBlock(Strict):
    """What the model thought earlier, accepted and dropped."""

    type: Literal["thinking", "redacted_thinking"]


UserBlock = Annotated[TextPart | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextPart | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]
Block = TextPart | ImageBlock | ToolResultBlock | ToolUseBlock | ThinkingBlock
SystemContent = Annotated[str | Annotated[list[TextPart], _Count], BeforeValidator(_string_or_blocks)]


class UserTurn(Strict):
    """What the user says, and what tools gave back."""

    role: Literal["user"]
    content: Annotated[str | Annotated[list[UserBlock], _Count], BeforeValidator(_string_or_blocks)]


class AssistantTurn(Strict):
    """What the model said; as the last message, what its answer begins with."""

    role: Literal["assistant"]
    content: Annotated[
        str | Annotated[list[AssistantBlock], Field(max_length=1024)], BeforeValidator(_string_or_blocks)
    ]


class SystemTurn(Strict):
    """Instructions amid the conversation; they join those of `system`."""

    role: Literal["system"]
    content: SystemContent


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class CustomTool(Strict):
    """A tool that the model may call and the client runs."""

    type: Annotated[str | None, BeforeValidator(_custom_only)] = None
    name: Annotated[str, _Name]
    description: str | None = None
    input_schema: Annotated[dict[str, Any], BeforeValidator(object_schema)]


class FreeToolChoice(Strict):
    """Whether the model may, must or must not call tools."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class MessageToolChoice(Strict):
    """Makes the model call this tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Whether a model that can think does. `budget_tokens` is accepted and not kept to."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: PositiveInt | None = None


class MessageFormat(Strict):
    """A JSON schema that the answer has to satisfy."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], BeforeValidator(object_schema), Field(alias="schema")]


class OutputConfig(Strict):
    """How much effort, and which form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageFormat | None = None


class CountTokensBody(Strict):
    """The body of `POST /v1/messages/count_tokens`: all that makes a prompt."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    """An id from `GET /v1/models`."""
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[
        str | Annotated[list[TextPart], Field(max_length=1024)] | None, BeforeValidator(_null_string_or_blocks)
    ] = None
    tools: Annotated[list[CustomTool], Field(max_length=128)] | None = None
    tool_choice: Annotated[FreeToolChoice | MessageToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: MessageFormat | None = None

    @model_validator(mode="after")
    def _tools_agree(self) -> Self:
        names = {tool.name for tool in self.tools or ()}
        choice = self.tool_choice
        if isinstance(choice, MessageToolChoice) and choice.name not in names:
            raise FieldError("tool_choice.name", "names a tool that is not in `tools`")
        if isinstance(choice, FreeToolChoice) and choice.type == "any" and not names:
            raise FieldError("tool_choice", "needs `tools`")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise FieldError("output_format", "says the same as `output_config.format`: send one of them")
        return self


class MessagesBody(CountTokensBody):
    """The body of `POST /v1/messages`."""

    max_tokens: PositiveInt
    """How long the answer may be."""
    stop_sequences: Annotated[Any, AfterValidator(_sequences)] = ()
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Higher is more random; 0 always takes the likeliest token. Default 1."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Only the likeliest so many tokens are drawn from; 0 means all."""

    @model_validator(mode="after")
    def _an_answer_can_follow(self) -> Self:
        last = self.messages[-1]
        if isinstance(last, AssistantTurn) and any(isinstance(block, ToolUseBlock) for block in last.content):
            raise FieldError("messages", "must not end with a `tool_use`: send its `tool_result` in a message after it")
        return self
