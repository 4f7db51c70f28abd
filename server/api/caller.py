"""Dependencies of routes: the caller of an endpoint that does work, or one part of the app.

A `Caller` also sends its answer, in one piece or as events, the same way for every endpoint.
Dependencies are `async`, though nothing waits: FastAPI runs plain functions on threads, which costs as much as a token.
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
    """Return a server-sent event whose type is in the `event:` line and in its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def failed_event(error: ApiError) -> bytes:
    """Return the event that ends a stream which fails."""
    return event("error", error=error.body())


class Answer(Encoder):
    """Encodes a model's answer for an endpoint: as one object, or as events."""

    @abstractmethod
    def whole(self, result: ChatResult) -> dict[str, Any]:
        """Return the answer in one piece."""

    def start(self) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a stream which fails after its start."""
        return failed_event(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """A key that asks something, and what is needed to answer. `engine` applies the key's limits.

    It stands for a request (`Caller`), an item of one, or a line of a batch.
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
        """Answer with a model's tokens. A client that leaves aborts it. `naming` renames fields in errors."""
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
        """Answer with events; `failure` encodes an error after the first, or for which `always_event` holds."""
        seconds = self.settings.keep_alive_seconds
        return StreamedResponse(events, keep_alive_seconds=seconds, failure=failure, always_event=always_event)


def json_response(answer: Any) -> Response:
    """Return a JSON answer, encoded without FastAPI's validation."""
    return Response(msgspec.json.encode(answer), media_type="application/json")


def checked(kind: type[_Body], value: Any, *, form: bool = False) -> _Body:
    """Validate a value like the body of a request; all fields of a `form` are texts.

    Raises `ApiError`.
    """
    try:
        return kind.model_validate_strings(value) if form else kind.model_validate(value)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False, include_input=False), value) from None


def checked_line(kind: type[_Body], value: Any) -> _Body:
    """Validate a body within a batch; `stream` is refused. Raises `ApiError`."""
    body = checked(kind, value)
    if getattr(body, "stream", None):
        raise ApiError(400, "invalid_value", "`stream` cannot be true within a batch.", param="stream")
    return body


class CallerWith(RequiresScope):
    """A dependency that returns the caller if its key has `scope`, which is also its kind in the usage book."""

    __slots__ = ()

    async def __call__(self, request: Request) -> Caller:
        """Raise `ApiError` 403."""
        key, app, record = self.check(request), request.app.state, request.state.record
        engine = MeteredEngine(app.engine, app.meter, key, record, kind=self.scope)
        return Caller(request=request, record=record, key=key, engine=engine, access=app.access, settings=app.settings)


def of_app(name: str) -> Callable[[Request], Awaitable[Any]]:
    """Return a dependency that returns this attribute of the app's state."""

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
