"""The body of a chat request, checked field by field, and its translation for the engine. All chat APIs use it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from engine import ChatRequest, EngineError
from server.api import schema as shared
from server.api.caller import Asker
from server.api.json_schema import object_schema, plain_pattern, sent_schema
from server.errors import ApiError, to_api_error
from server.http.bodies import parse_strict_json
from server.validation import FieldError

_KINDS = ("json", "json_object", "choice", "regex")
_no_option = shared.refused("is not supported: leave it out", bool)
# After some hundred tokens an ambiguous grammar (`root ::= root root | "a"`) takes xgrammar a second per token, in the
# engine, which delays all requests. Structural tags may contain such grammars.
_no_grammar = shared.refused("is not supported, since it could hold up other answers: use `regex`, `choice` or `json`")
_no_tag = shared.refused("is not supported, since it could hold up other answers: use `json`, or `tools` for calls")


def _token_biases(value: Any) -> Any:
    """Check all entries together, so that no error names a key: the client chose it."""
    known = isinstance(value, dict) and len(value) <= 1024
    if not known or not all(
        re.fullmatch(r"[0-9]{1,9}", token) and type(bias) in {int, float} and -100 <= bias <= 100
        for token, bias in value.items()
    ):
        raise ValueError("must map at most 1024 token ids (digits) to numbers from -100 to 100")
    return value


def _template_switches(value: Any) -> Any:
    known = isinstance(value, dict) and set(value) <= {"enable_thinking", "preserve_thinking"}
    if not known or not all(isinstance(switch, bool) for switch in value.values()):
        raise ValueError("may hold `enable_thinking` and `preserve_thinking` (true or false) only")
    return value


def _call_arguments(arguments: str) -> str:
    """Check the arguments of a call. Text that is not JSON passes: an unfinished call, later read as no arguments.

    JSON that only a lenient parser reads (lone surrogates, NaN, thousands of levels or digits) is refused.
    """
    try:
        json.loads(arguments)
        parse_strict_json(arguments.encode())
    except json.JSONDecodeError:
        return arguments
    except (ValueError, RecursionError, ApiError) as error:
        sentence = "must be JSON text without NaN, lone surrogates, huge numbers or deep nesting"
        raise ValueError(sentence) from error
    return arguments


class TextPart(shared.Strict):
    type: Literal["text"]
    text: str


class ImageUrl(shared.Strict):
    """An image; `url` is a `data:` URI."""

    url: Annotated[str, Field(min_length=1)]
    detail: str | None = None


class ImagePart(shared.Strict):
    """An image within a user's message or a tool's answer, for models with the capability `vision`."""

    type: Literal["image_url"]
    image_url: ImageUrl


_Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
_Count = Field(min_length=1, max_length=1024)
_TextContent = Annotated[str | Annotated[list[TextPart], _Count], shared.text_or_array(" of parts")]
_SeenContent = Annotated[str | Annotated[list[_Part], _Count], shared.text_or_array(" of parts")]


class RefusalPart(shared.Strict):
    """A model's refusal to answer; treated as text."""

    type: Literal["refusal"]
    text: Annotated[str, Field(alias="refusal")]


class ThoughtPart(shared.Strict):
    """Reasoning that some front ends keep in `content`. Dropped."""

    type: Literal["thinking", "reasoning", "redacted_thinking"]


def _said(content: str | list[TextPart | RefusalPart | ThoughtPart]) -> str | list[TextPart] | None:
    if isinstance(content, str):
        return content
    said = [part for part in content if not isinstance(part, ThoughtPart)]
    return [TextPart(type="text", text=part.text) for part in said] or None


_SaidPart = Annotated[TextPart | RefusalPart | ThoughtPart, Field(discriminator="type")]
_SaidContent = Annotated[
    str | Annotated[list[_SaidPart], Field(max_length=1024)], shared.text_or_array(" of parts"), AfterValidator(_said)
]


class SystemMessage(shared.Strict):
    """Instructions; `developer` means the same as `system`."""

    role: Literal["system", "developer"]
    content: _TextContent


class UserMessage(shared.Strict):
    """A user's message, with images for models with the capability `vision`."""

    role: Literal["user"]
    content: _SeenContent


class CalledFunction(shared.Strict):
    """The function of an earlier tool call; `arguments` is JSON text."""

    name: shared.ShortText
    arguments: Annotated[str, Field(max_length=2**20), AfterValidator(_call_arguments)]


class ToolCallMessagePart(shared.Strict):
    id: shared.ShortText
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(shared.Strict):
    """An earlier answer of the model. `content` may be null when there are `tool_calls`."""

    role: Literal["assistant"]
    content: _SaidContent | None = None
    reasoning_content: str | None = None
    """Its reasoning. Models read it again if their templates keep it, most until the next question."""
    reasoning: Any = None
    """The same, if it is a string."""
    tool_calls: Annotated[list[ToolCallMessagePart], Field(max_length=128)] | None = None


class ToolMessage(shared.Strict):
    """A tool's answer to the call `tool_call_id`. Its images are shown to the model after the answers of all tools."""

    role: Literal["tool"]
    content: Annotated[_SeenContent, BeforeValidator(lambda content: "" if content in (None, []) else content)]
    tool_call_id: shared.ShortText


_Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionDefinition(shared.Strict):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: shared.FunctionName
    description: str | None = None
    strict: bool | None = None
    parameters: Annotated[dict[str, Any], BeforeValidator(sent_schema)] | None = None


class ToolDefinition(shared.Strict):
    type: Literal["function"]
    function: FunctionDefinition


# Tools that models here cannot call are left out of a request, not refused, since agents offer them by default. The
# answer's header `x-hearth-ignored` and the access line name them by these words, never as the client sent them.
_KNOWN_TOOLS = frozenset(
    {
        *("advisor", "apply_patch", "bash", "code_execution", "code_interpreter", "computer", "computer_use"),
        *("computer_use_preview", "custom", "file_search", "image_generation", "local_shell", "mcp", "mcp_toolset"),
        *("memory", "namespace", "shell", "text_editor", "tool_search", "tool_search_tool_bm25"),
        *("tool_search_tool_regex", "web_fetch", "web_search", "web_search_preview"),
    }
)
_VERSION = re.compile(r"(_\d{8}|_\d{4}_\d{2}_\d{2})$")


class OtherTool(shared.Strict):
    """A tool that runs elsewhere, or is not a function. It is left out."""

    type: str

    @property
    def word(self) -> str:
        """Its type without a version, if it is a known one; else `other`."""
        word = _VERSION.sub("", self.type[:64])
        return word if word in _KNOWN_TOOLS else "other"


def callable_or_other(callable_type: str, *more: str) -> Callable[[Any], str]:
    """Return a discriminator with the tags `callable` (also for a value without a type) and `other`.

    The types in `more` are tags of their own.
    """

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if not isinstance(kind, str) or kind == callable_type:
            return "callable"
        return kind if kind in more else "other"

    return tag


_Tool = Annotated[
    Annotated[ToolDefinition, Tag("callable")] | Annotated[OtherTool, Tag("other")],
    Discriminator(callable_or_other("function")),
]


class NamedFunction(shared.Strict):
    name: str


class NamedToolChoice(shared.Strict):
    """Makes the model call this function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchemaFormat(shared.Strict):
    """A named JSON schema that the answer has to satisfy."""

    name: shared.FunctionName
    description: str | None = None
    strict: bool | None = None
    json_schema: Annotated[dict[str, Any], BeforeValidator(sent_schema), Field(alias="schema")]


class TextFormat(shared.Strict):
    """Free text, the default; or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(shared.Strict):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


class StreamOptions(shared.Strict):
    """Only together with `stream: true`."""

    include_usage: bool | None = None
    """Adds one last chunk with `usage` and no choices."""


_Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
# Most models know three efforts, and refuse or misread others.
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
_AS_SENT = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed", "presence_penalty"),
    *("frequency_penalty", "logit_bias"),
)


def _json(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = parse_strict_json(value.encode())
        except ApiError as error:
            raise ValueError("must be a JSON schema, an object or the JSON text of one") from error
    return None if value is None else object_schema(value, otherwise="send it as `response_format` without `strict`")


_Choice = Annotated[str, Field(min_length=1, max_length=1024)]


class StructuredOutputs(shared.Strict):
    """What the answer has to satisfy: exactly one of these constraints."""

    json_: Annotated[dict[str, Any] | None, BeforeValidator(_json), Field(alias="json")] = None
    """A JSON schema with enforceable keywords only."""
    json_object: bool | None = None
    """True: any JSON object."""
    choice: Annotated[list[_Choice], Field(min_length=1, max_length=256)] | None = None
    """The answer is one of these."""
    regex: Annotated[str, Field(min_length=1), AfterValidator(plain_pattern)] | None = None
    grammar: Annotated[Any, BeforeValidator(_no_grammar)] = None
    structural_tag: Annotated[Any, BeforeValidator(_no_tag)] = None
    whitespace_pattern: Annotated[Any, BeforeValidator(_no_option)] = None
    disable_any_whitespace: Annotated[Any, BeforeValidator(_no_option)] = None
    disable_additional_properties: Annotated[Any, BeforeValidator(_no_option)] = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if len(self.given) != 1:
            raise ValueError(f"must hold exactly one of {', '.join(f'`{kind}`' for kind in _KINDS)}")
        return self

    @property
    def given(self) -> dict[str, Any]:
        """The constraint, by its name."""
        values = self.model_dump(by_alias=True, include={"json_", *_KINDS}, exclude_none=True)
        return {name: value for name, value in values.items() if value is not False}


class SampledBody(shared.ModelBody):
    """The fields of chat and text completions for sampling and streaming."""

    temperature: shared.Temperature | None = None
    """Higher is more random; 0 always takes the likeliest token. Default: the model's own, else 1."""
    top_p: shared.TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """Sample from this many of the likeliest tokens; 0 and -1 mean all."""
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Sample only tokens at least this likely, as a part of the likeliest one's probability."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)] | None = None
    """Above 1, tokens that the prompt or the answer already has become less likely."""
    n: Annotated[int, Field(ge=1, le=8)] | None = None
    """How many answers. Default 1."""
    stop: Annotated[tuple[str, ...], BeforeValidator(shared.stop_texts)] = ()
    seed: Annotated[int, Field(ge=-(2**63), le=shared.INT64_MAX)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[str, Any], BeforeValidator(_token_biases)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    """Generate until `max_tokens`, for benchmarks."""
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _options_have_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "needs `stream: true`")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def to_engine(self, caller: Asker) -> dict[str, Any]:
        """Return fields of the engine's request. The request id is ours: a client's never reaches the engine.

        Raises `ApiError` 404 if the key may not use the model.
        """
        return {name: getattr(self, name) for name in _AS_SENT} | {
            "request_id": secrets.token_hex(12),
            "model": caller.access.model_id(caller.key, self.model),
            "n": self.n or 1,
            "cache_salt": caller.key.public_id,  # else timing would reveal the cached prompts of other keys
            "ignore_eos": bool(self.ignore_eos),
            "structured_outputs": self.structured_outputs.given if self.structured_outputs else None,
            "owner": caller.key.public_id,
            "urgency": caller.urgency,
        }


class ChatCompletionBody(SampledBody):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=shared.MAX_MESSAGES)]
    max_tokens: shared.PositiveInt | None = None
    """Upper bound on generated tokens. Default: as many as the model allows."""
    max_completion_tokens: shared.PositiveInt | None = None
    """The same under its newer name; wins over `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: shared.TopLogprobs | None = None
    """Needs `logprobs: true`."""
    tools: Annotated[list[_Tool], Field(max_length=shared.MOST_TOOLS)] | None = None
    """Functions. Tools of other types are left out, and the header `x-hearth-ignored` names them."""
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[TextFormat | SchemaFormat, Field(discriminator="type")] | None = None
    reasoning_effort: shared.Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_template_switches)] | None = None
    """`enable_thinking` and `preserve_thinking` only."""
    continue_final_message: bool | None = None
    """Continue the last message, an assistant's; the answer has only what follows."""
    add_generation_prompt: bool | None = None
    """Default true, unless `continue_final_message` is. Without it the template does not open an answer."""

    functions: Annotated[Any, BeforeValidator(shared.refused("is not supported: send `tools`"))] = None
    function_call: Annotated[Any, BeforeValidator(shared.refused("is not supported: send `tool_choice`"))] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "needs `logprobs: true`")
        names = {tool.function.name for tool in self.functions_offered}
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise FieldError("tool_choice", "names a function that is not in `tools`")
        if self.tool_choice == "required" and not names:
            raise FieldError("tool_choice", "needs `tools`")
        if self.structured_outputs is not None and self.response_format is not None:
            raise FieldError("structured_outputs", "cannot stand beside `response_format`: send one of them")
        if self.continue_final_message:
            last = self.messages[-1]
            if self.add_generation_prompt:
                raise FieldError("add_generation_prompt", "must be false with `continue_final_message: true`")
            if not isinstance(last, AssistantMessage) or not last.content or last.tool_calls:
                raise FieldError("continue_final_message", "needs an assistant's message without tool calls at the end")
        return self

    @property
    def functions_offered(self) -> list[ToolDefinition]:
        return [tool for tool in self.tools or () if isinstance(tool, ToolDefinition)]


def to_chat_request(body: ChatCompletionBody, caller: Asker, *, place: str = "") -> ChatRequest:
    """Return the engine's request for a body. Raises `ApiError`, 404 if the key may not use the model.

    `place` is the prefix of the body's fields if it is part of a larger one, like `requests[3].`.
    """
    fields = body.to_engine(caller)
    most = caller.settings.max_messages
    if len(body.messages) > most:
        raise ApiError(400, "invalid_value", f"`messages` must have at most {most} items.", param="messages")
    for index, tool in enumerate(body.tools or ()):
        if isinstance(tool, OtherTool):
            caller.record.ignored(f"{place}tools[{index}]", tool.word)
    choice, form, tools = body.tool_choice, body.response_format, body.functions_offered
    messages, image_paths = _engine_messages(body.messages)
    return ChatRequest(
        **fields,
        messages=messages,
        image_paths=image_paths,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
        tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
        tool_choice=choice.model_dump() if isinstance(choice, NamedToolChoice) else choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=None if form is None else form.model_dump(by_alias=True, exclude_none=True),
        reasoning_effort=_EFFORTS.get(body.reasoning_effort or "", body.reasoning_effort),
        chat_template_kwargs=body.chat_template_kwargs,
        continue_answer=bool(body.continue_final_message),
        generation_prompt=body.add_generation_prompt is not False,
    )


def _engine_messages(sent: Sequence[shared.Strict]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the messages, and the path in the body of each image in them.

    Images of tools join the user's next message, or become one: few chat templates take them anywhere else.
    """
    messages: list[dict[str, Any]] = []
    paths: list[str] = []
    images: list[dict[str, Any]] = []  # of tools, still without a message
    for position, message in enumerate(map(_message, sent)):
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        seen = [part for part in parts if part["type"] == "image_url"]
        paths += [
            f"messages[{position}].content[{index}]" for index, part in enumerate(parts) if part["type"] == "image_url"
        ]
        if message["role"] == "tool" and seen:
            images += seen
            message["content"] = "\n".join(part["text"] for part in parts if part["type"] == "text")
        elif message["role"] == "user" and images:
            message["content"], images = [*images, *parts], []
        elif message["role"] != "tool" and images:
            messages.append({"role": "user", "content": images})
            images = []
        messages.append(message)
    return [*messages, {"role": "user", "content": images}] if images else messages, tuple(paths)


def _message(message: shared.Strict) -> dict[str, Any]:
    plain: dict[str, Any] = message.model_dump(exclude_none=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    if plain["role"] == "assistant":
        plain.setdefault("content", None)
        if not plain.get("tool_calls"):
            plain.pop("tool_calls", None)
        thought = plain.pop("reasoning", None)
        if isinstance(thought, str):
            plain.setdefault("reasoning_content", thought)
    return plain


def tool_call(id_: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    """Return a tool call in the shape of chat, for answers and conversations."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


class FieldNames(dict[str, str]):
    """Paths in a chat body, and their names in another API's body; the longest matching path counts.

    `with_rest`: the fields below a path have the same names in both.
    """

    def __init__(self, names: Mapping[str, str], *, with_rest: bool = False) -> None:
        super().__init__(names)
        self._with_rest = with_rest

    @contextmanager
    def as_sent(self) -> Iterator[None]:
        """Rename the field of an error in the block, in `param` and message, as the client sent it."""
        try:
            yield
        except (ApiError, EngineError) as error:
            raise self._renamed(to_api_error(error)) from error

    def _renamed(self, error: ApiError) -> ApiError:
        param = error.param or ""
        known = [path for path in self if param == path or param.startswith((f"{path}.", f"{path}["))]
        if not known:
            return error
        ours = max(known, key=len)
        theirs = self[ours] + (param[len(ours) :] if self._with_rest else "")
        message = error.message.replace(f"`{param}`", f"`{theirs}`").replace(f"`{ours}`", f"`{self[ours]}`")
        return ApiError(error.status, error.code, message, param=theirs, headers=error.headers)
