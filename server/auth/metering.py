"""The engine as one HTTP request may use it: every call is held to the key's limits and written into the usage book.

Routes call it like the engine itself. What the limits are is limits.py's, in what order calls run the engine's.

One call of the engine as a key may make it: what is taken for it, what it uses, and what goes back when it ends.

What a process keeps of all keys: what they may use, and what they have used.

Images of a key per day: taken before the work begins, and what was not made given back after it.

The counting is the store's (quotas.py), which limit a key has limits.py's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from engine import ChatRequest
from engine.chat_fold import fold
from engine.stream import ImageStream, SpeechStream, Stream, StreamClosedError, TokenStream
from server.auth.limits import headers_of, quota_spent
from server.errors import ApiError
from server.http.disconnect import ClientDisconnectedError
from server.store import QuotaTaken, StoreUnavailableError
from server.store import Usage as Used
from server.tasks import SideTasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from engine import (
        ChatResult,
        Engine,
        ImageRequest,
        SpeechRequest,
        TextRequest,
        Usage,
    )
    from server.auth.limits import Limiter, Limits
    from server.observability.access_log import RequestRecord
    from server.observability.metrics import Metrics
    from server.store import ApiKey, Ask, QuotaExceeded, Quotas, QuotaTaken, UsageBook


_Request = TypeVar("_Request", "ChatRequest", "TextRequest")


class MeteredEngine:
    """Made anew for each HTTP request; all calls of one request count as one that runs."""

    def __init__(self, engine: Engine, meter: Meter, key: ApiKey, record: RequestRecord, *, kind: str) -> None:
        self._engine = engine
        self._request = MeteredRequest(meter, key, record, kind)

    def running(self) -> MeteredRequest:
        """Count this HTTP request as one that runs, once however many calls it makes (`with`). Raises `ApiError`."""
        return self._request

    async def chat(self, request: ChatRequest) -> TokenStream:
        """Like `Engine.chat`; raises `ApiError` where a limit is met."""
        return await self._begun(request, self._engine.chat)

    async def text(self, request: TextRequest) -> TokenStream:
        """Like `Engine.text`."""
        return await self._begun(request, self._engine.text)

    async def whole(self, request: ChatRequest | TextRequest) -> ChatResult:
        """Return a whole answer. Cancelling aborts it."""
        if isinstance(request, ChatRequest):
            stream = await self.chat(replace(request, whole=True))
        else:
            stream = await self.text(request)
        async with stream:
            return await fold(stream)

    async def _begun(
        self, request: _Request, begin: Callable[[_Request, TokenStream], Awaitable[TokenStream]]
    ) -> TokenStream:
        call = MeteredCall(self._request, request.model, takes_tokens=True)
        await call.begin()
        stream = call.stream = TokenStream()
        stream.on_end(call.end)
        try:
            return await begin(self._known(request, call), stream)
        except BaseException as error:
            await call.count(error)
            raise

    async def count_tokens(self, request: ChatRequest) -> int:
        """Like `Engine.count_tokens`. It costs a request and no tokens."""
        async with MeteredCall(self._request, request.model):
            return await self._engine.count_tokens(request)

    async def images(self, request: ImageRequest) -> ImageStream:
        """Like `Engine.images`. Images that were not finished are not counted, neither for the day nor as used."""
        call = MeteredCall(self._request, request.model)
        await call.begin()
        stream = call.stream = ImageStream()
        stream.on_end(call.end)
        return await self._engine.images(self._known_images(request, call), stream)

    async def speech(self, request: SpeechRequest) -> SpeechStream:
        """Like `Engine.speech`. What was spoken until its client left or it failed is counted."""
        call = MeteredCall(self._request, request.model)
        await call.begin()
        stream = call.stream = SpeechStream()
        stream.on_end(call.end)
        share = self._request.limits.queue_share
        return await self._engine.speech(replace(request, owner=self._request.key.public_id, queue_share=share), stream)

    def _known_images(self, request: ImageRequest, call: MeteredCall) -> ImageRequest:
        limits = self._request.limits

        async def take(images: int) -> None:
            if limits.images_per_day is None:
                return
            with suppress(StoreUnavailableError):  # as for tokens: better unlimited for a moment than nobody served
                call.images_taken = await self._request.meter.images.take(
                    self._request.key.public_id, images, limits.images_per_day
                )
                call.images_asked = images
            call.queued_at = time.monotonic()

        return replace(
            request,
            owner=self._request.key.public_id,
            queue_share=limits.queue_share,
            before_turn=take,
        )

    def _known(self, request: _Request, call: MeteredCall) -> _Request:
        async def take(prompt_tokens: int, longest_answer_tokens: int) -> None:
            asked = request.max_tokens is not None
            call.prompt_tokens = prompt_tokens
            await call.take_tokens(prompt_tokens + longest_answer_tokens, asked=asked)
            call.queued_at = time.monotonic()

        known: dict[str, Any] = {
            "owner": self._request.key.public_id,
            "queue_share": self._request.limits.queue_share,
            "before_turn": take,
        }
        return replace(request, **known)


@dataclass(slots=True)
class MeteredRequest:
    """One HTTP request of a key: all the calls that it makes count as one that runs (`with` around each)."""

    meter: Meter
    key: ApiKey
    record: RequestRecord
    kind: str
    calls: int = 0

    @property
    def limits(self) -> Limits:
        """What the key may do now."""
        return self.meter.limiter.limits(self.key)

    def __enter__(self) -> None:
        """See `begin`."""
        self.begin()

    def __exit__(self, *_: object) -> None:
        """See `end`."""
        self.end()

    def begin(self) -> None:
        """Count one more of them. Raises `ApiError` where the key has too many requests that run."""
        if self.calls == 0:
            self.meter.limiter.begin(self.key)
        self.calls += 1

    def end(self) -> None:
        """Count one less."""
        self.calls -= 1
        if self.calls == 0:
            self.meter.limiter.end(self.key)


@dataclass(slots=True, eq=False)
class MeteredCall:
    """`async with`: what was taken for it, and what it has used so far. Raises `ApiError` where a limit is met.

    No generator: each request passes through it.
    """

    request: MeteredRequest
    model: str
    takes_tokens: bool = False
    counted: bool = False  # as a request of its key
    reserved: int = 0
    tokens: Ask | None = None
    prompt_tokens: int = 0
    stream: Stream[Any] | None = None
    images_asked: int = 0
    images_taken: QuotaTaken | None = None
    queued_at: float = field(default_factory=time.monotonic)
    errors: int = 0  # 1 if it failed
    aborted: int = 0  # 1 if its client left

    async def __aenter__(self) -> Self:
        """See `begin`."""
        await self.begin()
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        """See `end`."""
        try:
            await self.count(error)
        finally:
            self.end(error)

    async def begin(self) -> None:
        """Count the request, before any work is done for it; with its tokens, where those are limited.

        `end` follows, unless this raises.
        """
        try:
            self.request.begin()
            try:
                limiter, key = self.request.meter.limiter, self.request.key
                limiter.refuse_early(key)
                if not self.takes_tokens or self.request.limits.tokens_per_minute is None:
                    await self._take()
            except BaseException:
                self.request.end()
                raise
        except BaseException as error:
            self._settle(error)
            raise

    def end(self, error: BaseException | None) -> None:
        """Give back what was not used, and write down the rest."""
        self.request.end()
        self._settle(error)

    @property
    def usage(self) -> Usage | None:
        """What its answer has taken so far, sent or not; None where it has no tokens."""
        return self.stream.usage if isinstance(self.stream, TokenStream) else None

    @property
    def _images(self) -> int:
        return self.stream.images if isinstance(self.stream, ImageStream) else 0

    @property
    def _audio_seconds(self) -> float:
        return self.stream.seconds if isinstance(self.stream, SpeechStream) else 0.0

    @property
    def _dispatched_at(self) -> float | None:
        """When its turn came: from there on it costs."""
        return None if self.stream is None else self.stream.dispatched_at

    async def take_tokens(self, tokens: int, *, asked: bool) -> None:
        """Take them from the key's bucket, and with them the request if that is not counted so far."""
        if self.tokens is not None:  # a batch's item that starts over, since the engine died before its turn
            self.request.meter.limiter.give_back(self.tokens, self.reserved)
            self.tokens, self.reserved = None, 0  # not once more, should the next lines fail
        await self._take(tokens, asked=asked)
        self.reserved = 0 if self.tokens is None else int(self.tokens.cost)

    async def _take(self, tokens: int | None = None, *, asked: bool = False) -> None:
        limiter, key = self.request.meter.limiter, self.request.key
        try:
            self.tokens, levels = await limiter.take(key, tokens, request=not self.counted, asked=asked)
        except StoreUnavailableError:
            levels = ()  # better unlimited for a moment than nobody served; keys are checked all the same
        self.counted = True
        self.request.record.headers.update(headers_of(levels))

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
        if _has_left(error):
            self.aborted = 1
        elif isinstance(error, Exception):
            self.errors = 1
        meter, key = self.request.meter, self.request.key
        if self.tokens is not None:
            meter.limiter.give_back(self.tokens, self.reserved - self._tokens_spent())
        if self.images_taken is not None:
            meter.images.give_back(key.public_id, self.images_asked - self._images, self.images_taken)
        used = self._used()
        if isinstance(self.stream, ImageStream):
            self.request.record.images = self._images
        if isinstance(self.stream, SpeechStream):
            self.request.record.audio_seconds = round(self._audio_seconds, 3)
        meter.book.add(key.public_id, self.model, self.request.kind, used)
        at = self._dispatched_at
        meter.metrics.used(self.model, self.request.kind, used, None if at is None else at - self.queued_at)

    def _tokens_spent(self) -> int:
        """How many of the tokens that were taken for it are not given back, once it has ended."""
        if self.usage is not None:
            return self.usage.prompt_tokens + self.usage.completion_tokens
        # Left before its end, and not streamed: nobody knows how far it had come, so what was taken stays taken.
        return self.reserved if self._dispatched_at and self.aborted else 0

    def _used(self) -> Used:
        """Return what goes into the usage book, once it has ended."""
        usage = self.usage
        return Used(
            requests=1,
            prompt_tokens=usage.prompt_tokens
            if usage
            else self.prompt_tokens
            if (self._dispatched_at is not None)
            else 0,
            completion_tokens=usage.completion_tokens if usage else 0,
            cached_tokens=(usage.cached_tokens or 0) if usage else 0,
            images=self._images,
            audio_seconds=self._audio_seconds,
            errors=self.errors,
            aborted=self.aborted,
        )


def _has_left(error: BaseException | None) -> bool:
    return isinstance(error, (asyncio.CancelledError, GeneratorExit, StreamClosedError, ClientDisconnectedError))


@dataclass(frozen=True, slots=True)
class Meter:
    """Made once; each call of the engine is held to it."""

    limiter: Limiter
    book: UsageBook
    images: ImageQuota
    metrics: Metrics


_log = logging.getLogger("hearth.limits")
_KIND = "images"


class ImageQuota:
    """For all keys of a process, by their public ids. Use as `async with`, on one event loop."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._tasks = SideTasks()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.finish()

    async def finish(self) -> None:
        """Wait until everything that was taken or given back is written."""
        await self._tasks.finish()

    async def take(self, key: str, images: int, per_day: int) -> QuotaTaken:
        """Count `images`, all or none. Raises `ApiError` where they are too many, and StoreUnavailableError.

        For a caller that is cancelled nothing stays counted.
        """
        taking = self._tasks.start(self._quotas.take(key, _KIND, images, per_day))
        try:
            taken = await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(partial(self._came_late, key, images))
            raise
        if isinstance(taken, QuotaTaken):
            return taken
        raise _too_many(taken, images)

    def give_back(self, key: str, images: int, taken: QuotaTaken) -> None:
        """Uncount images that were not made. Does not wait or fail."""
        if images > 0:
            self._tasks.start(self._try_to_give_back(key, images, taken))

    async def _try_to_give_back(self, key: str, images: int, taken: QuotaTaken) -> None:
        try:
            await self._quotas.give_back(key, _KIND, images, taken.day)
        except StoreUnavailableError as error:
            _log.warning("%d images of key %s stay counted for today: %s", images, key, error.message)

    def _came_late(self, key: str, images: int, taking: asyncio.Task[QuotaTaken | QuotaExceeded]) -> None:
        if not taking.cancelled() and taking.exception() is None and isinstance(taken := taking.result(), QuotaTaken):
            self.give_back(key, images, taken)


def _too_many(spent: QuotaExceeded, images: int) -> Exception:
    if spent.limit == 0:
        return quota_spent("Your key may make no images at all. Ask whoever runs this server.")
    hours, minutes = divmod(int(spent.reset_seconds) // 60, 60)
    fewer = " Ask for fewer with `n`, or" if 0 < spent.remaining < images else " Until then"
    return quota_spent(
        f"Your key may make {spent.limit} images a day and has {spent.remaining} of them left; this request asks for"
        f" {images}. The next day begins at midnight UTC, in {hours} h {minutes} min.{fewer} ask whoever runs this"
        " server for more."
    )
