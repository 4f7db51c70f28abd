"""The engine as one HTTP request may use it: every call is held to the key's limits and written into the usage book.

Routes call it like the engine itself. What the limits are is limits.py's, in what order calls run the engine's.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from engine import ChatRequest, FinishedImage
from server.hangup import ClientGoneError
from server.limits import headers_of
from server.store import StoreUnavailableError
from server.store import Usage as Used

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator

    from engine import (
        ChatResult,
        ChatStep,
        Engine,
        ImageEvent,
        ImageRequest,
        SpeechChunk,
        SpeechRequest,
        TextRequest,
        Usage,
    )
    from engine.types import OnStep
    from server.access_log import RequestRecord
    from server.image_quota import ImageQuota
    from server.limits import Limiter
    from server.metrics import Metrics
    from server.store import ApiKey, Ask, QuotaTaken, UsageBook

_Request = TypeVar("_Request", "ChatRequest", "TextRequest")


@dataclass(slots=True)
class _Call:
    """One call of the engine: what was taken for it, and what it has used so far."""

    request_put_off: bool = False
    reserved: int = 0
    tokens: Ask | None = None
    prompt_tokens: int = 0
    began: bool = False
    usage: Usage | None = None
    images: int = 0  # that are finished
    images_asked: int = 0
    images_taken: QuotaTaken | None = None
    audio_seconds: float = 0.0
    queued_at: float = field(default_factory=time.monotonic)
    waited_seconds: float | None = None
    errors: int = 0  # 1 if it failed
    aborted: int = 0  # 1 if its client left

    def begin(self) -> None:
        """Its turn has come: from here on it costs."""
        self.began = True
        self.waited_seconds = time.monotonic() - self.queued_at

    def noting(self, on_step: OnStep | None) -> OnStep | None:
        """Note the usage of steps that are never yielded, too: tokens count that were made, whoever got them."""
        if on_step is None:
            return None

        def noted(step: ChatStep) -> bool:
            self.usage = step.usage
            return on_step(step)

        return noted

    def tokens_spent(self) -> int:
        """How many of the tokens that were taken for it are not given back, once it has ended."""
        if self.usage is not None:
            return self.usage.prompt_tokens + self.usage.completion_tokens
        # Left before its end, and not streamed: nobody knows how far it had come, so what was taken stays taken.
        return self.reserved if self.began and self.aborted else 0

    def used(self) -> Used:
        """Return what goes into the usage book, once it has ended."""
        usage = self.usage
        return Used(
            requests=1,
            prompt_tokens=usage.prompt_tokens if usage else self.prompt_tokens if self.began else 0,
            completion_tokens=usage.completion_tokens if usage else 0,
            cached_tokens=(usage.cached_tokens or 0) if usage else 0,
            images=self.images,
            audio_seconds=self.audio_seconds,
            errors=self.errors,
            aborted=self.aborted,
        )


@dataclass(frozen=True, slots=True)
class Meter:
    """What a process keeps of all keys: what they may use, and what they have used."""

    limiter: Limiter
    book: UsageBook
    images: ImageQuota
    metrics: Metrics


class MeteredEngine:
    """Made anew for each HTTP request; all calls of one request count as one that runs."""

    def __init__(self, engine: Engine, meter: Meter, key: ApiKey, record: RequestRecord, *, kind: str) -> None:
        self._engine = engine
        self._meter = meter
        self._key = key
        self._record = record
        self._kind = kind
        self._calls = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count this HTTP request as one that runs, once however many calls it makes. Raises `ApiError`."""
        with self._meter.limiter.one_more(self._key) if self._calls == 0 else nullcontext():
            self._calls += 1
            try:
                yield
            finally:
                self._calls -= 1

    async def chat(self, request: ChatRequest) -> ChatResult:
        """Like `Engine.chat`; raises `ApiError` where a limit is met."""
        async with self._call(request.model, takes_tokens=True) as call:
            result = await self._engine.chat(self._known(request, call))
            call.usage = result.usage
            return result

    async def chat_stream(self, request: ChatRequest) -> AsyncGenerator[ChatStep, None]:
        """Like `Engine.chat_stream`; raises `ApiError` where a limit is met, before the first step."""
        async with (
            self._call(request.model, takes_tokens=True) as call,
            aclosing(self._engine.chat_stream(self._known(request, call))) as steps,
        ):
            async for step in steps:
                call.usage = step.usage
                yield step

    async def text(self, request: TextRequest) -> ChatResult:
        """Like `Engine.text`."""
        async with self._call(request.model, takes_tokens=True) as call:
            result = await self._engine.text(self._known(request, call))
            call.usage = result.usage
            return result

    async def text_stream(self, request: TextRequest) -> AsyncGenerator[ChatStep, None]:
        """Like `Engine.text_stream`."""
        async with (
            self._call(request.model, takes_tokens=True) as call,
            aclosing(self._engine.text_stream(self._known(request, call))) as steps,
        ):
            async for step in steps:
                call.usage = step.usage
                yield step

    async def count_tokens(self, request: ChatRequest) -> int:
        """Like `Engine.count_tokens`. It costs a request and no tokens."""
        async with self._call(request.model):
            return await self._engine.count_tokens(request)

    async def images(self, request: ImageRequest) -> AsyncGenerator[ImageEvent, None]:
        """Like `Engine.images`. Images that were not finished are not counted, neither for the day nor as used."""
        async with (
            self._call(request.model) as call,
            aclosing(self._engine.images(self._known_images(request, call))) as events,
        ):
            async for event in events:
                if isinstance(event, FinishedImage):
                    call.images += 1
                    self._record.images = call.images
                yield event

    async def speech(self, request: SpeechRequest) -> AsyncGenerator[SpeechChunk, None]:
        """Like `Engine.speech`. What was spoken until its client left or it failed is counted."""
        share = self._meter.limiter.limits(self._key).queue_share
        known = replace(request, owner=self._key.public_id, queue_share=share)
        async with (
            self._call(request.model) as call,
            aclosing(self._engine.speech(replace(known, on_turn=call.begin))) as chunks,
        ):
            async for chunk in chunks:
                call.audio_seconds += chunk.seconds
                self._record.audio_seconds = round(call.audio_seconds, 3)
                yield chunk

    def _known_images(self, request: ImageRequest, call: _Call) -> ImageRequest:
        limits = self._meter.limiter.limits(self._key)

        async def take(images: int) -> None:
            if limits.images_per_day is None:
                return
            with suppress(StoreUnavailableError):  # as for tokens: better unlimited for a moment than nobody served
                call.images_taken = await self._meter.images.take(self._key.public_id, images, limits.images_per_day)
                call.images_asked = images
            call.queued_at = time.monotonic()

        return replace(
            request,
            owner=self._key.public_id,
            queue_share=limits.queue_share,
            before_turn=take,
            on_turn=call.begin,
        )

    def _known(self, request: _Request, call: _Call) -> _Request:
        async def take(prompt_tokens: int, longest_answer_tokens: int) -> None:
            asked = request.max_tokens is not None
            call.prompt_tokens = prompt_tokens
            await self._take(call, prompt_tokens + longest_answer_tokens, asked=asked)
            call.queued_at = time.monotonic()

        known: dict[str, Any] = {
            "owner": self._key.public_id,
            "queue_share": self._meter.limiter.limits(self._key).queue_share,
            "before_turn": take,
            "on_turn": call.begin,
        }
        if isinstance(request, ChatRequest):
            known["on_step"] = call.noting(request.on_step)
        return replace(request, **known)

    async def _take(self, call: _Call, tokens: int, *, asked: bool) -> None:
        if call.tokens is not None:  # a batch's item that starts over, since the engine died before its turn
            self._meter.limiter.give_back(call.tokens, call.reserved)
            call.tokens, call.reserved = None, 0  # not once more, should the next lines fail
        try:
            put_off, call.request_put_off = call.request_put_off, False
            call.tokens, levels = await self._meter.limiter.take_tokens(self._key, tokens, asked=asked, put_off=put_off)
        except StoreUnavailableError:
            return  # better unlimited for a moment than nobody served; keys are checked all the same
        call.reserved = 0 if call.tokens is None else int(call.tokens.cost)
        self._record.headers.update(headers_of(levels))

    async def _count_request(self, call: _Call, *, takes_tokens: bool) -> None:
        """Before any work is done for it; together with its tokens where nothing speaks against that."""
        levels = self._meter.limiter.put_off_request(self._key) if takes_tokens else None
        call.request_put_off = levels is not None
        if levels is None:
            try:
                levels = await self._meter.limiter.take_request(self._key)
            except StoreUnavailableError:
                return
        self._record.headers.update(headers_of(levels))

    @asynccontextmanager
    async def _call(self, model: str, *, takes_tokens: bool = False) -> AsyncIterator[_Call]:
        call = _Call()
        try:
            with self.running():
                await self._count_request(call, takes_tokens=takes_tokens)
                yield call
        except (asyncio.CancelledError, GeneratorExit, ClientGoneError):
            call.aborted = 1
            raise
        except Exception:
            call.errors = 1
            raise
        finally:
            self._settle(model, call)

    def _settle(self, model: str, call: _Call) -> None:
        meter, key_id = self._meter, self._key.public_id
        if call.request_put_off:
            meter.limiter.charge_request(self._key)
        if call.tokens is not None:
            meter.limiter.give_back(call.tokens, call.reserved - call.tokens_spent())
        if call.images_taken is not None:
            meter.images.give_back(key_id, call.images_asked - call.images, call.images_taken)
        used = call.used()
        meter.book.add(key_id, model, self._kind, used)
        meter.metrics.used(model, self._kind, used, call.waited_seconds)
