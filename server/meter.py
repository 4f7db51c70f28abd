"""What a process keeps of all keys: what they may use, and what they have used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.image_quota import ImageQuota
    from server.limits import Limiter
    from server.metrics import Metrics
    from server.store import UsageBook


@dataclass(frozen=True, slots=True)
class Meter:
    """Made once; each call of the engine is held to it."""

    limiter: Limiter
    book: UsageBook
    images: ImageQuota
    metrics: Metrics
