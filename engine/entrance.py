"""How a request gets to a chat model: held back or let in as background work first, then the model is held for it.

The order matters. Whoever holds a model keeps it from making room for another one, so that nothing is waited for with
a model in hand which somebody may have who waits for that model. Hence: the place as background work, then the model.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from engine.background import BackgroundSlots
from engine.config import ChatModelSpec
from engine.fair_queue import Urgency

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager

    from engine.config import ModelSpec
    from engine.pool import Pool
    from engine.types import ChatRequest, TextRequest


class Entrance:
    """One per engine. All methods belong to the event loop."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._background: dict[str, BackgroundSlots] = {}

    def size(self, specs: Iterable[ModelSpec]) -> None:
        """Take on these models, or their new sizes; what runs goes on."""
        for spec in specs:
            if not isinstance(spec, ChatModelSpec):
                continue
            size = spec.engine.max_num_seqs - spec.engine.places_for_people
            beside = max(1, size // 32)
            if spec.id in self._background:
                self._background[spec.id].resize(size, beside=beside)
            else:
                self._background[spec.id] = BackgroundSlots(size, beside=beside)

    def enter(self, request: ChatRequest | TextRequest, sequences: int) -> AbstractAsyncContextManager[None]:
        """Hold background work back meanwhile, or wait as background work; and hold the model.

        What is not interactive waits for its model if that is being restarted. Raises what `Pool.get` does, the model
        need not be one that takes turns and has its turn.
        """
        if request.urgency == Urgency.INTERACTIVE:
            return _Interactive(self._pool, self._background, request.model)
        return self._as_background(request, sequences)

    @contextlib.asynccontextmanager
    async def _as_background(self, request: ChatRequest | TextRequest, sequences: int) -> AsyncIterator[None]:
        model = request.model
        await self._pool.revived(model)  # before it waits: it is told at once if there is no such model
        async with self._background[model].take(request, sequences), self._pool.using(model):
            await self._pool.revived(model)
            yield


class _Interactive:
    """No generator: most requests come this way."""

    __slots__ = ("_background", "_model", "_pool")

    def __init__(self, pool: Pool, background: Mapping[str, BackgroundSlots], model: str) -> None:
        self._pool = pool
        self._background = background
        self._model = model

    async def __aenter__(self) -> None:
        await self._pool.hold(self._model)
        try:
            self._pool.get(self._model)
            self._background[self._model].hold_back()
        except BaseException:
            self._pool.release(self._model)
            raise

    async def __aexit__(self, *_: object) -> None:
        try:
            self._background[self._model].let_go()
        finally:
            self._pool.release(self._model)
