"""Answers a caller with events or in one piece, the same way for every endpoint. What either looks like is theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
from fastapi.responses import Response

from engine import ChatRequest, ChatResult, TextRequest
from server.api.dependencies import Caller
from server.errors import ApiError
from server.http.disconnect import until_disconnect
from server.http.streaming import Encoder, StreamedResponse, TokenEvents, error_event


def token_events(
    caller: Caller,
    asked: ChatRequest | TextRequest,
    encoder: Encoder,
    *,
    head: bytes = b"",
    naming: AbstractContextManager[object] | None = None,
) -> TokenEvents:
    """Return the events of an answer that begins when they are read. `naming` gives errors the client's names."""
    return TokenEvents(lambda: caller.engine.tokens(asked), encoder, caller.record, head=head, naming=naming)


def streamed(
    caller: Caller,
    events: TokenEvents | AsyncIterator[bytes],
    *,
    failure: Callable[[ApiError], bytes] = error_event,
) -> Response:
    """Answer with events; `failure` encodes an error that comes after the first."""
    return StreamedResponse(
        events, drain=caller.drain, keep_alive_seconds=caller.settings.keep_alive_seconds, failure=failure
    )


async def whole(
    caller: Caller,
    asked: ChatRequest | TextRequest,
    encode: Callable[[ChatResult], dict[str, Any]],
    *,
    naming: AbstractContextManager[object] | None = None,
) -> Response:
    """Answer in one piece, as `encode` shows it. A client that leaves aborts it."""
    with naming or nullcontext():
        result = await until_disconnect(caller.engine.whole(asked), caller.request, caller.drain)
    caller.record.answered(result)
    return json_response(encode(result))


def json_response(answer: Any) -> Response:
    """Encode an answer without FastAPI's walk through it."""
    return Response(msgspec.json.encode(answer), media_type="application/json")
