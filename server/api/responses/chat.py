"""From a Responses body to a chat body and back: the same conversation, and errors under the names that were sent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from engine import RequestError
from server.api.chat_schema import ChatCompletionBody
from server.api.responses.schema import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    MessageItem,
    NamedTool,
    Part,
    RefusalPart,
    ResponseBody,
    ResponseImage,
    ResponseSchema,
)
from server.errors import ApiError, invalid_body, to_api_error

# Chat's name of a field -> the name here; the first that fits counts. Messages are looked up one by one.
_NAMES = (
    (re.compile(r"^messages$"), "input"),
    (re.compile(r"^max_(completion_)?tokens"), "max_output_tokens"),
    (re.compile(r"^response_format\.json_schema"), "text.format"),
    (re.compile(r"^response_format"), "text.format"),
    (re.compile(r"^reasoning_effort"), "reasoning.effort"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"^tool_choice\.function"), "tool_choice"),
)
_MESSAGE = re.compile(r"^messages\[(\d+)\](?:\.tool_calls\[(\d+)\]\.function)?")


@dataclass(slots=True)
class Conversation:
    """The chat messages of a Responses body, and where in the body each of them came from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)

    def add(self, place: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.places.append(place)
        self.calls.append([])

    def add_system(self, place: str, text: str) -> None:
        """Join what stands in front into one message: many templates take a single one, at the very start."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.add(place, {"role": "system", "content": text})

    def add_call(self, place: str, call: FunctionCallItem) -> None:
        """Calls belong to the assistant's message before them; in chat they are one message."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add(place, {"role": "assistant", "content": None})
        function = {"name": call.name, "arguments": call.arguments}
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call.call_id, "type": "function", "function": function})
        self.calls[-1].append(place)

    def name(self, param: str) -> str:
        """Return the path in the Responses body that chat calls `param`."""
        if (found := _MESSAGE.match(param)) and int(found[1]) < len(self.places):
            position = int(found[1])
            if found[2] is not None:
                return self.calls[position][int(found[2])] + param[found.end() :]
            return self._in_item(self.places[position], position, param[found.end() :])
        for pattern, name in _NAMES:
            if pattern.match(param):
                return pattern.sub(name, param)
        return param

    def _in_item(self, place: str, position: int, rest: str) -> str:
        if not place.endswith("]"):  # the whole input is one text
            return place
        if self.messages[position]["role"] == "tool":
            rest = rest.replace(".content", ".output").replace(".tool_call_id", ".call_id")
        return place + rest.replace(".image_url.url", ".image_url")


@contextmanager
def named_as_sent(conversation: Conversation) -> Iterator[None]:
    """Errors of chat, and of the engine, leave with the names of the Responses body in path and sentence."""
    try:
        yield
    except (ApiError, RequestError) as error:
        known = to_api_error(error)
        if known.param is None:
            raise
        name = conversation.name(known.param)
        sentence = known.message.replace(f"`{known.param}`", f"`{name}`")
        raise ApiError(
            known.status, known.code, sentence, type=known.type, param=name, headers=known.headers
        ) from error


def to_conversation(body: ResponseBody) -> Conversation:
    """Put the items into chat messages. Raises `ApiError` for what no chat message can hold."""
    conversation = Conversation()
    if body.instructions:
        conversation.add("instructions", {"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        conversation.add("input", {"role": "user", "content": body.input})
        return conversation
    for position, item in enumerate(body.input):
        place = f"input[{position}]"
        if isinstance(item, MessageItem):
            _add_message(conversation, place, item)
        elif isinstance(item, FunctionCallItem):
            conversation.add_call(place, item)
        elif isinstance(item, FunctionCallOutputItem):
            content = _text(item.output, f"{place}.output")
            conversation.add(place, {"role": "tool", "tool_call_id": item.call_id, "content": content})
    if not conversation.messages:
        raise ApiError(400, "invalid_value", "`input` must hold at least one message.", param="input")
    return conversation


def to_chat_body(body: ResponseBody, conversation: Conversation) -> ChatCompletionBody:
    """Return the chat body that asks for the same. Raises `ApiError`, under chat's names."""
    chat = {
        "model": body.model,
        "messages": conversation.messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs,
    }
    try:
        return ChatCompletionBody.model_validate(chat)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False, include_input=False), chat) from None


def _add_message(conversation: Conversation, place: str, item: MessageItem) -> None:
    where = f"{place}.content"
    if item.role == "user":
        conversation.add(place, {"role": "user", "content": _parts(item.content, where)})
    elif item.role == "assistant":
        conversation.add(place, {"role": "assistant", "content": _text(item.content, where)})
    else:
        conversation.add_system(place, _text(item.content, where))


def _parts(content: str | list[Part], where: str) -> str | list[dict[str, Any]]:
    """A single text is sent on as a string: some templates read nothing else."""
    if isinstance(content, str) or (len(content) == 1 and not isinstance(content[0], ResponseImage)):
        return _text(content, where)
    if not content:
        raise ApiError(400, "invalid_value", f"`{where}` must have at least 1 items.", param=where)
    return [
        {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
        if isinstance(part, ResponseImage)
        else {"type": "text", "text": _text_of(part)}
        for part in content
    ]


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


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tool_choice(body: ResponseBody) -> Any:
    if isinstance(body.tool_choice, NamedTool):
        return {"type": "function", "function": {"name": body.tool_choice.name}}
    return body.tool_choice


def _response_format(body: ResponseBody) -> Any:
    form = body.text.format if body.text else None
    if not isinstance(form, ResponseSchema):
        return None if form is None else {"type": form.type}
    schema = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}
