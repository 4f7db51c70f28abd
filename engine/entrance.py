"""How a request gets to a chat model: held back or let in as background work first, then the model is held for it.

The order matters. Whoever holds a model keeps it from making room for another one, so that nothing is waited for with
a model in hand which somebody may have who waits for that model. Hence: the place as background work, then the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.background import BackgroundSlots
from engine.config import ChatModelSpec
from engine.fair_queue import Urgency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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

    async def enter(self, request: ChatRequest | TextRequest, sequences: int) -> Callable[[], None]:
        """Hold background work back, or wait as background work; and acquire the model. Returns what releases both.

        What is not interactive waits for its model if that is being restarted. Raises what `Pool.get` does, the model
        need not be one that takes turns and has its turn.
        """
        model, pool, background = request.model, self._pool, self._background
        if request.urgency != Urgency.INTERACTIVE:
            return await self._enter_background(request, sequences)
        await pool.hold(model)
        try:
            pool.get(model)
            background[model].hold_back()
        except BaseException:
            pool.release(model)
            raise

        def release() -> None:
            background[model].let_go()
            pool.release(model)

        return release

    async def _enter_background(self, request: ChatRequest | TextRequest, sequences: int) -> Callable[[], None]:
        model, pool = request.model, self._pool
        await pool.revived(model)  # before it waits: an unknown model is refused at once
        give_back = await self._background[model].take(request, sequences)
        try:
            await pool.hold(model)
            try:
                await pool.revived(model)
            except BaseException:
                pool.release(model)
                raise
        except BaseException:
            give_back()
            raise

        def release() -> None:
            pool.release(model)
            give_back()

        return release
