"""`POST /v1/responses`: the same answers as chat's in OpenAI's newer convention. Stateless: nothing is stored.

A body is translated into a chat body, which checks arguments, schemas and image addresses. Errors name the fields that
the client sent. A whole answer is the response in the last event of a stream. One item is open at a time: text after a
tool call is a new message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BeforeValidator, Discriminator, Field, Tag

from engine import ChatDelta, ChatRequest, ChatStep, GenerationError, TokenLogprob, ToolCallDelta, Usage
from server.api import schema
from server.api.caller import Asker, ChatCaller, checked, checked_line, event, json_response
from server.api.chat_request import (
    ChatCompletionBody,
    FieldNames,
    OtherTool,
    RefusalPart,
    TextFormat,
    callable_or_other,
    to_chat_request,
    tool_call,
)
from server.errors import ApiError
from server.http.bodies import StrictRoute
from server.http.disconnect import until_disconnect
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
# Items of tools that another provider ran itself.
_ELSEWHERE = {
    *("web_search_call", "file_search_call", "code_interpreter_call", "computer_call", "computer_call_output"),
    *("image_generation_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
    *("apply_patch_call", "apply_patch_call_output", "tool_search_call", "tool_search_output", "mcp_call"),
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction", "context_compaction"),
    *("configuration_update", "additional_tools"),
}
_THOUGHTS = ("reasoning_text", "text")
_CUT_OFF = {"length": "max_output_tokens", "content_filter": "content_filter"}
# By the kind of item: the prefix of its id, the name of its text, and its first fields.
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "message": ("msg", "output_text", {"role": "assistant", "content": []}),
    "reasoning": ("rs", "reasoning_text", {"summary": [], "content": []}),
    "function_call": ("fc", "function_call_arguments", {"arguments": ""}),
}

_not_stored = schema.refused("cannot be used: nothing is stored here. Send the whole conversation in `input`")
_by_format = schema.refused("is not supported here: use `text.format`, or `structured_outputs` of chat")
_not_in_background = schema.refused(
    "cannot be true: nothing is stored here, so the answer could not be fetched later", lambda value: value is True
)


def _typed(item: Any) -> Any:
    """Add the type `message` if it is missing. Raises `ValueError` for a reference to a stored item.

    Items of tools that another provider ran are dropped; custom tool calls become function calls.
    """
    if not isinstance(item, dict):
        return item
    match item.get("type"):
        case None:
            return {**item, "type": "message"} if "role" in item else item
        case "item_reference":
            raise ValueError("refers to a stored item, but nothing is stored here: send the item itself")
        case "custom_tool_call":
            given = msgspec.json.encode({"input": item.get("input")}).decode()
            return {**item, "type": "function_call", "arguments": given}
        case "custom_tool_call_output":
            return {**item, "type": "function_call_output"}
        case str(kind) if kind in _ELSEWHERE:
            return {"type": "reasoning"}
    return item


class ResponseText(schema.Strict):
    """Text, of any role."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class ResponseImage(schema.Strict):
    """An image within a user's message, for models with the capability `vision`."""

    type: Literal["input_image"]
    image_url: Annotated[str, Field(min_length=1)]
    """A `data:` URI. Uploaded files (`file_id`) do not exist here."""
    detail: str | None = None


Part = Annotated[ResponseText | RefusalPart | ResponseImage, Field(discriminator="type")]
_Content = Annotated[str | Annotated[list[Part], Field(max_length=1024)], schema.text_or_array()]


class MessageItem(schema.Strict):
    """A message. `developer` means the same as `system`."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content


class FunctionCallItem(schema.Strict):
    """An earlier call that the model made; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: schema.ShortText
    name: schema.ShortText
    namespace: schema.ShortText | None = None
    arguments: str


class FunctionCallOutputItem(schema.Strict):
    """The result of the call `call_id`."""

    type: Literal["function_call_output"]
    call_id: schema.ShortText
    output: _Content


class ReasoningItem(schema.Strict):
    """Earlier reasoning of the model, like `reasoning_content` of chat. Encrypted reasoning is dropped."""

    type: Literal["reasoning"]
    content: Any = None
    """Parts of the type `reasoning_text`. Others are dropped."""

    def texts(self) -> list[str]:
        parts = self.content if isinstance(self.content, list) else []
        texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in _THOUGHTS]
        return [text for text in texts if isinstance(text, str)]


Item = Annotated[
    Annotated[MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem, Field(discriminator="type")],
    BeforeValidator(_typed),
]
_Items = Annotated[list[Item], Field(min_length=1, max_length=schema.MAX_MESSAGES)]


class FunctionTool(schema.Strict):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


_Function = Annotated[
    Annotated[FunctionTool, Tag("callable")] | Annotated[OtherTool, Tag("other")],
    Discriminator(callable_or_other("function")),
]


class NamespaceTool(schema.Strict):
    """Functions of one server, as Codex offers those of MCP. The model sees `namespace__name`."""

    type: Literal["namespace"]
    name: schema.FunctionName
    tools: Annotated[list[_Function], Field(max_length=schema.MOST_TOOLS, default_factory=list)]


_Tool = Annotated[
    Annotated[FunctionTool, Tag("callable")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(callable_or_other("function", "namespace")),
]


class NamedTool(schema.Strict):
    """Makes the model call this function."""

    type: Literal["function"]
    name: str


class ResponseSchema(schema.Strict):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    name: str
    json_schema: Annotated[Any, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextOptions(schema.Strict):
    """The format of the answer's text. `verbosity` is accepted and has no effect."""

    format: Annotated[TextFormat | ResponseSchema, Field(discriminator="type")] | None = None


class ReasoningOptions(schema.Strict):
    """How much the model reasons, if it does. `summary` has no effect: reasoning is returned as it is."""

    effort: schema.Effort | None = None


class ResponseBody(schema.ModelBody):
    """The body of `POST /v1/responses`. Nothing of it is stored, whatever `store` says."""

    input: Annotated[str | _Items, schema.text_or_array()]
    """A user's message, or the whole conversation as items."""
    instructions: str | None = None
    """A system message in front of everything."""
    max_output_tokens: schema.PositiveInt | None = None
    """Upper bound on generated tokens, reasoning included. Default: as many as the model allows."""
    temperature: schema.Temperature | None = None
    top_p: schema.TopP | None = None
    tools: Annotated[list[_Tool], Field(max_length=schema.MOST_TOOLS)] | None = None
    """Functions, alone or in a `namespace`. Others are left out, and the header `x-hearth-ignored` names them."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    """`message.output_text.logprobs` adds probabilities; the others have no effect."""
    top_logprobs: schema.TopLogprobs | None = None
    stream: bool | None = None
    metadata: schema.Labels | None = None
    """Comes back with the answer."""
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """Accepted; a conversation that is too long is always refused, never cut."""

    structured_outputs: Annotated[Any, BeforeValidator(_by_format)] = None
    guided_json: Annotated[Any, BeforeValidator(_by_format)] = None
    guided_regex: Annotated[Any, BeforeValidator(_by_format)] = None
    guided_choice: Annotated[Any, BeforeValidator(_by_format)] = None
    guided_grammar: Annotated[Any, BeforeValidator(_by_format)] = None
    previous_response_id: Annotated[Any, BeforeValidator(_not_stored)] = None
    conversation: Annotated[Any, BeforeValidator(_not_stored)] = None
    prompt: Annotated[Any, BeforeValidator(_not_stored)] = None
    background: Annotated[bool | None, BeforeValidator(_not_in_background)] = None


@router.post("/responses", response_class=Response)
async def create_response(body: ResponseBody, caller: ChatCaller) -> Response:
    """Answer a conversation of items, whole or, with `stream: true`, as typed events. Nothing is stored."""
    answer, events = _asked(body, caller)
    caller.record.stream = bool(body.stream)
    if body.stream:
        # Codex shortens the conversation after this event only, not after a 400
        return caller.streamed(events, failure=answer.failed, always_event=_is_too_long)
    return json_response(await until_disconnect(_whole(answer, events), caller.request))


def _is_too_long(error: ApiError) -> bool:
    """Whether the conversation is too long, not the requested answer."""
    return error.code == "context_length_exceeded" and error.param != "max_output_tokens"


async def answer_line(item: Any, asker: Asker) -> dict[str, Any]:
    return await _whole(*_asked(checked_line(ResponseBody, item), asker))


def _asked(body: ResponseBody, asker: Asker) -> tuple[ResponseAnswer, TokenEvents]:
    names = FieldNames(_NAMES, with_rest=True)
    fields = _chat_fields(body, names)
    for place, _, tool in _placed_tools(body):
        if isinstance(tool, OtherTool):
            asker.record.ignored(place, tool.word)
    with names.as_sent():
        chat = to_chat_request(checked(ChatCompletionBody, fields), asker)
    asker.record.model = chat.model
    answer = ResponseAnswer(body, chat, created=int(time.time()))
    return answer, TokenEvents(lambda: asker.engine.tokens(chat), answer, asker.record, names.as_sent())


@router.api_route("/responses/{stored:path}", methods=["DELETE", "GET", "POST"], include_in_schema=False)
async def no_stored_response(_: ChatCaller) -> None:
    """Answer 404 and say why."""
    sentence = "Responses are not stored here. Send the whole conversation in `input` of POST /v1/responses every time."
    raise ApiError(404, "not_found", sentence)


async def _whole(answer: ResponseAnswer, events: TokenEvents) -> dict[str, Any]:
    """Return the whole answer, made by the events of a stream, so that both agree. Raises what they raise."""
    async for _ in events:
        pass
    if answer.response is None:
        raise GenerationError("The model gave no answer. Send the request again.")
    return answer.response


def _chat_fields(body: ResponseBody, names: FieldNames) -> dict[str, Any]:
    """Return the fields of an equivalent chat body. Raises `ApiError` for what chat messages cannot have."""
    placed = [
        (place, namespace, tool) for place, namespace, tool in _placed_tools(body) if isinstance(tool, FunctionTool)
    ]
    names |= {f"tools[{index}].function": place for index, (place, _, _) in enumerate(placed)}
    tools = [_tool(namespace, tool) for _, namespace, tool in placed]
    return {
        "model": body.model,
        "messages": _messages(body, names),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": tools,
        "tool_choice": _tool_choice(body, placed),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "logprobs": bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ()),
        "top_logprobs": body.top_logprobs,
    }


def _placed_tools(body: ResponseBody) -> Iterator[tuple[str, str | None, FunctionTool | OtherTool]]:
    """Yield all tools, each with its path in the body and its namespace."""
    for index, tool in enumerate(body.tools or ()):
        if isinstance(tool, NamespaceTool):
            yield from ((f"tools[{index}].tools[{at}]", tool.name, one) for at, one in enumerate(tool.tools))
        else:
            yield f"tools[{index}]", None, tool


def _tool_choice(body: ResponseBody, placed: Sequence[tuple[str, str | None, FunctionTool]]) -> Any:
    """Return chat's `tool_choice`. A function may be named without its namespace if its name is unique."""
    choice = body.tool_choice
    if not isinstance(choice, NamedTool):
        return choice
    meant = {_known_as(namespace, tool.name) for _, namespace, tool in placed if tool.name == choice.name}
    name = meant.pop() if len(meant) == 1 else choice.name
    return {"type": "function", "function": {"name": name}}


def _known_as(namespace: str | None, name: str) -> str:
    """Return a function's name for the model, the same as in vLLM's server."""
    return name if namespace is None else f"{namespace}__{name}"


def _tool(namespace: str | None, tool: FunctionTool) -> dict[str, Any]:
    said = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": {**said, "name": _known_as(namespace, tool.name)}}


def _response_format(body: ResponseBody) -> Any:
    form = body.text.format if body.text else None
    if not isinstance(form, ResponseSchema):
        return None if form is None else {"type": form.type}
    return {"type": "json_schema", "json_schema": form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)}


def _messages(body: ResponseBody, names: FieldNames) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []  # before the next message or call of the model
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
            where = f"{place}.output"
            if isinstance(item.output, str) or not _has_image(item.output):
                content: Any = _text(item.output, where)
            else:
                content = _parts(item.output, where, path, names)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            names |= {path: place, f"{path}.content": where, f"{path}.tool_call_id": f"{place}.call_id"}
        else:
            thoughts += item.texts()
            continue
        if thoughts and messages[-1]["role"] == "assistant":
            before = messages[-1].get("reasoning_content")
            messages[-1]["reasoning_content"] = "\n".join([*([before] if before else []), *thoughts])
        thoughts = []
    if not messages:
        raise ApiError(400, "invalid_value", "`input` must hold at least one message.", param="input")
    return messages


def _placed_items(body: ResponseBody) -> Iterator[tuple[str, Item]]:
    """Yield all items, `instructions` first, each with its path in the body."""
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
    content = item.content
    if isinstance(content, str) or (len(content) == 1 and not _has_image(content)):
        return {"role": "user", "content": _text(content, where)}  # some templates take strings only
    if not content:
        raise ApiError(400, "invalid_value", f"`{where}` must have at least 1 item.", param=where)
    return {"role": "user", "content": _parts(content, where, path, names)}


def _has_image(content: list[Part]) -> bool:
    return any(isinstance(part, ResponseImage) for part in content)


def _parts(content: list[Part], where: str, path: str, names: FieldNames) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if isinstance(part, ResponseImage):
            names[f"{path}.content[{index}].image_url.url"] = f"{where}[{index}].image_url"
            parts.append({"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}})
        else:
            parts.append({"type": "text", "text": part.text})
    return parts


def _add_call(messages: list[dict[str, Any]], call: FunctionCallItem, place: str, names: FieldNames) -> None:
    """Add a call to the assistant's message before it; without one, to a new message."""
    if not messages or messages[-1]["role"] != "assistant":
        names[f"messages[{len(messages)}]"] = place
        messages.append({"role": "assistant", "content": None})
    calls = messages[-1].setdefault("tool_calls", [])
    names[f"messages[{len(messages) - 1}].tool_calls[{len(calls)}].function"] = place
    calls.append(tool_call(call.call_id, _known_as(call.namespace, call.name), call.arguments))


def _text(content: str | list[Part], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, ResponseImage):
            place = f"{where}[{index}]"
            raise ApiError(
                400, "invalid_value", f"`{place}` must be text: only users and tools show images.", param=place
            )
        texts.append(part.text)
    return "".join(texts)


@dataclass(slots=True)
class _Item:
    """One item of the output while it is written. `place` has the fields of its events that locate it."""

    kind: str
    value: dict[str, Any]
    place: dict[str, Any]
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        part = {"type": _KINDS[self.kind][1], "text": "".join(self.pieces)}
        return {**part, "annotations": [], "logprobs": self.logprobs} if self.kind == "message" else part

    def fill(self, status: str) -> None:
        filled = {"arguments": "".join(self.pieces)} if self.kind == "function_call" else {"content": [self.part()]}
        self.value |= {"status": status, **filled}


class ResponseAnswer:
    """Turns engine steps into events, and keeps the items so far. `response` is set once `end` was called."""

    def __init__(self, body: ResponseBody, asked: ChatRequest, *, created: int) -> None:
        request_id = asked.request_id
        named = {"id": f"resp_{request_id}", "object": "response", "created_at": created, "model": asked.model}
        self._as_asked = named | _as_asked(body)
        self._request_id = request_id
        self._namespaced = {
            _known_as(namespace, tool.name): {"name": tool.name, "namespace": namespace}
            for _, namespace, tool in _placed_tools(body)
            if namespace is not None and isinstance(tool, FunctionTool)
        }
        self._sequence_number = 0
        self._items: list[_Item] = []
        self._calls = -1  # index of the newest call
        self._space = ""  # white space that is dropped if a call follows
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is still held back
        self._usage: Usage | None = None
        self._cut_off: str | None = None  # why the answer is incomplete, if it is
        self.response: dict[str, Any] | None = None

    def start(self) -> bytes:
        created = self._state("in_progress")
        return self._event("response.created", response=created) + self._event("response.in_progress", response=created)

    def step(self, step: ChatStep) -> bytes:
        self._usage = step.usage
        return b"".join(self._delta(delta) for delta in step.deltas)

    def end(self, usage: Usage) -> bytes:
        """Return the events that close the open item and the response."""
        self._usage = usage
        opened = b"" if self._items else self._open("message")
        if self._space and self._calls < 0:
            opened += self._switch("message") + self._add_text(self._space)
        status = "completed" if self._cut_off is None else "incomplete"
        closed = self._close(status)
        self.response = self._state(status)
        return opened + closed + self._event(f"response.{status}", response=self.response)

    def failed(self, error: ApiError) -> bytes:
        opened = b"" if self._sequence_number else self.start()
        if self._items:
            self._items[-1].fill("incomplete")
        return opened + self._event("response.failed", response=self._state("failed", error))

    def _state(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """Return the response object as it is now. Its `error` has the shape of all our errors."""
        return {
            **self._as_asked,
            "status": status,
            "error": None if error is None else error.body(),
            "incomplete_details": {"reason": self._cut_off} if status == "incomplete" else None,
            "output": [item.value for item in self._items],
            "usage": None if self._usage is None else _usage(self._usage),
        }

    def _delta(self, delta: ChatDelta) -> bytes:
        self._cut_off = _CUT_OFF.get(delta.finish_reason or "", self._cut_off)
        going_on, begun = delta.calls()
        parts = [self._call(piece) for piece in going_on]
        logprobs = [_logprob(entry) for entry in delta.logprobs or ()]
        if delta.reasoning:
            parts += [self._switch("reasoning"), self._add_text(delta.reasoning)]
        text = self._space + delta.content
        if text.strip() or (text and self._items and self._items[-1].kind == "message"):
            self._space = ""
            parts.append(self._switch("message"))
            self._logprobs += logprobs
            parts.append(self._add_text(text))
        else:
            self._space = text
            self._logprobs += logprobs
        parts += [self._call(piece) for piece in begun]
        return b"".join(parts)

    def _call(self, piece: ToolCallDelta) -> bytes:
        parts = []
        if piece.index > self._calls:
            self._calls = piece.index
            self._space, self._logprobs = "", []  # of what stood before the call
            named = self._namespaced.get(piece.name or "", {"name": piece.name})
            parts = [self._close("completed"), self._open("function_call", call_id=piece.id, **named)]
        elif piece.index < self._calls or self._items[-1].kind != "function_call":
            raise GenerationError("The model gave up on this answer. Send the request again.")
        if piece.arguments:
            parts.append(self._add_text(piece.arguments))
        return b"".join(parts)

    def _switch(self, kind: str) -> bytes:
        if self._items and self._items[-1].kind == kind:
            return b""
        return self._close("completed") + self._open(kind)

    def _open(self, kind: str, **fields: Any) -> bytes:
        index, (prefix, _, empty) = len(self._items), _KINDS[kind]
        id_ = f"{prefix}_{self._request_id}_{index}"
        item = _Item(
            kind,
            {"id": id_, "type": kind, "status": "in_progress", **fields, **empty},
            {"item_id": id_, "output_index": index},
        )
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=index, item=item.value)
        if kind == "function_call":
            return added
        item.place["content_index"] = 0
        return added + self._event("response.content_part.added", **item.place, part=item.part())

    def _add_text(self, text: str) -> bytes:
        item = self._items[-1]
        item.pieces.append(text)
        fields: dict[str, Any] = {"delta": text}
        if item.kind == "message":
            fields["logprobs"], self._logprobs = self._logprobs, []
            item.logprobs += fields["logprobs"]
        return self._event(f"response.{_KINDS[item.kind][1]}.delta", **item.place, **fields)

    def _close(self, status: str) -> bytes:
        if not self._items:
            return b""
        item = self._items[-1]
        if item.kind == "message":
            item.logprobs += self._logprobs
        self._logprobs = []
        item.fill(status)
        done, place, value = f"response.{_KINDS[item.kind][1]}.done", item.place, item.value
        if item.kind == "function_call":
            events = self._event(done, **place, name=value["name"], arguments=value["arguments"])
        else:
            part = item.part()
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = self._event(done, **place, **said) + self._event("response.content_part.done", **place, part=part)
        return events + self._event("response.output_item.done", output_index=place["output_index"], item=value)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = event(kind, sequence_number=self._sequence_number, **fields)
        self._sequence_number += 1
        return data


def _as_asked(body: ResponseBody) -> dict[str, Any]:
    tool_choice = body.tool_choice or "auto"
    form = body.text.format if body.text else None
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
        "tool_choice": tool_choice if isinstance(tool_choice, str) else tool_choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or () if not isinstance(tool, OtherTool)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {**_token(entry), "top_logprobs": [_token(top) for top in entry.top]}


def _token(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes or ()}
