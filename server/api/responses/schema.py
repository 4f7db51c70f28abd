"""The body of `POST /v1/responses`: its own names and shapes. What they mean is left to routes.py.

What chat checks too (arguments, schemas, image addresses) is checked there, once, when the body has become a chat body.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from server.api import schema as shared
from server.api.chat_request import OtherTool, TextFormat, callable_or_other

_not_stored = shared.refused("cannot be used: nothing is stored here. Send the whole conversation in `input`")
_by_format = shared.refused("is not supported here: use `text.format`, or `structured_outputs` of chat")
_not_in_background = shared.refused(
    "cannot be true: nothing is stored here, so the answer could not be fetched later", lambda value: value is True
)


def _typed(item: Any) -> Any:
    """A message may come without its type; a reference to something stored leads nowhere."""
    if isinstance(item, dict) and item.get("type") is None:
        return {**item, "type": "message"} if "role" in item else item
    if isinstance(item, dict) and item["type"] == "item_reference":
        raise ValueError("refers to a stored item, but nothing is stored here: send the item itself")
    return item


class ResponseText(shared.Strict):
    """Text, of any role."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(shared.Strict):
    """What a model said instead of an answer; for us text like any other."""

    type: Literal["refusal"]
    text: Annotated[str, Field(alias="refusal")]


class ResponseImage(shared.Strict):
    """An image within a user's message, for models with the capability `vision`."""

    type: Literal["input_image"]
    image_url: Annotated[str, Field(min_length=1)]
    """A `data:` URI. Uploaded files (`file_id`) do not exist here."""
    detail: str | None = None


Part = Annotated[ResponseText | RefusalPart | ResponseImage, Field(discriminator="type")]
_Content = Annotated[str | Annotated[list[Part], Field(max_length=1024)], shared.text_or_array()]


class MessageItem(shared.Strict):
    """What somebody said. `developer` means the same as `system`."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content


class FunctionCallItem(shared.Strict):
    """An earlier call that the model made; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: shared.ShortText
    name: shared.ShortText
    arguments: str


class FunctionCallOutputItem(shared.Strict):
    """What came of the call `call_id`."""

    type: Literal["function_call_output"]
    call_id: shared.ShortText
    output: _Content


class ReasoningItem(shared.Strict):
    """What the model thought earlier. Accepted, and not shown to the model again."""

    type: Literal["reasoning"]


Item = Annotated[
    Annotated[MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem, Field(discriminator="type")],
    BeforeValidator(_typed),
]
_Items = Annotated[list[Item], Field(min_length=1, max_length=shared.MAX_MESSAGES)]


class FunctionTool(shared.Strict):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


_Tool = Annotated[
    Annotated[FunctionTool, Tag("callable")] | Annotated[OtherTool, Tag("other")],
    Discriminator(callable_or_other("function")),
]


class NamedTool(shared.Strict):
    """Makes the model call this function."""

    type: Literal["function"]
    name: str


class ResponseSchema(shared.Strict):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    name: str
    json_schema: Annotated[Any, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextOptions(shared.Strict):
    """What the text of the answer looks like. `verbosity` is accepted and has no effect."""

    format: Annotated[TextFormat | ResponseSchema, Field(discriminator="type")] | None = None


class ReasoningOptions(shared.Strict):
    """How much the model thinks, if it does. `summary` is accepted: reasoning comes as it is."""

    effort: shared.Effort | None = None


class ResponseBody(shared.ModelBody):
    """The body of `POST /v1/responses`. Nothing of it is stored, whatever `store` says."""

    input: Annotated[str | _Items, shared.text_or_array()]
    """What the user says; or the whole conversation as items."""
    instructions: str | None = None
    """A system message in front of everything."""
    max_output_tokens: shared.PositiveInt | None = None
    """Upper bound on generated tokens, reasoning included. Default: as many as the model allows."""
    temperature: shared.Temperature | None = None
    top_p: shared.TopP | None = None
    tools: Annotated[list[_Tool], Field(max_length=128)] | None = None
    """Functions. Tools of other types are left out, and the header `x-hearth-ignored` names them."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    """`message.output_text.logprobs` adds probabilities; the others have no effect."""
    top_logprobs: shared.TopLogprobs | None = None
    stream: bool | None = None
    metadata: shared.Labels | None = None
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
