"""`POST /v1/messages`, plain and streamed, and `POST /v1/messages/count_tokens`: chat in another convention.

What a body says is said in the words of a chat body, so that all checks and limits of chat hold here too; errors go
back under the names that the client sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from engine import ChatRequest
from server.api.caller import Caller, ChatCaller, json_response
from server.api.chat_request import FieldNames, TextPart, to_chat_body, to_chat_request
from server.api.messages.answer import MessageAnswer
from server.api.messages.schema import (
    Block,
    CountTokensBody,
    ImageBlock,
    MessagesBody,
    MessageToolChoice,
    SystemTurn,
    ToolResultBlock,
    ToolUseBlock,
)
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute

router = APIRouter(prefix="/v1/messages", tags=["messages"], route_class=StrictRoute)
# Claude Code's first line of `system` differs in every request: no prompt would ever be found in the cache.
_BILLING_LINE = "x-anthropic-billing-header"
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

_Blocks = list[tuple[str, "Block"]]  # each with its path in the client's body


@router.post("", response_class=Response)
async def create_message(body: MessagesBody, caller: ChatCaller) -> Response:
    """Answer a conversation with a message, whole or, with `stream: true`, as server-sent events."""
    chat, names = _to_chat(body, caller)
    chat = replace(chat, top_k=body.top_k)
    return await caller.answer(chat, MessageAnswer(chat), stream=body.stream, naming=names.as_sent())


@router.post("/count_tokens", response_class=Response)
async def count_tokens(body: CountTokensBody, caller: ChatCaller) -> Response:
    """Count the tokens that the same body would have as a prompt, tools and the model's own template included."""
    chat, names = _to_chat(body, caller)
    caller.record.model = chat.model
    with names.as_sent():
        tokens = await until_disconnect(caller.engine.count_tokens(chat), caller.request, caller.drain)
    caller.record.prompt_tokens = tokens
    return json_response({"input_tokens": tokens})


def _to_chat(body: CountTokensBody, caller: Caller) -> tuple[ChatRequest, FieldNames]:
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
        names["response_format"] = "output_format" if body.output_format else "output_config.format"
    if isinstance(body, MessagesBody):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": list(body.stop_sequences),
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
        }
    with names.as_sent():
        chat = to_chat_request(to_chat_body(fields), caller)
    return replace(chat, continue_answer=continues), names


def _tools(body: CountTokensBody) -> dict[str, Any]:
    if not body.tools:
        return {}
    functions = [{"name": it.name, "description": it.description, "parameters": it.input_schema} for it in body.tools]
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": function} for function in functions]}
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
    if not last["content"]:  # only thoughts, which are dropped: there is nothing to go on from
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
    """All instructions, first in the conversation: templates of many models refuse them anywhere else."""
    contents = [body.system, *(turn.content for turn in body.messages if isinstance(turn, SystemTurn))]
    blocks = [placed for content in contents for placed in _placed("system", content)]
    return _text([placed for placed in blocks if not _text([placed]).startswith(_BILLING_LINE)])


def _turns(body: CountTokensBody) -> list[tuple[str, _Blocks]]:
    """Messages of one role in a row are one turn: many templates want the roles to take turns."""
    turns: list[tuple[str, _Blocks]] = []
    for position, message in enumerate(body.messages):
        if isinstance(message, SystemTurn):
            continue
        blocks = _placed(f"messages[{position}].content", message.content)
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    return turns


def _assistant(blocks: _Blocks) -> dict[str, Any]:
    text = _text(blocks)
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()},
        }
        for _, block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text or None, "tool_calls": calls}


def _user(blocks: _Blocks, names: FieldNames, first: int) -> list[dict[str, Any]]:
    """What tools gave back comes first, each in a message of its own; their images join what the user says."""
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
