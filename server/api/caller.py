"""What routes ask for: the caller of an endpoint that does work, a key with a scope, or one part of the app.

A caller is also answered here, in one piece or with events, the same way for every endpoint.
All of it is `async`, though nothing waits: FastAPI runs each plain function on a thread, at the price of a token.
"""

# No `from __future__ import annotations` here: FastAPI cannot resolve those of an object that is called.
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request
from fastapi.responses import Response
from pydantic import ValidationError

from engine import ChatRequest, ChatResult, TextRequest, Urgency
from server.api.schema import Strict
from server.auth.access import Access, RequiresScope
from server.auth.metering import MeteredEngine
from server.errors import ApiError, invalid_body
from server.http.disconnect import until_disconnect
from server.http.streaming import Encoder, StreamedResponse, TokenEvents
from server.observability.access_log import RequestRecord
from server.settings import Settings
from server.store.audit import Actor
from server.store.keys import ApiKey

_Body = TypeVar("_Body", bound=Strict)


def event(kind: str, **fields: Any) -> bytes:
    """Encode an event of a convention that names their types, in the event itself too."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def failed_event(error: ApiError) -> bytes:
    """Encode what ends a stream of such events that fails."""
    return event("error", error=error.body())


class Answer(Encoder):
    """What an endpoint makes of a model's answer: one object, or events."""

    @abstractmethod
    def whole(self, result: ChatResult) -> dict[str, Any]:
        """Return the answer in one piece."""

    def start(self) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Return what ends a stream that fails after its start."""
        return failed_event(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """A key that asks something, and what it takes to answer it. `engine` is held to the key's limits.

    What asks is a request (`Caller`), an item of one, or a line of a batch.
    """

    record: RequestRecord
    key: ApiKey
    engine: MeteredEngine
    access: Access
    settings: Settings
    urgency: Urgency = Urgency.INTERACTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller(Asker):
    """One request, and the key it came with."""

    request: Request

    async def answer(
        self,
        asked: ChatRequest | TextRequest,
        answer: Answer,
        *,
        stream: bool | None,
        naming: AbstractContextManager[object] | None = None,
    ) -> Response:
        """Answer with a model's tokens. A client that leaves aborts it. `naming` gives errors the client's names."""
        self.record.model, self.record.stream = asked.model, bool(stream)
        if stream:
            events = TokenEvents(lambda: self.engine.tokens(asked), answer, self.record, naming)
            return self.streamed(events, failure=answer.failed)
        with naming or nullcontext():
            result = await until_disconnect(self.engine.whole(asked), self.request)
        self.record.answered(result)
        return json_response(answer.whole(result))

    def streamed(
        self,
        events: TokenEvents | AsyncIterator[bytes],
        *,
        failure: Callable[[ApiError], bytes] = failed_event,
        always_event: Callable[[ApiError], bool] = lambda _: False,
    ) -> Response:
        """Answer with events; `failure` encodes an error that comes after the first, or always is one."""
        seconds = self.settings.keep_alive_seconds
        return StreamedResponse(events, keep_alive_seconds=seconds, failure=failure, always_event=always_event)


def json_response(answer: Any) -> Response:
    """Encode an answer without FastAPI's walk through it."""
    return Response(msgspec.json.encode(answer), media_type="application/json")


def checked(kind: type[_Body], value: Any, *, form: bool = False) -> _Body:
    """Check what did not come as the body of a request like one that did; all fields of a `form` are texts.

    Raises `ApiError`.
    """
    try:
        return kind.model_validate_strings(value) if form else kind.model_validate(value)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False, include_input=False), value) from None


def checked_line(kind: type[_Body], value: Any) -> _Body:
    """Check a body within a batch, the answer to which cannot be a stream. Raises `ApiError`."""
    body = checked(kind, value)
    if getattr(body, "stream", None):
        raise ApiError(400, "invalid_value", "`stream` cannot be true within a batch.", param="stream")
    return body


class CallerWith(RequiresScope):
    """A dependency that gives the caller if its key has `scope`, which also names the work in the usage book."""

    __slots__ = ()

    async def __call__(self, request: Request) -> Caller:
        """Raise `ApiError` 403."""
        key, app, record = self.check(request), request.app.state, request.state.record
        engine = MeteredEngine(app.engine, app.meter, key, record, kind=self.scope)
        return Caller(request=request, record=record, key=key, engine=engine, access=app.access, settings=app.settings)


def of_app(name: str) -> Callable[[Request], Awaitable[Any]]:
    """Make a dependency that gives this part of the app's state."""

    async def part(request: Request) -> Any:
        return getattr(request.app.state, name)

    return part


async def _actor(request: Request) -> Actor:
    return Actor(request.state.key.public_id, request.client.host if request.client else "unknown")


ChatCaller = Annotated[Caller, Depends(CallerWith("chat"))]
BatchCaller = Annotated[Caller, Depends(CallerWith("batch"))]
ImageCaller = Annotated[Caller, Depends(CallerWith("images"))]
AudioCaller = Annotated[Caller, Depends(CallerWith("audio"))]
EmbeddingCaller = Annotated[Caller, Depends(CallerWith("embeddings"))]
TheAccess = Annotated[Access, Depends(of_app("access"))]
TheActor = Annotated[Actor, Depends(_actor)]  # for the log of changes
