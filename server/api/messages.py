"""`POST /v1/messages`, whole and streamed, and `POST /v1/messages/count_tokens`: chat in Anthropic's API.

A body is checked field by field like those of chat; unknown fields are ignored, `cache_control` and `metadata` among
them. It is then translated into a chat body, so that all checks and limits of chat apply; errors name the fields that
the client sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal, Self

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import from_json

from engine import ChatDelta, ChatRequest, ChatResult, ChatStep, FinishReason, GenerationError, ToolCallDelta, Usage
from server.api import schema
from server.api.caller import Answer, Caller, ChatCaller, checked, event, json_response
from server.api.chat_request import (
    ChatCompletionBody,
    FieldNames,
    OtherTool,
    TextPart,
    callable_or_other,
    to_chat_request,
    tool_call,
)
from server.api.json_schema import sent_schema
from server.errors import ApiError
from server.http.bodies import StrictRoute
from server.http.disconnect import until_disconnect
from server.validation import FieldError

router = APIRouter(prefix="/v1/messages", tags=["messages"], route_class=StrictRoute)
# Claude Code's first line of `system` differs in every request: no prompt would ever be found in the cache.
_BILLING_LINE = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
# Blocks as `content_block_start` has them.
_EMPTY_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
# By the type of a block: the type of its delta, and the field with the text.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}

# Blocks of tools that another provider ran itself.
_ELSEWHERE = {
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    *("mcp_tool_use", "mcp_tool_result", "container_upload", "compaction", "fallback"),
}
# The engine's message (`prompt_too_long`).
_TOO_LONG = re.compile(r"context length is (\d+) tokens\. However, your messages come to \D*(\d+) tokens")
_MAX_INPUT_BYTES = 2**20
_NOT_EMPTY = Field(min_length=1, max_length=1024)
_COUNTED = Field(max_length=1024)
_STRING_OR_BLOCKS = schema.text_or_array(" of content blocks")

_no_string = schema.refused("must be an array of strings", lambda value: isinstance(value, str))
_limited_input = schema.refused(
    f"must be at most {_MAX_INPUT_BYTES // 2**20} MiB long",
    lambda value: len(msgspec.json.encode(value)) > _MAX_INPUT_BYTES,
)
_Schema = Annotated[dict[str, Any], BeforeValidator(sent_schema)]


class Base64Source(schema.Strict):
    """An image within the request."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Annotated[str, Field(min_length=1)]

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(schema.Strict):
    """An image at an address, which is fetched by the same rules as `image_url` of chat."""

    type: Literal["url"]
    url: Annotated[str, Field(min_length=1)]


class ImageBlock(schema.Strict):
    """An image, for models with the capability `vision`."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


def _as_text(block: Any) -> Any:
    """Return a text document, or a result of a tool search, as a text block. Raises `ValueError` for a PDF."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "tool_reference" and isinstance(block.get("tool_name"), str):
        return {"type": "text", "text": f"The tool {block['tool_name']} is loaded."}
    if kind != "document":
        return block
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "text":
        raise ValueError("is not text: this server does not support PDF input. Send the text of the document")
    return {"type": "text", "text": source.get("data")}


def _without_foreign(block: Any) -> Any:
    """Replace blocks of tools that another provider ran by one that is dropped."""
    kind = block.get("type") if isinstance(block, dict) else None
    return {"type": "redacted_thinking"} if isinstance(kind, str) and kind in _ELSEWHERE else block


_Seen = Annotated[Annotated[TextPart | ImageBlock, Field(discriminator="type")], BeforeValidator(_as_text)]


class ToolResultBlock(schema.Strict):
    """The result of the tool call `tool_use_id`."""

    type: Literal["tool_result"]
    tool_use_id: schema.ShortText
    content: Annotated[str | Annotated[list[_Seen], _COUNTED], _STRING_OR_BLOCKS] | None = None
    is_error: bool | None = None


class ToolUseBlock(schema.Strict):
    type: Literal["tool_use"]
    id: schema.ShortText
    name: schema.ShortText
    input: Annotated[dict[str, Any], AfterValidator(_limited_input)]


class ThinkingBlock(schema.Strict):
    """Earlier reasoning of the model, like `reasoning_content` of chat."""

    type: Literal["thinking"]
    thinking: str = ""


class RedactedThinkingBlock(schema.Strict):
    """Reasoning that only another provider can read. Accepted and dropped."""

    type: Literal["redacted_thinking"]


_UserBlock = Annotated[
    Annotated[TextPart | ImageBlock | ToolResultBlock, Field(discriminator="type")], BeforeValidator(_as_text)
]
_AssistantBlock = Annotated[
    Annotated[TextPart | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")],
    BeforeValidator(_without_foreign),
]
Block = TextPart | ImageBlock | ToolResultBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock


class UserTurn(schema.Strict):
    """A user's message, and results of tools."""

    role: Literal["user"]
    content: Annotated[str | Annotated[list[_UserBlock], _NOT_EMPTY], _STRING_OR_BLOCKS]


class AssistantTurn(schema.Strict):
    """An answer of the model; as the last message, the beginning of its answer."""

    role: Literal["assistant"]
    content: Annotated[str | Annotated[list[_AssistantBlock], _COUNTED], _STRING_OR_BLOCKS]


class SystemTurn(schema.Strict):
    """Instructions within the conversation; they are added to those of `system`."""

    role: Literal["system"]
    content: Annotated[str | Annotated[list[TextPart], _NOT_EMPTY], _STRING_OR_BLOCKS]


_Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class CustomTool(schema.Strict):
    """A tool that the model may call and the client runs."""

    type: Literal["custom"] | None = None
    name: schema.FunctionName
    description: str | None = None
    strict: bool | None = None
    input_schema: _Schema


_Tool = Annotated[
    Annotated[CustomTool, Tag("callable")] | Annotated[OtherTool, Tag("other")],
    Discriminator(callable_or_other("custom")),
]


class FreeToolChoice(schema.Strict):
    """Whether the model may, must or must not call tools."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class MessageToolChoice(schema.Strict):
    """Makes the model call this tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(schema.Strict):
    """Whether a model that can reason does. `budget_tokens` is accepted and has no effect."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: schema.PositiveInt | None = None


class MessageFormat(schema.Strict):
    """A JSON schema that the answer has to satisfy."""

    type: Literal["json_schema"]
    json_schema: Annotated[_Schema, Field(alias="schema")]


class OutputConfig(schema.Strict):
    effort: schema.Effort | None = None
    format: MessageFormat | None = None


class CountTokensBody(schema.Strict):
    """The body of `POST /v1/messages/count_tokens`: all fields that make a prompt."""

    model: schema.ShortText
    """An id from `GET /v1/models`."""
    messages: Annotated[list[_Turn], Field(min_length=1, max_length=schema.MAX_MESSAGES)]
    system: Annotated[str | Annotated[list[TextPart], _COUNTED], _STRING_OR_BLOCKS] | None = None
    tools: Annotated[list[_Tool], Field(max_length=schema.MOST_TOOLS)] | None = None
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
    max_tokens: schema.PositiveInt
    """How long the answer may be."""
    stop_sequences: Annotated[Any, AfterValidator(schema.stop_texts), BeforeValidator(_no_string)] = ()
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Higher is more random; 0 always takes the likeliest token. Default: the model's own, else 1."""
    top_p: schema.TopP | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Sample from this many of the likeliest tokens; 0 means all."""

    @model_validator(mode="after")
    def _an_answer_can_follow(self) -> Self:
        last = self.messages[-1]
        if isinstance(last, AssistantTurn) and any(isinstance(block, ToolUseBlock) for block in last.content):
            raise FieldError("messages", "must not end with a `tool_use`: send its `tool_result` in a message after it")
        return self


_Blocks = list[tuple[str, Block]]  # each with its path in the client's body


@router.post("", response_class=Response)
async def create_message(body: MessagesBody, caller: ChatCaller) -> Response:
    """Answer a conversation with a message, whole or, with `stream: true`, as server-sent events."""
    chat, names = _to_chat(body, caller)
    return await caller.answer(chat, MessageAnswer(chat), stream=body.stream, naming=names.as_sent())


@router.post("/count_tokens", response_class=Response)
async def count_tokens(body: CountTokensBody, caller: ChatCaller) -> Response:
    """Count the tokens of the prompt that this body makes, tools and the model's template included."""
    chat, names = _to_chat(body, caller)
    caller.record.model = chat.model
    with names.as_sent():
        tokens = await until_disconnect(caller.engine.count_tokens(chat), caller.request)
    caller.record.prompt_tokens = tokens
    return json_response({"input_tokens": tokens})


def _to_chat(body: CountTokensBody, caller: Caller) -> tuple[ChatRequest, FieldNames]:
    """Return a body as a chat request, and its names in errors. Raises `ApiError` for what chat refuses."""
    names = _Names({"stop": "stop_sequences", "reasoning_effort": "output_config.effort"})
    messages, continues = _messages(body, names)
    fields: dict[str, Any] = {"model": body.model, "messages": messages, **_tools(body)}
    if body.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    form = body.output_format or (body.output_config and body.output_config.format)
    if form:
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": form.json_schema},
        }
        names["response_format"] = "output_format" if body.output_format else "output_config.format"
    if isinstance(body, MessagesBody):
        fields |= body.model_dump(include={"max_tokens", "stream", "temperature", "top_p", "top_k"})
        fields["stop"] = list(body.stop_sequences)
    with names.as_sent():
        chat = to_chat_request(checked(ChatCompletionBody, fields), caller)
    return replace(chat, continue_answer=continues), names


class _Names(FieldNames):
    """Names of fields, and the messages by which Claude Code knows what to remove from a conversation."""

    def _renamed(self, error: ApiError) -> ApiError:
        error = super()._renamed(error)
        if found := _TOO_LONG.search(error.message):
            sentence = f"prompt is too long: {found[2]} tokens > {found[1]} maximum. Please shorten the messages."
            return replace(error, message=sentence)
        if (error.param or "").endswith(".source"):
            return replace(error, message=f"Could not process image: {error.message}")
        return error


def _tools(body: CountTokensBody) -> dict[str, Any]:
    if not body.tools:
        return {}
    fields: dict[str, Any] = {"tools": [_tool(tool) for tool in body.tools]}
    choice = body.tool_choice
    if isinstance(choice, MessageToolChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        fields["tool_choice"] = _CHOICES[choice.type]
    if choice is not None and choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _tool(tool: CustomTool | OtherTool) -> dict[str, Any]:
    if isinstance(tool, OtherTool):
        return {"type": tool.word}
    names = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": names}


def _messages(body: CountTokensBody, names: FieldNames) -> tuple[list[dict[str, Any]], bool]:
    """Return chat messages, and whether the last one is to be continued."""
    system = _system(body)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for role, blocks in _turns(body):
        first = len(messages)
        messages += [_assistant(blocks)] if role == "assistant" else _user(blocks, names, first)
        for position in range(first, len(messages)):
            names[f"messages[{position}]"] = blocks[0][0].partition(".")[0]
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or "tool_calls" in last:
        return messages, False
    if not last["content"]:  # only reasoning: there is nothing to continue
        return messages[:-1], False
    return messages, True


def _placed(path: str, content: str | Sequence[Block] | None) -> _Blocks:
    """Return the blocks of a content, each with its path; a plain text is one block."""
    if isinstance(content, str) or not content:
        return [(path, TextPart(type="text", text=content if isinstance(content, str) else ""))]
    return [(f"{path}[{index}]", block) for index, block in enumerate(content)]


def _text(blocks: _Blocks) -> str:
    return "\n".join(block.text for _, block in blocks if isinstance(block, TextPart) and block.text)


def _system(body: CountTokensBody) -> str:
    """Return all instructions, for the first message: many templates refuse them anywhere else."""
    contents = [body.system, *(turn.content for turn in body.messages if isinstance(turn, SystemTurn))]
    blocks = [placed for content in contents for placed in _placed("system", content)]
    return _text([placed for placed in blocks if not _text([placed]).startswith(_BILLING_LINE)])


def _turns(body: CountTokensBody) -> list[tuple[str, _Blocks]]:
    """Return (role, blocks) of each turn. Consecutive messages of a role are one: many templates require it."""
    said = [
        (message.role, placed)
        for position, message in enumerate(body.messages)
        if not isinstance(message, SystemTurn)
        for placed in _placed(f"messages[{position}].content", message.content)
    ]
    return [(role, [placed for _, placed in turn]) for role, turn in groupby(said, key=itemgetter(0))]


def _assistant(blocks: _Blocks) -> dict[str, Any]:
    text = _text(blocks)
    calls = [
        tool_call(block.id, block.name, msgspec.json.encode(block.input).decode())
        for _, block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = "\n".join(block.thinking for _, block in blocks if isinstance(block, ThinkingBlock))
    thought = {"reasoning_content": thoughts} if thoughts else {}
    if not calls:
        return {"role": "assistant", "content": text, **thought}
    return {"role": "assistant", "content": text or None, "tool_calls": calls, **thought}


def _user(blocks: _Blocks, names: FieldNames, first: int) -> list[dict[str, Any]]:
    """Return results of tools first, each as its own message; their images are added to the user's message."""
    messages: list[dict[str, Any]] = []
    parts: _Blocks = []
    for path, block in blocks:
        if isinstance(block, ToolResultBlock):
            inner = _placed(f"{path}.content", block.content)
            text = f"Error: {_text(inner)}" if block.is_error else _text(inner)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            parts += [(place, part) for place, part in inner if isinstance(part, ImageBlock)]
        else:
            parts.append((path, block))
    if not any(isinstance(part, ImageBlock) for _, part in parts):
        return [*messages, {"role": "user", "content": _text(parts)}] if parts else messages
    content: list[dict[str, Any]] = []
    for path, part in parts:
        if isinstance(part, ImageBlock):
            names[f"messages[{first + len(messages)}].content[{len(content)}]"] = f"{path}.source"
            content.append({"type": "image_url", "image_url": {"url": part.source.url}})
        elif isinstance(part, TextPart) and part.text:
            content.append({"type": "text", "text": part.text})
    return [*messages, {"role": "user", "content": content}]


class MessageAnswer(Answer):
    """Encodes one message, whole or as events: for each block a start, deltas and a stop, one after the other."""

    def __init__(self, asked: ChatRequest) -> None:
        id_ = f"msg_{asked.request_id}"
        self._named: dict[str, Any] = {"id": id_, "type": "message", "role": "assistant", "model": asked.model}
        self._begun = False
        self._index = -1  # of the newest block
        self._open: str | None = None  # the type of that block, until it has ended
        self._space = ""  # white space that is dropped if a tool call follows
        self._arguments: list[str] | None = None  # of the newest call
        self._call_index = -1  # of the newest call
        self._finish_reason: FinishReason | None = None
        self._stop_text: str | None = None

    def whole(self, result: ChatResult) -> dict[str, Any]:
        (choice,) = result.choices
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append({**_EMPTY_BLOCKS["thinking"], "thinking": choice.reasoning})
        if choice.content.strip() or (choice.content and not choice.tool_calls):
            content.append({"type": "text", "text": choice.content})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
            for call in choice.tool_calls
        ]
        last_arguments = choice.tool_calls[-1].arguments if choice.tool_calls else None
        stop = _stop(choice.finish_reason, choice.stop_text, last_arguments)
        return {**self._named, "content": content, **stop, "usage": _usage(result.usage)}

    def step(self, step: ChatStep) -> bytes:
        """Return the events of one engine step; those of the first begin the message."""
        events: list[bytes] = []
        if not self._begun:
            self._begun = True
            stop = {"stop_reason": None, "stop_sequence": None}
            message = {**self._named, "content": [], **stop, "usage": _usage(step.usage)}
            events.append(event("message_start", message=message))
        for delta in step.deltas:
            events += self._delta(delta)
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        """Return the events that end the message. Raises `GenerationError` if the answer never finished."""
        if self._finish_reason is None:
            raise GenerationError("The model stopped in the middle of its answer. Send the request again.")
        events: list[bytes] = []
        if self._space and self._arguments is None:
            events += self._add("text", self._space)
        events += self._end_block()
        arguments = None if self._arguments is None else "".join(self._arguments)
        stop = _stop(self._finish_reason, self._stop_text, arguments)
        return b"".join([*events, event("message_delta", delta=stop, usage=_usage(usage)), event("message_stop")])

    def _delta(self, delta: ChatDelta) -> Iterator[bytes]:
        going_on, begun = delta.calls()
        for call in going_on:
            yield from self._call(call)
        if delta.reasoning:
            yield from self._add("thinking", delta.reasoning)
        if delta.content:
            yield from self._text(delta.content)
        for call in begun:
            yield from self._call(call)
        self._finish_reason = delta.finish_reason or self._finish_reason
        self._stop_text = delta.stop_text or self._stop_text

    def _text(self, text: str) -> Iterator[bytes]:
        if self._open != "text":
            text = self._space + text
            self._space = ""
            if not text.strip():
                self._space = text
                return
        yield from self._add("text", text)

    def _call(self, call: ToolCallDelta) -> Iterator[bytes]:
        if call.id is not None:
            self._space = ""
            self._arguments, self._call_index = [], call.index
            yield from self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        elif self._open != "tool_use" or call.index != self._call_index:
            raise GenerationError("The model gave up on this answer. Send the request again.")
        if call.arguments and self._arguments is not None:
            self._arguments.append(call.arguments)
            yield from self._add("tool_use", call.arguments)

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._end_block()
        self._index += 1
        self._open = block["type"]
        yield event("content_block_start", index=self._index, content_block=block)

    def _add(self, kind: str, piece: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._begin(_EMPTY_BLOCKS[kind])
        delta_type, field = _DELTAS[kind]
        yield event("content_block_delta", index=self._index, delta={"type": delta_type, field: piece})

    def _end_block(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open = None
            yield event("content_block_stop", index=self._index)


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the `usage` object; in this API cached tokens do not count as `input_tokens`."""
    cached = usage.cached_tokens or 0
    counts: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


def _stop(finish_reason: FinishReason, stop_text: str | None, last_arguments: str | None) -> dict[str, Any]:
    """Return why it ended. `stop` after a forced call is `tool_use`, unless a stop sequence cut the call short."""
    reason, sequence = _STOP_REASONS[finish_reason], None
    if finish_reason in {"stop", "tool_calls"}:
        if last_arguments is not None and (stop_text is None or _is_json(last_arguments)):
            reason = "tool_use"
        elif stop_text is not None:
            reason, sequence = "stop_sequence", stop_text
    return {"stop_reason": reason, "stop_sequence": sequence}


def _is_json(text: str) -> bool:
    try:
        from_json(text)
    except ValueError:
        return False
    return True


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; of one that was cut off, as much as came, like clients do with a stream."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
