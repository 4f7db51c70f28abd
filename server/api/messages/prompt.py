"""Says in the words of a chat body what a body of `/v1/messages` says, so that all that holds for chat holds here.

It also knows the way back: which field of the client's an error about the chat body is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import ValidationError

from engine import EngineError
from server.api.chat_schema import ChatCompletionBody, TextPart
from server.api.messages.schema import (
    AssistantTurn,
    Base64Source,
    Block,
    CountTokensBody,
    ImageBlock,
    MessagesBody,
    MessageToolChoice,
    SystemTurn,
    ToolResultBlock,
    ToolUseBlock,
)
from server.errors import ApiError, invalid_body, to_api_error

# Claude Code's first line of `system` differs in every request: no prompt would ever be found in the cache.
_BILLING_LINE = "x-anthropic-billing-header"
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

_Blocks = list[tuple[str, "Block"]]  # each with its path in the client's body


@dataclass(slots=True)
class FieldNames:
    """Paths in the chat body and the client's names for them; what lies below a path goes by its name."""

    sent: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def as_sent(self) -> Iterator[None]:
        """Let failures name the field that the client sent."""
        try:
            yield
        except (ApiError, EngineError) as error:
            raise self.renamed(to_api_error(error)) from error

    def renamed(self, error: ApiError) -> ApiError:
        """Return the same error about the client's field."""
        ours = max((path for path in self.sent if _leads_to(path, error.param)), key=len, default=None)
        if ours is None or error.param is None:
            return error
        theirs = self.sent[ours]
        message = error.message.replace(f"`{error.param}`", f"`{theirs}`").replace(f"`{ours}`", f"`{theirs}`")
        return ApiError(error.status, error.code, message, type=error.type, param=theirs, headers=error.headers)


def _leads_to(path: str, param: str | None) -> bool:
    return param is not None and (param == path or param.startswith((f"{path}.", f"{path}[")))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A translated body. `continues` means that the last message is the beginning of the answer."""

    chat: ChatCompletionBody
    names: FieldNames
    continues: bool


def translate(body: CountTokensBody) -> Prompt:
    """Translate a body, to answer it or to count its tokens. Raises `ApiError` for what chat does not take."""
    names = FieldNames({"stop": "stop_sequences", "reasoning_effort": "output_config.effort"})
    messages, continues = _messages(body, names)
    fields: dict[str, Any] = {"model": body.model, "messages": messages, **_tools(body), **_thinking(body)}
    form = body.output_format or (body.output_config and body.output_config.format)
    if form:
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": form.json_schema},
        }
        names.sent["response_format"] = "output_format" if body.output_format else "output_config.format"
    if isinstance(body, MessagesBody):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": list(body.stop_sequences),
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
        }
    try:
        return Prompt(ChatCompletionBody.model_validate(fields), names, continues)
    except ValidationError as error:
        raise names.renamed(invalid_body(error.errors(include_url=False, include_input=False), fields)) from None


def _tools(body: CountTokensBody) -> dict[str, Any]:
    if not body.tools:
        return {}
    tools = [
        {"name": tool.name, "description": tool.description, "parameters": tool.input_schema} for tool in body.tools
    ]
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": tool} for tool in tools]}
    choice = body.tool_choice
    if isinstance(choice, MessageToolChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        fields["tool_choice"] = _CHOICES[choice.type]
    if choice is not None and choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _thinking(body: CountTokensBody) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = _EFFORTS[body.output_config.effort]
    return fields


def _messages(body: CountTokensBody, names: FieldNames) -> tuple[list[dict[str, Any]], bool]:
    """Return chat messages, and whether the last one is to be continued."""
    messages: list[dict[str, Any]] = []
    system = _system(body)
    if system:
        messages.append({"role": "system", "content": system})
    turns = _turns(body)
    for role, blocks in turns:
        first = len(messages)
        messages += _assistant(blocks) if role == "assistant" else _user(blocks, names, first)
        for position in range(first, len(messages)):
            names.sent[f"messages[{position}]"] = blocks[0][0].partition(".")[0]
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or "tool_calls" in last:
        return messages, False
    if not last["content"]:  # only thoughts, which are dropped: there is nothing to go on from
        return messages[:-1], False
    return messages, True


def _system(body: CountTokensBody) -> str:
    """All instructions, first in the conversation: templates of many models refuse them anywhere else."""
    contents = [body.system or "", *(turn.content for turn in body.messages if isinstance(turn, SystemTurn))]
    texts = (_texts(content) for content in contents)
    return "\n".join(text for some in texts for text in some if text and not text.startswith(_BILLING_LINE))


def _texts(content: str | Sequence[TextPart]) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


def _turns(body: CountTokensBody) -> list[tuple[str, _Blocks]]:
    """Messages of one role in a row are one turn: many templates want the roles to take turns."""
    turns: list[tuple[str, _Blocks]] = []
    for position, message in enumerate(body.messages):
        if isinstance(message, SystemTurn):
            continue
        path = f"messages[{position}].content"
        blocks: _Blocks = (
            [(path, TextPart(type="text", text=message.content))]
            if isinstance(message.content, str)
            else [(f"{path}[{index}]", block) for index, block in enumerate(message.content)]
        )
        if not blocks:
            blocks = [(path, TextPart(type="text", text=""))]
        role = "assistant" if isinstance(message, AssistantTurn) else "user"
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def _assistant(blocks: _Blocks) -> list[dict[str, Any]]:
    text = _joined(block.text for _, block in blocks if isinstance(block, TextPart))
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()},
        }
        for _, block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return [
        {"role": "assistant", "content": text or None, "tool_calls": calls}
        if calls
        else _text_message("assistant", text)
    ]


def _user(blocks: _Blocks, names: FieldNames, first: int) -> list[dict[str, Any]]:
    """What tools gave back comes first, each in a message of its own; their images join what the user says."""
    messages: list[dict[str, Any]] = []
    parts: list[tuple[str, TextPart | ImageBlock]] = []
    for path, block in blocks:
        if isinstance(block, ToolResultBlock):
            messages.append(_result(block))
            inner = block.content if isinstance(block.content, list) else []
            images = ((f"{path}.content[{index}]", part) for index, part in enumerate(inner))
            parts += [(place, part) for place, part in images if isinstance(part, ImageBlock)]
        elif isinstance(block, (TextPart, ImageBlock)):
            parts.append((path, block))
    if not any(isinstance(part, ImageBlock) for _, part in parts):
        text = _joined(part.text for _, part in parts if isinstance(part, TextPart))
        return [*messages, _text_message("user", text)] if parts else messages
    content: list[dict[str, Any]] = []
    for path, part in parts:
        if isinstance(part, ImageBlock):
            names.sent[f"messages[{first + len(messages)}].content[{len(content)}]"] = f"{path}.source"
            content.append({"type": "image_url", "image_url": {"url": _url(part)}})
        elif part.text:
            content.append({"type": "text", "text": part.text})
    return [*messages, {"role": "user", "content": content}]


def _result(block: ToolResultBlock) -> dict[str, Any]:
    content = block.content or ""
    text = content if isinstance(content, str) else _joined(part.text for part in content if isinstance(part, TextPart))
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }


def _url(block: ImageBlock) -> str:
    source = block.source
    if isinstance(source, Base64Source):
        return f"data:{source.media_type};base64,{source.data}"
    return source.url


def _joined(texts: Iterable[str]) -> str:
    return "\n".join(text for text in texts if text)


def _text_message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}
