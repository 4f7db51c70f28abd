"""`POST /v1/responses`: the same answers as chat's in OpenAI's newer convention. Stateless: nothing is stored.

What a body says is said in the words of a chat body; errors go back under the names that the client sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from engine import GenerationError
from server.api.caller import ChatCaller, json_response
from server.api.chat_request import FieldNames, to_chat_body, to_chat_request
from server.api.responses.answer import ResponseAnswer
from server.api.responses.schema import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    NamedTool,
    Part,
    RefusalPart,
    ResponseBody,
    ResponseImage,
    ResponseSchema,
)
from server.errors import ApiError
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute
from server.http.streaming import TokenEvents

router = APIRouter(prefix="/v1", tags=["chat"], route_class=StrictRoute)
# Chat's name of a field -> the name here. Those of messages and tools are added as they are translated.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
}


@router.post("/responses", response_class=Response)
async def create_response(body: ResponseBody, caller: ChatCaller) -> Response:
    """Answer a conversation of items, whole or, with `stream: true`, as typed events. Nothing is stored."""
    names = FieldNames(_NAMES, with_rest=True)
    fields = _chat_fields(body, names)
    with names.as_sent():
        chat = to_chat_request(to_chat_body(fields), caller)
    caller.record.model, caller.record.stream = chat.model, bool(body.stream)
    answer = ResponseAnswer(body, request_id=chat.request_id, created=int(time.time()))
    events = TokenEvents(
        lambda: caller.engine.tokens(chat), answer, caller.record, head=answer.start(), naming=names.as_sent()
    )
    if body.stream:
        return caller.streamed(events, failure=answer.failed)
    await until_disconnect(_read(events), caller.request, caller.drain)
    if answer.response is None:
        raise GenerationError("The model gave no answer. Send the request again.")
    return json_response(answer.response)


async def _read(events: TokenEvents) -> None:
    """Run to the end: plain and streamed answers agree because they are made by the same events."""
    async with aclosing(aiter(events)) as pieces:
        async for _ in pieces:
            pass


def _chat_fields(body: ResponseBody, names: FieldNames) -> dict[str, Any]:
    """Return the fields of the chat body that asks for the same. Raises `ApiError` for what no chat message holds."""
    names |= {f"tools[{index}].function": f"tools[{index}]" for index in range(len(body.tools or ()))}
    choice = body.tool_choice
    return {
        "model": body.model,
        "messages": _messages(body, names),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools or ()
        ]
        or None,
        "tool_choice": (
            {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice
        ),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs,
    }


def _response_format(body: ResponseBody) -> Any:
    form = body.text.format if body.text else None
    if not isinstance(form, ResponseSchema):
        return None if form is None else {"type": form.type}
    schema = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}


def _messages(body: ResponseBody, names: FieldNames) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for place, item in _placed_items(body):
        path = f"messages[{len(messages)}]"
        if isinstance(item, MessageItem):
            message = _message(item, place, path, names)
            if message["role"] == "system" and [earlier["role"] for earlier in messages] == ["system"]:
                messages[0]["content"] += f"\n\n{message['content']}"  # many templates take one, at the very start
            else:
                messages.append(message)
                names |= {path: place}
        elif isinstance(item, FunctionCallItem):
            _add_call(messages, item, place, names)
        elif isinstance(item, FunctionCallOutputItem):
            content = _text(item.output, f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            names |= {path: place, f"{path}.content": f"{place}.output", f"{path}.tool_call_id": f"{place}.call_id"}
    if not messages:
        raise ApiError(400, "invalid_value", "`input` must hold at least one message.", param="input")
    return messages


def _placed_items(body: ResponseBody) -> Iterator[tuple[str, Item]]:
    """Yield all that is said, each with its place in the body."""
    if body.instructions:
        yield "instructions", MessageItem(type="message", role="system", content=body.instructions)
    if isinstance(body.input, str):
        yield "input", MessageItem(type="message", role="user", content=body.input)
    else:
        yield from ((f"input[{position}]", item) for position, item in enumerate(body.input))


def _message(item: MessageItem, place: str, path: str, names: FieldNames) -> dict[str, Any]:
    where = f"{place}.content" if place.endswith("]") else place
    names[f"{path}.content"] = where
    if item.role != "user":
        role = "assistant" if item.role == "assistant" else "system"
        return {"role": role, "content": _text(item.content, where)}
    if isinstance(item.content, str) or (len(item.content) == 1 and not isinstance(item.content[0], ResponseImage)):
        return {"role": "user", "content": _text(item.content, where)}  # some templates read nothing else
    if not item.content:
        raise ApiError(400, "invalid_value", f"`{where}` must have at least 1 items.", param=where)
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(item.content):
        if isinstance(part, ResponseImage):
            names[f"{path}.content[{index}].image_url.url"] = f"{where}[{index}].image_url"
            parts.append({"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}})
        else:
            parts.append({"type": "text", "text": _text_of(part)})
    return {"role": "user", "content": parts}


def _add_call(messages: list[dict[str, Any]], call: FunctionCallItem, place: str, names: FieldNames) -> None:
    """Calls belong to the assistant's message before them; in chat they are one message."""
    if not messages or messages[-1]["role"] != "assistant":
        names[f"messages[{len(messages)}]"] = place
        messages.append({"role": "assistant", "content": None})
    calls = messages[-1].setdefault("tool_calls", [])
    names[f"messages[{len(messages) - 1}].tool_calls[{len(calls)}].function"] = place
    function = {"name": call.name, "arguments": call.arguments}
    calls.append({"id": call.call_id, "type": "function", "function": function})


def _text(content: str | list[Part], where: str) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if isinstance(part, ResponseImage):
            place = f"{where}[{index}]"
            raise ApiError(400, "invalid_value", f"`{place}` must be text: only users show images.", param=place)
    return "".join(_text_of(part) for part in content)


def _text_of(part: Any) -> str:
    text: str = part.refusal if isinstance(part, RefusalPart) else part.text
    return text
