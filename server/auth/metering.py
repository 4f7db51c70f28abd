"""The engine as one HTTP request may use it: each call is charged to the key's limits and counted in the usage book.

Limits are charged before the work; what was not used is refunded after it. The store counts exactly; this file decides
which requests count, and writes the errors. Routes call `MeteredEngine` like the engine itself.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from engine import (
    ChatRequest,
    ChatResult,
    EmbeddingRequest,
    Engine,
    ImageRequest,
    RerankRequest,
    SpeechRequest,
    TextRequest,
    Tokenized,
    TranscriptionRequest,
)
from engine.stream import (
    ImageStream,
    PoolingStream,
    SpeechStream,
    Stream,
    StreamClosedError,
    TokenStream,
    TranscriptionStream,
    fold,
)
from server.errors import ApiError
from server.http.disconnect import ClientDisconnectedError
from server.observability.access_log import RequestRecord
from server.observability.metrics import Metrics
from server.store import StoreUnavailableError
from server.store.keys import ApiKey, Limits
from server.store.limits import Ask, Buckets, Level, QuotaExceeded, Quotas, QuotaTaken, Refused, Replicas
from server.store.usage import Usage, UsageBook

_LONGEST_RETRY_SECONDS = 120
_LEFT = (asyncio.CancelledError, GeneratorExit, StreamClosedError, ClientDisconnectedError)
_KEPT_FROM_BACKGROUND = 0.5  # of the limits per minute
_T = TypeVar("_T")
_Stream = TypeVar("_Stream", bound=Stream[Any])


@dataclass(slots=True, eq=False)
class Meter:
    """Limits and usage of all keys. One per process; the store's parts are shared with other processes."""

    buckets: Buckets
    quotas: Quotas
    book: UsageBook
    metrics: Metrics
    replicas: Replicas
    calls: "set[_Call]" = field(default_factory=set, init=False)
    _keys: "dict[str, KeyLimiter]" = field(default_factory=dict, init=False)

    def by_tier(self) -> dict[str, tuple[int, int]]:
        """Return how many calls of each tier run and how many wait for their turn; each item of a batch counts."""
        found: dict[str, tuple[int, int]] = {}
        for call in self.calls:
            running, waiting = found.get(call.request.tier, (0, 0))
            at_work = call.stream is not None and call.stream.dispatched_at is not None
            found[call.request.tier] = (running + at_work, waiting + (not at_work))
        return found

    def of(self, key: str, limits: Limits) -> "KeyLimiter":
        """Return the limiter of the key with this public id, and set its limits."""
        one = self._keys.setdefault(key, KeyLimiter(self, key, limits))
        one.limits = limits
        return one


@dataclass(slots=True, eq=False)
class KeyLimiter:
    """The limits of one key over all of its requests. `take` methods raise `ApiError` and StoreUnavailableError."""

    meter: Meter
    key: str
    limits: Limits
    running: int = 0

    def begin(self) -> None:
        """Count a request as running until `end`. Raises `ApiError` beyond `parallel_requests`."""
        most = self.limits.parallel_requests
        if most == 0:
            raise _quota_spent("Your key may run no requests at all. Ask your administrator.", "parallel_requests")
        if most is not None and self._running_everywhere() >= most:
            raise _too_many(
                f"Your key has reached its limit of {most} requests running at the same time. Wait for one to end.",
                1,
                "parallel_requests",
            )
        self._count(1)

    def end(self) -> None:
        self._count(-1)

    def _running_everywhere(self) -> int:
        return self.running + self.meter.replicas.elsewhere(self.key)

    def _count(self, change: int) -> None:
        self.running += change
        self.meter.replicas.running[self.key] = self.running

    async def take_request(self, *, kept: float = 0.0) -> Level | None:
        """Charge one request, and return how many are left; None: there is no limit. `kept`: see `Ask`."""
        most, tokens = self.limits.requests_per_minute, self.limits.tokens_per_minute
        if most is None:
            return None
        try:
            return await self._take(Ask(f"{self.key}:requests", 1, most, kept=kept))
        except ApiError as error:
            if tokens:
                with suppress(StoreUnavailableError):
                    error.headers.update(_headers_of(await self._take(Ask(f"{self.key}:tokens", 0, tokens))))
            raise

    async def take_tokens(
        self, tokens: int, *, asked: bool, kept: float = 0.0, makes_tokens: bool = True
    ) -> tuple[Ask, Level] | None:
        """Charge tokens; return the charge, for `give_back`, and how many are left. None: there is no limit.

        With `asked` the client sent `max_tokens`: more than the limit per minute is refused. Else `tokens` is the most
        that the model allows, and at most the limit is charged, since the answer may be short.
        `makes_tokens`: the error may advise a lower `max_tokens`.
        """
        most = self.limits.tokens_per_minute
        if most is None:
            return None
        cost = tokens if asked or not most else min(tokens, most)
        ask = Ask(f"{self.key}:tokens", cost, most, kept=kept)
        return ask, await self._take(ask, makes_tokens=makes_tokens)

    async def left(self) -> dict[str, int | None]:
        """Return what is left of each limit now; None if there is no limit. Charges nothing."""
        most = self.limits
        left: dict[str, int | None] = {
            "requests": await self._level("requests", most.requests_per_minute),
            "tokens": await self._level("tokens", most.tokens_per_minute),
            "parallel_requests": None,
            "images": None,
        }
        if most.parallel_requests is not None:
            left["parallel_requests"] = max(0, most.parallel_requests - self._running_everywhere())
        if most.images_per_day is not None:
            left["images"] = max(0, most.images_per_day - await self.meter.quotas.used(self.key, "images"))
        return left

    async def _level(self, kind: str, limit: int | None) -> int | None:
        if not limit:
            return limit
        try:
            taken = await self.meter.buckets.take(Ask(f"{self.key}:{kind}", 0, limit))
        except StoreUnavailableError:  # limits are not counted now
            return None
        level = taken.level if isinstance(taken, Refused) else taken
        return 0 if level is None else level.remaining

    async def _take(self, ask: Ask, *, makes_tokens: bool = True) -> Level:
        taken = await self.meter.buckets.take(ask)
        if isinstance(taken, Refused):
            raise _refusal(taken, ask, makes_tokens=makes_tokens)
        return taken

    def give_back(self, ask: Ask, unused: int) -> None:
        """Refund unused tokens of a charge. Never waits or fails."""
        if unused > 0:
            self.meter.buckets.give_back(replace(ask, cost=min(unused, ask.cost)))

    async def take_images(self, images: int) -> QuotaTaken | None:
        """Charge images, all or none; return the charge, for `Quotas.give_back`. None: there is no limit."""
        per_day = self.limits.images_per_day
        if per_day is None:
            return None
        taken = await self.meter.quotas.take(self.key, "images", images, per_day)
        if isinstance(taken, QuotaExceeded):
            raise _no_images_left(taken, images)
        return taken


class MeteredEngine:
    """One per HTTP request: all its calls together count as one running request. `kind` names them in the usage book.

    Its methods are those of `Engine`, and raise `ApiError` at a limit. With `background` nothing counts as running, and
    half of the limits per minute is kept for the key's other requests: a batch does not lock its owner out.
    """

    def __init__(  # noqa: PLR0913  # all that a request is answered with
        self,
        engine: Engine,
        meter: Meter,
        key: ApiKey,
        record: RequestRecord,
        kind: str,
        *,
        background: bool = False,
    ) -> None:
        self.limiter = meter.of(key.public_id, key.limits_in(engine.config.tiers))
        self.record = record
        self.kind = kind
        self.tier = key.tier
        self.calls = meter.calls
        self.kept = _KEPT_FROM_BACKGROUND if background else 0.0
        self._background = background
        self._engine = engine
        self._calls = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count this HTTP request as running, once for all of its calls. Raises `ApiError`."""
        self.begin_call()
        try:
            yield
        finally:
            self.end_call()

    def begin_call(self) -> None:
        """Count one more call. Raises `ApiError` if the key has too many running requests."""
        if self._calls == 0 and not self._background:
            self.limiter.begin()
        self._calls += 1

    def end_call(self) -> None:
        self._calls -= 1
        if self._calls == 0 and not self._background:
            self.limiter.end()

    async def tokens(self, request: ChatRequest | TextRequest, *, whole: bool = False) -> TokenStream:
        """Like `Engine.chat` or `Engine.text`."""
        call = _Call(self, request.model)
        stream = await call.open(TokenStream())
        owned = self._owned(partial(call.take_tokens, asked=request.max_tokens is not None))
        if isinstance(request, ChatRequest):
            return await self._engine.chat(replace(request, whole=whole, **owned), stream)
        return await self._engine.text(replace(request, **owned), stream)

    async def whole(self, request: ChatRequest | TextRequest) -> ChatResult:
        """Return a whole answer. Cancelling aborts it."""
        async with await self.tokens(request, whole=True) as stream:
            return await fold(stream)

    async def count_tokens(self, request: ChatRequest) -> int:
        return await self._without_tokens(request.model, partial(self._engine.count_tokens, request))

    async def tokenize(self, model: str, prompt: ChatRequest | str, *, special_tokens: bool) -> Tokenized:
        work = partial(self._engine.tokenize, model, prompt, special_tokens=special_tokens)
        return await self._without_tokens(model, work)

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        return await self._without_tokens(model, partial(self._engine.detokenize, model, ids))

    async def _without_tokens(self, model: str, work: Callable[[], Awaitable[_T]]) -> _T:
        """Do `work` as a call that is charged a request and no tokens."""
        call = _Call(self, model)
        await call.begin()
        try:
            done = await work()
        except BaseException as error:
            call.end(error)
            raise
        call.end(None)
        return done

    async def images(self, request: ImageRequest) -> ImageStream:
        """Like `Engine.images`. Images that were not finished are not counted, neither for the day nor as used."""
        call = _Call(self, request.model)
        stream = await call.open(ImageStream())
        return await self._engine.images(replace(request, **self._owned(call.take_images)), stream)

    async def speech(self, request: SpeechRequest) -> SpeechStream:
        """Like `Engine.speech`. What was spoken before a failure or disconnect is counted."""
        stream = await _Call(self, request.model).open(SpeechStream())
        return await self._engine.speech(replace(request, **self._owned()), stream)

    async def transcribe(self, request: TranscriptionRequest) -> TranscriptionStream:
        """Like `Engine.transcribe`. What was heard before a failure or disconnect is counted."""
        stream = await _Call(self, request.model).open(TranscriptionStream())
        return await self._engine.transcribe(replace(request, **self._owned()), stream)

    async def embed(self, request: EmbeddingRequest) -> PoolingStream:
        """Like `Engine.embed`. Tokens of inputs that were not computed are refunded."""
        call = _Call(self, request.model)
        stream = await call.open(PoolingStream())
        return await self._engine.embed(replace(request, **self._owned(call.take_input_tokens)), stream)

    async def rerank(self, request: RerankRequest) -> PoolingStream:
        """Like `Engine.rerank`."""
        call = _Call(self, request.model)
        stream = await call.open(PoolingStream())
        return await self._engine.rerank(replace(request, **self._owned(call.take_input_tokens)), stream)

    def _owned(self, before_turn: Callable[..., Awaitable[None]] | None = None) -> dict[str, Any]:
        owned: dict[str, Any] = {"owner": self.limiter.key, "queue_share": self.limiter.limits.queue_share}
        return owned if before_turn is None else {**owned, "before_turn": before_turn}


@dataclass(slots=True, eq=False)
class _Call:
    """One call of the engine: what was charged for it, and what it used.

    `open` begins it and ends it with a stream; without a stream the caller uses `begin` and `end`.
    """

    request: MeteredEngine
    model: str
    tokens: Ask | None = None
    prompt_tokens: int = 0
    images: QuotaTaken | None = None
    stream: Stream[Any] | None = None
    queued_at: float = field(default_factory=time.monotonic)

    async def open(self, stream: _Stream) -> _Stream:
        await self.begin()
        self.stream = stream
        stream.on_end(self.end)
        return stream

    async def begin(self) -> None:
        """Charge the request, before any work is done for it. Raises `ApiError`."""
        try:
            self.request.begin_call()
        except BaseException as error:
            self._settle(error)
            raise
        self.request.calls.add(self)
        try:
            with suppress(StoreUnavailableError):  # better unlimited for a moment than no service
                self._show(await self.request.limiter.take_request(kept=self.request.kept))
        except BaseException as error:
            self.end(error)
            raise

    async def take_tokens(self, prompt_tokens: int, longest_answer_tokens: int, *, asked: bool) -> None:
        """Charge the key's tokens per minute, before the call waits for its turn. Raises `ApiError`."""
        self.prompt_tokens = prompt_tokens
        limiter = self.request.limiter
        if self.tokens is not None:  # an item of a batch starts again: the engine died before its turn
            before, self.tokens = self.tokens, None  # so that it is refunded once
            limiter.give_back(before, int(before.cost))
        with suppress(StoreUnavailableError):
            tokens, kept = prompt_tokens + longest_answer_tokens, self.request.kept
            if taken := await limiter.take_tokens(tokens, asked=asked, kept=kept):
                self.tokens, level = taken
                self._show(level)
        if isinstance(self.stream, TokenStream) and self.stream.clamped and self.request.kind != "batch":
            self.request.record.headers["x-hearth-clamped"] = "max_tokens"
        self.queued_at = time.monotonic()

    async def take_input_tokens(self, tokens: int) -> None:
        """Charge the input tokens of a call that generates none. Raises `ApiError`."""
        with suppress(StoreUnavailableError):
            limiter, kept = self.request.limiter, self.request.kept
            if taken := await limiter.take_tokens(tokens, asked=True, kept=kept, makes_tokens=False):
                self.tokens, level = taken
                self._show(level)
        self.queued_at = time.monotonic()

    async def take_images(self, images: int) -> None:
        """Charge the key's images of the day, before the call waits for its turn. Raises `ApiError`."""
        with suppress(StoreUnavailableError):
            self.images = await self.request.limiter.take_images(images)
        self.queued_at = time.monotonic()

    def end(self, error: BaseException | None) -> None:
        """Refund what was not used, and count the rest in the usage book."""
        self.request.calls.discard(self)
        self.request.end_call()
        self._settle(error)

    def _show(self, level: Level | None) -> None:
        self.request.record.headers.update(_headers_of(level))

    def _settle(self, error: BaseException | None) -> None:
        request, limiter, used = self.request, self.request.limiter, self._used(error)
        if self.tokens is not None:
            limiter.give_back(self.tokens, int(self.tokens.cost) - self._tokens_spent(used))
        if self.images is not None:
            limiter.meter.quotas.give_back(self.images, self.images.count - used.images)
        if isinstance(self.stream, ImageStream):
            request.record.images = used.images or None
        if isinstance(self.stream, (SpeechStream, TranscriptionStream)):
            request.record.audio_seconds = round(used.audio_seconds, 3) or None
        limiter.meter.book.add(limiter.key, self.model, request.kind, used)
        at = None if self.stream is None else self.stream.dispatched_at
        limiter.meter.metrics.used(self.model, request.kind, used, None if at is None else at - self.queued_at)
        if at is not None and request.record.dispatched_at is None:
            request.record.queued_at, request.record.dispatched_at = self.queued_at, at

    def _tokens_spent(self, used: Usage) -> int:
        if isinstance(self.stream, PoolingStream):
            return used.prompt_tokens
        if isinstance(self.stream, TokenStream) and self.stream.usage is not None:
            return used.prompt_tokens + used.completion_tokens
        return used.prompt_tokens if used.aborted else 0  # a dispatched prompt is computed

    def _used(self, error: BaseException | None) -> Usage:
        left, stream = isinstance(error, _LEFT), self.stream
        used = Usage(requests=1, aborted=int(left), errors=int(isinstance(error, Exception) and not left))
        if isinstance(stream, ImageStream):
            return replace(used, images=stream.images)
        if isinstance(stream, (SpeechStream, TranscriptionStream)):
            return replace(used, audio_seconds=stream.seconds)
        if isinstance(stream, PoolingStream):
            return replace(used, prompt_tokens=stream.prompt_tokens)
        if isinstance(stream, TokenStream) and (spent := stream.usage) is not None:
            return replace(
                used,
                prompt_tokens=spent.prompt_tokens,
                completion_tokens=spent.completion_tokens,
                cached_tokens=spent.cached_tokens or 0,
            )
        dispatched = stream is not None and stream.dispatched_at is not None  # a dispatched prompt counts
        return replace(used, prompt_tokens=self.prompt_tokens if dispatched else 0)


def _headers_of(level: Level | None) -> dict[str, str]:
    if level is None:
        return {}
    kind = level.bucket.rpartition(":")[2]
    return {
        f"x-ratelimit-limit-{kind}": f"{level.limit:.0f}",
        f"x-ratelimit-remaining-{kind}": str(level.remaining),
        f"x-ratelimit-reset-{kind}": _duration(level.reset_seconds),
    }


def _duration(seconds: float) -> str:
    """Return a duration as the convention writes it: `350ms`, `12s`, `1m5s`."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _too_many(message: str, retry_after_seconds: float, limit: str, level: Level | None = None) -> ApiError:
    """Return the 429 of a limit that recovers within minutes."""
    wait = min(max(math.ceil(retry_after_seconds), 1), _LONGEST_RETRY_SECONDS)
    headers = {"Retry-After": str(wait), **_headers_of(level)}
    return ApiError(429, "rate_limit_exceeded", message, headers=headers, limit=limit)


def _quota_spent(message: str, limit: str) -> ApiError:
    """Return the 429 of a limit that does not recover soon: clients should not retry by themselves."""
    return ApiError(429, "insufficient_quota", message, headers={"x-should-retry": "false"}, limit=limit)


def _refusal(refused: Refused, ask: Ask, *, makes_tokens: bool) -> ApiError:
    kind = ask.bucket.rpartition(":")[2]
    if ask.limit == 0:
        return _quota_spent(f"Your key may use no {kind} at all. Ask your administrator.", f"{kind}_per_minute")
    if math.isinf(refused.retry_after_seconds):
        has, advice = f"has {ask.cost:.0f} tokens", "Send fewer or shorter texts at once."
        if makes_tokens:
            has = f"may need {ask.cost:.0f} tokens (the prompt, and as many as `max_tokens` allows)"
            advice = "Ask for fewer with `max_tokens`, or shorten the prompt."
        message = f"This request {has}, and your key has {ask.limit:.0f} per minute. {advice}"
        return ApiError(400, "invalid_value", message, param="max_tokens" if makes_tokens else None)
    asked, advice = "", "Your administrator can raise the limit."
    if kind == "tokens":
        asked = f" This request may need {ask.cost:.0f}."
        advice = "Ask for fewer with `max_tokens`." if makes_tokens else "Send fewer or shorter texts at once."
    return _too_many(
        f"Rate limit reached: {ask.limit:.0f} {kind} per minute.{asked} Try again in"
        f" {_duration(refused.retry_after_seconds)}. {advice}",
        refused.retry_after_seconds,
        f"{kind}_per_minute",
        refused.level,
    )


def _no_images_left(spent: QuotaExceeded, images: int) -> ApiError:
    if spent.limit == 0:
        return _quota_spent("Your key may make no images at all. Ask your administrator.", "images_per_day")
    hours, minutes = divmod(int(spent.reset_seconds) // 60, 60)
    fewer = " Ask for fewer with `n`, or" if 0 < spent.remaining < images else " Until then"
    return _quota_spent(
        f"Your key may make {spent.limit} image{'s' * (spent.limit > 1)} a day and has {spent.remaining} left; this"
        f" request asks for {images}. The next day begins at midnight UTC, in {hours} h {minutes} min.{fewer} ask your"
        " administrator for more.",
        "images_per_day",
    )
