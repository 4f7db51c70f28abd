"""`POST /tokenize` and `/detokenize`, also below /v1: a model's own tokens, in the shapes of vLLM's server."""

from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from server.api import schema as shared
from server.api.caller import ChatCaller, checked, json_response
from server.api.chat_request import ChatCompletionBody, to_chat_request
from server.errors import ApiError
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute

_MOST_CHARACTERS = 2**20  # half a second's work, on a thread
_OF_CHAT = ("model", "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")

router = APIRouter(tags=["chat"], route_class=StrictRoute)


class TokenizeBody(shared.ModelBody):
    """The body of `POST /v1/tokenize`: a `prompt`, or `messages` and what else of chat makes a prompt."""

    prompt: Annotated[str, Field(max_length=_MOST_CHARACTERS)] | None = None
    messages: list[Any] | None = None
    """As in chat, like the next four."""
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """Of a `prompt`: whether the tokenizer adds its own marks. Default true."""
    return_token_strs: bool | None = None


class DetokenizeBody(shared.ModelBody):
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(max_length=shared.MAX_TOKENS)]


@router.post("/tokenize", response_class=Response, include_in_schema=False)
@router.post("/v1/tokenize", response_class=Response)
async def tokenize(body: TokenizeBody, caller: ChatCaller) -> Response:
    """Return the tokens of a text or of a conversation. Nothing is generated."""
    model = caller.access.model_id(caller.key, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "missing_field", "Send either `prompt` or `messages`.", param="prompt")
    asked: Any = body.prompt
    if body.messages is not None:
        asked = to_chat_request(checked(ChatCompletionBody, body.model_dump(include=set(_OF_CHAT))), caller)
    caller.record.model = model
    special_tokens = body.add_special_tokens is not False
    work = caller.engine.tokenize(model, asked, special_tokens=special_tokens)
    found = await until_disconnect(work, caller.request)
    caller.record.prompt_tokens = len(found.ids)
    answer = {
        "count": len(found.ids),
        "max_model_len": found.context_length,
        "tokens": found.ids,
        "token_strs": found.tokens if body.return_token_strs else None,
    }
    return json_response(answer)


@router.post("/detokenize", response_class=Response, include_in_schema=False)
@router.post("/v1/detokenize", response_class=Response)
async def detokenize(body: DetokenizeBody, caller: ChatCaller) -> Response:
    """Return the text that tokens stand for."""
    caller.record.model = model = caller.access.model_id(caller.key, body.model)
    work = caller.engine.detokenize(model, body.tokens)
    return json_response({"prompt": await until_disconnect(work, caller.request)})
