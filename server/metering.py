"""The engine as one HTTP request may use it: every call is held to the key's limits and written into the usage book.

Routes call it like the engine itself. What the limits are is limits.py's, in what order calls run the engine's.
"""

from __future__ import annotations

import time
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from engine import ChatRequest, FinishedImage
from engine.chat_fold import fold
from engine.stream import TokenStream
from server.metered_call import MeteredCall, MeteredRequest
from server.store import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from engine import (
        ChatResult,
        Engine,
        ImageEvent,
        ImageRequest,
        SpeechChunk,
        SpeechRequest,
        TextRequest,
    )
    from server.access_log import RequestRecord
    from server.meter import Meter
    from server.store import ApiKey

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

    async def images(self, request: ImageRequest) -> AsyncGenerator[ImageEvent, None]:
        """Like `Engine.images`. Images that were not finished are not counted, neither for the day nor as used."""
        async with (
            MeteredCall(self._request, request.model) as call,
            aclosing(self._engine.images(self._known_images(request, call))) as events,
        ):
            async for event in events:
                if isinstance(event, FinishedImage):
                    call.images += 1
                    self._request.record.images = call.images
                yield event

    async def speech(self, request: SpeechRequest) -> AsyncGenerator[SpeechChunk, None]:
        """Like `Engine.speech`. What was spoken until its client left or it failed is counted."""
        share = self._request.limits.queue_share
        known = replace(request, owner=self._request.key.public_id, queue_share=share)
        async with (
            MeteredCall(self._request, request.model) as call,
            aclosing(self._engine.speech(replace(known, on_turn=call.dispatched))) as chunks,
        ):
            async for chunk in chunks:
                call.audio_seconds += chunk.seconds
                self._request.record.audio_seconds = round(call.audio_seconds, 3)
                yield chunk

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
            on_turn=call.dispatched,
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
