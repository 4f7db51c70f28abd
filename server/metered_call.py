"""One call of the engine as a key may make it: what is taken for it, what it uses, and what goes back when it ends."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from engine.stream import ImageStream, SpeechStream, Stream, StreamClosedError, TokenStream
from server.errors import ApiError
from server.hangup import ClientGoneError
from server.limits import headers_of
from server.store import StoreUnavailableError
from server.store import Usage as Used

if TYPE_CHECKING:
    from engine import Usage
    from server.access_log import RequestRecord
    from server.limits import Limits
    from server.meter import Meter
    from server.store import ApiKey, Ask, QuotaTaken


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
    return isinstance(error, (asyncio.CancelledError, GeneratorExit, StreamClosedError, ClientGoneError))
