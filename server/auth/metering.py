"""The engine as one HTTP request may use it: every call is held to the key's limits and written into the usage book.

Routes call it like the engine itself. What the limits are, and how they are taken, is limits.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from engine import ChatRequest, ChatResult, Engine, ImageRequest, SpeechRequest, TextRequest
from engine.stream import ImageStream, SpeechStream, Stream, StreamClosedError, TokenStream, fold
from server.auth.limits import ImageQuota, Limiter, Limits, headers_of
from server.errors import ApiError
from server.http.disconnect import ClientDisconnectedError
from server.observability.access_log import RequestRecord
from server.observability.metrics import Metrics
from server.store import ApiKey, Ask, QuotaTaken, StoreUnavailableError, Usage, UsageBook

_Stream = TypeVar("_Stream", bound=Stream[Any])


@dataclass(frozen=True, slots=True)
class Meter:
    """What a process keeps of all keys: what they may use, and what they have used."""

    limiter: Limiter
    book: UsageBook
    images: ImageQuota
    metrics: Metrics


@dataclass(slots=True, eq=False)
class MeteredEngine:
    """One per HTTP request: all its calls together count as one that runs. `kind` names them in the usage book.

    Its methods are those of `Engine`, and raise `ApiError` where a limit is met.
    """

    engine: Engine
    meter: Meter
    key: ApiKey
    record: RequestRecord
    kind: str
    calls: int = 0

    @property
    def limits(self) -> Limits:
        """What the key may do now."""
        return self.meter.limiter.limits(self.key)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count this HTTP request as one that runs, once however many calls it makes. Raises `ApiError`."""
        self.begin_call()
        try:
            yield
        finally:
            self.end_call()

    def begin_call(self) -> None:
        """Count one more call. Raises `ApiError` where the key has too many requests that run."""
        if self.calls == 0:
            self.meter.limiter.begin(self.key)
        self.calls += 1

    def end_call(self) -> None:
        """Count one less."""
        self.calls -= 1
        if self.calls == 0:
            self.meter.limiter.end(self.key)

    async def tokens(self, request: ChatRequest | TextRequest) -> TokenStream:
        """Like `Engine.chat` or `Engine.text`."""
        call = MeteredCall(self, request.model, takes_tokens=True)
        stream = await call.open(TokenStream())

        async def take(prompt_tokens: int, longest_answer_tokens: int) -> None:
            call.prompt_tokens = prompt_tokens
            await call.take_tokens(prompt_tokens + longest_answer_tokens, asked=request.max_tokens is not None)
            call.queued_at = time.monotonic()

        owned: dict[str, Any] = {**self._owner(), "before_turn": take}
        try:
            if isinstance(request, ChatRequest):
                return await self.engine.chat(replace(request, **owned), stream)
            return await self.engine.text(replace(request, **owned), stream)
        except BaseException as error:
            await call.count(error)
            raise

    async def whole(self, request: ChatRequest | TextRequest) -> ChatResult:
        """Return a whole answer. Cancelling aborts it."""
        asked = replace(request, whole=True) if isinstance(request, ChatRequest) else request
        async with await self.tokens(asked) as stream:
            return await fold(stream)

    async def count_tokens(self, request: ChatRequest) -> int:
        """It costs a request and no tokens."""
        async with MeteredCall(self, request.model):
            return await self.engine.count_tokens(request)

    async def images(self, request: ImageRequest) -> ImageStream:
        """Images that were not finished are not counted, neither for the day nor as used."""
        call = MeteredCall(self, request.model)
        stream = await call.open(ImageStream())

        async def take(images: int) -> None:
            if (per_day := self.limits.images_per_day) is None:
                return
            with suppress(StoreUnavailableError):  # as for tokens: better unlimited for a moment than no service
                call.images_taken = await self.meter.images.take(self.key.public_id, images, per_day)
                call.images_asked = images
            call.queued_at = time.monotonic()

        owned: dict[str, Any] = {**self._owner(), "before_turn": take}
        return await self.engine.images(replace(request, **owned), stream)

    async def speech(self, request: SpeechRequest) -> SpeechStream:
        """What was spoken until its client left or it failed is counted."""
        stream = await MeteredCall(self, request.model).open(SpeechStream())
        return await self.engine.speech(replace(request, **self._owner()), stream)

    def _owner(self) -> dict[str, Any]:
        return {"owner": self.key.public_id, "queue_share": self.limits.queue_share}


@dataclass(slots=True, eq=False)
class MeteredCall:
    """One call of the engine: what was taken for it, what it uses, and what goes back when it ends.

    `open` ties it to a stream, which ends it; a call without one is an `async with`. Both raise `ApiError`.
    """

    request: MeteredEngine
    model: str
    takes_tokens: bool = False
    counted: bool = False  # as a request of its key
    deferred: bool = False  # it is counted together with its tokens
    reserved: int = 0
    tokens: Ask | None = None
    prompt_tokens: int = 0
    stream: Stream[Any] | None = None
    images_asked: int = 0
    images_taken: QuotaTaken | None = None
    queued_at: float = field(default_factory=time.monotonic)

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            await self.count(error)
        finally:
            self._end(error)

    async def open(self, stream: _Stream) -> _Stream:
        """Begin; the call ends when the stream does."""
        await self._begin()
        self.stream = stream
        stream.on_end(self._end)
        return stream

    async def _begin(self) -> None:
        """Count the request, before any work is done for it; with its tokens, where those are limited."""
        try:
            self.request.begin_call()
            try:
                self.request.meter.limiter.refuse_early(self.request.key)
                if not (self.takes_tokens and self.request.meter.limiter.defer(self.request.key)):
                    await self._take()
                else:
                    self.deferred = True
            except BaseException:
                self.request.end_call()
                raise
        except BaseException as error:
            self._settle(error)
            raise

    def _end(self, error: BaseException | None) -> None:
        self._end_deferral()
        self.request.end_call()
        self._settle(error)

    async def take_tokens(self, tokens: int, *, asked: bool) -> None:
        """Take them from the key's bucket, and with them the request if that is not counted so far."""
        if self.tokens is not None:  # a batch's item that starts over, since the engine died before its turn
            self.request.meter.limiter.give_back(self.tokens, self.reserved)
            self.tokens, self.reserved = None, 0  # not once more, should the next lines fail
        await self._take(tokens, asked=asked)
        self.reserved = 0 if self.tokens is None else int(self.tokens.cost)

    async def _take(self, tokens: int | None = None, *, asked: bool = False) -> None:
        limiter, key = self.request.meter.limiter, self.request.key
        self._end_deferral()
        try:
            self.tokens, levels = await limiter.take(key, tokens, request=not self.counted, asked=asked)
        except StoreUnavailableError:
            levels = ()  # better unlimited for a moment than no service; keys are checked all the same
        self.counted = True
        self.request.record.headers.update(headers_of(levels))

    def _end_deferral(self) -> None:
        if self.deferred:
            self.deferred = False
            self.request.meter.limiter.end_deferral(self.request.key)

    async def count(self, error: BaseException | None) -> None:
        """Count a request that came to no tokens: a wrong one, too many tokens, a client that left."""
        if self.counted:
            return
        if _has_left(error):
            self.request.meter.limiter.charge(self.request.key)
            return
        with suppress(ApiError):  # it has an answer already
            self.request.meter.limiter.refuse_early(self.request.key)
            await self._take()

    def _settle(self, error: BaseException | None) -> None:
        """Give back what was not used, and write down the rest."""
        meter, key, record, kind = self.request.meter, self.request.key, self.request.record, self.request.kind
        used = self._used(error)
        if self.tokens is not None:
            meter.limiter.give_back(self.tokens, self.reserved - self._tokens_spent(used))
        if self.images_taken is not None:
            meter.images.give_back(key.public_id, self.images_asked - used.images, self.images_taken)
        if isinstance(self.stream, ImageStream):
            record.images = used.images or None
        if isinstance(self.stream, SpeechStream):
            record.audio_seconds = round(used.audio_seconds, 3) or None
        meter.book.add(key.public_id, self.model, kind, used)
        at = None if self.stream is None else self.stream.dispatched_at
        meter.metrics.used(self.model, kind, used, None if at is None else at - self.queued_at)

    def _tokens_spent(self, used: Usage) -> int:
        """How many of the tokens that were taken for it are not given back."""
        if isinstance(self.stream, TokenStream) and self.stream.usage is not None:
            return used.prompt_tokens + used.completion_tokens
        # Left before its end, and not streamed: how far it had come is not known, so what was taken stays taken.
        dispatched = self.stream is not None and self.stream.dispatched_at
        return self.reserved if dispatched and used.aborted else 0

    def _used(self, error: BaseException | None) -> Usage:
        left, stream = _has_left(error), self.stream
        used = Usage(requests=1, aborted=int(left), errors=int(isinstance(error, Exception) and not left))
        if isinstance(stream, ImageStream):
            return replace(used, images=stream.images)
        if isinstance(stream, SpeechStream):
            return replace(used, audio_seconds=stream.seconds)
        if isinstance(stream, TokenStream) and (spent := stream.usage) is not None:
            return replace(
                used,
                prompt_tokens=spent.prompt_tokens,
                completion_tokens=spent.completion_tokens,
                cached_tokens=spent.cached_tokens or 0,
            )
        dispatched = stream is not None and stream.dispatched_at is not None  # from there on a prompt costs
        return replace(used, prompt_tokens=self.prompt_tokens if dispatched else 0)


def _has_left(error: BaseException | None) -> bool:
    return isinstance(error, (asyncio.CancelledError, GeneratorExit, StreamClosedError, ClientDisconnectedError))
