"""Images of a key per day: taken before the work begins, and what was not made given back after it.

The counting is the store's (quotas.py), which limit a key has limits.py's.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Self

from server.limits import quota_spent
from server.side_tasks import SideTasks
from server.store import QuotaTaken, StoreUnavailableError

if TYPE_CHECKING:
    from types import TracebackType

    from server.store import QuotaExceeded, Quotas

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
