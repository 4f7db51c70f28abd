"""The bodies of `POST /v1/messages` and its token count, checked field by field like those of chat.

Unknown fields are ignored, `cache_control` and `metadata` among them. What the fields mean to a model is said in
routes.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from server.api import schema as shared
from server.api.chat_request import OtherTool, TextPart, callable_or_other
from server.api.json_schema import sent_schema
from server.validation import FieldError

_MAX_INPUT_BYTES = 2**20
_NOT_EMPTY = Field(min_length=1, max_length=1024)
_COUNTED = Field(max_length=1024)
_STRING_OR_BLOCKS = shared.text_or_array(" of content blocks")

_no_string = shared.refused("must be an array of strings", lambda value: isinstance(value, str))
_limited_input = shared.refused(
    f"must be at most {_MAX_INPUT_BYTES // 2**20} MiB long",
    lambda value: len(msgspec.json.encode(value)) > _MAX_INPUT_BYTES,
)
_Schema = Annotated[dict[str, Any], BeforeValidator(sent_schema)]


class Base64Source(shared.Strict):
    """An image within the request."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Annotated[str, Field(min_length=1)]

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(shared.Strict):
    """An image elsewhere. Which addresses are fetched is the same as for `image_url` of chat."""

    type: Literal["url"]
    url: Annotated[str, Field(min_length=1)]


class ImageBlock(shared.Strict):
    """An image, for models with the capability `vision`."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


_Seen = Annotated[TextPart | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(shared.Strict):
    """What a tool gave back for the call `tool_use_id`."""

    type: Literal["tool_result"]
    tool_use_id: shared.ShortText
    content: Annotated[str | Annotated[list[_Seen], _COUNTED], _STRING_OR_BLOCKS] | None = None
    is_error: bool | None = None


class ToolUseBlock(shared.Strict):
    type: Literal["tool_use"]
    id: shared.ShortText
    name: shared.ShortText
    input: Annotated[dict[str, Any], AfterValidator(_limited_input)]


class ThinkingBlock(shared.Strict):
    """What the model thought earlier, accepted and dropped."""

    type: Literal["thinking", "redacted_thinking"]


_UserBlock = Annotated[TextPart | ImageBlock | ToolResultBlock, Field(discriminator="type")]
_AssistantBlock = Annotated[TextPart | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]
Block = TextPart | ImageBlock | ToolResultBlock | ToolUseBlock | ThinkingBlock


class UserTurn(shared.Strict):
    """What the user says, and what tools gave back."""

    role: Literal["user"]
    content: Annotated[str | Annotated[list[_UserBlock], _NOT_EMPTY], _STRING_OR_BLOCKS]


class AssistantTurn(shared.Strict):
    """What the model said; as the last message, what its answer begins with."""

    role: Literal["assistant"]
    content: Annotated[str | Annotated[list[_AssistantBlock], _COUNTED], _STRING_OR_BLOCKS]


class SystemTurn(shared.Strict):
    """Instructions amid the conversation; they join those of `system`."""

    role: Literal["system"]
    content: Annotated[str | Annotated[list[TextPart], _NOT_EMPTY], _STRING_OR_BLOCKS]


_Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class CustomTool(shared.Strict):
    """A tool that the model may call and the client runs."""

    type: Literal["custom"] | None = None
    name: shared.FunctionName
    description: str | None = None
    strict: bool | None = None
    input_schema: _Schema


_Tool = Annotated[
    Annotated[CustomTool, Tag("callable")] | Annotated[OtherTool, Tag("other")],
    Discriminator(callable_or_other("custom")),
]


class FreeToolChoice(shared.Strict):
    """Whether the model may, must or must not call tools."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class MessageToolChoice(shared.Strict):
    """Makes the model call this tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(shared.Strict):
    """Whether a model that can think does. `budget_tokens` is accepted and not kept to."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: shared.PositiveInt | None = None


class MessageFormat(shared.Strict):
    """A JSON schema that the answer has to satisfy."""

    type: Literal["json_schema"]
    json_schema: Annotated[_Schema, Field(alias="schema")]


class OutputConfig(shared.Strict):
    effort: shared.Effort | None = None
    format: MessageFormat | None = None


class CountTokensBody(shared.Strict):
    """The body of `POST /v1/messages/count_tokens`: all that makes a prompt."""

    model: shared.ShortText
    """An id from `GET /v1/models`."""
    messages: Annotated[list[_Turn], Field(min_length=1, max_length=shared.MAX_MESSAGES)]
    system: Annotated[str | Annotated[list[TextPart], _COUNTED], _STRING_OR_BLOCKS] | None = None
    tools: Annotated[list[_Tool], Field(max_length=128)] | None = None
    """Those with an `input_schema`. Others are left out, and the header `x-hearth-ignored` names them."""
    tool_choice: Annotated[FreeToolChoice | MessageToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: MessageFormat | None = None

    @model_validator(mode="after")
    def _tools_agree(self) -> Self:
        names = {tool.name for tool in self.tools or () if isinstance(tool, CustomTool)}
        choice = self.tool_choice
        if isinstance(choice, MessageToolChoice) and choice.name not in names:
            raise FieldError("tool_choice.name", "names a tool that is not in `tools`")
        if isinstance(choice, FreeToolChoice) and choice.type == "any" and not names:
            raise FieldError("tool_choice", "needs `tools`")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise FieldError("output_format", "says the same as `output_config.format`: send one of them")
        return self


class MessagesBody(CountTokensBody):
    max_tokens: shared.PositiveInt
    """How long the answer may be."""
    stop_sequences: Annotated[Any, AfterValidator(shared.stop_texts), BeforeValidator(_no_string)] = ()
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Higher is more random; 0 always takes the likeliest token. Default: the model's own, else 1."""
    top_p: shared.TopP | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Only the likeliest so many tokens are drawn from; 0 means all."""

    @model_validator(mode="after")
    def _an_answer_can_follow(self) -> Self:
        last = self.messages[-1]
        if isinstance(last, AssistantTurn) and any(isinstance(block, ToolUseBlock) for block in last.content):
            raise FieldError("messages", "must not end with a `tool_use`: send its `tool_result` in a message after it")
        return self
