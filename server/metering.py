"""The engine as one HTTP request may use it: every call is held to the key's limits and written into the usage book.

Routes call it like the engine itself. What the limits are is limits.py's, in what order calls run the engine's.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from engine import ChatRequest
from engine.chat_fold import fold
from engine.stream import ImageStream, SpeechStream, TokenStream
from server.metered_call import MeteredCall, MeteredRequest
from server.store import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from engine import (
        ChatResult,
        Engine,
        ImageRequest,
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
