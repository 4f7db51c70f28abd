"""What a key may still do: its tier's limits, changed by its own, taken before work begins and given back after it.

Exactness is the store's (buckets, quotas); which requests count, and what a refused client reads, is decided here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Self

from engine import Config, TierSpec
from engine.fair_queue import InFlight
from server.errors import ApiError
from server.store import (
    ApiKey,
    Ask,
    Buckets,
    Level,
    QuotaExceeded,
    Quotas,
    QuotaTaken,
    Refused,
    StoreUnavailableError,
    TooLarge,
)
from server.tasks import SideTasks

_LONGEST_RETRY_SECONDS = 120
_IMAGES = "images"
_log = logging.getLogger("hearth.limits")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one key; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    parallel_requests: int | None = None
    batch_items: int | None = None
    images_per_day: int | None = None
    queue_share: float = 1.0


def limits_of(key: ApiKey, tier: TierSpec | None) -> Limits:
    """Return the tier's limits with those that the key has of its own."""
    if tier is None:  # it was taken out of models.yaml: no model is left to use either
        return Limits()
    names = ("requests_per_minute", "tokens_per_minute", "parallel_requests", "batch_items", "images_per_day")
    own = {name: getattr(key.limits, name) for name in names}
    merged = {name: getattr(tier, name) if value is None else value for name, value in own.items()}
    return Limits(**merged, queue_share=tier.queue_share)


class Limiter:
    """Takes and gives back, for all keys. One per process; the buckets are shared with other processes."""

    def __init__(self, config: Config, buckets: Buckets) -> None:
        self._config = config
        self._buckets = buckets
        self._parallel = InFlight()
        # One of each per key at most.
        self._limits: dict[str, tuple[ApiKey, Limits]] = {}
        self._seen: dict[str, tuple[Level, float]] = {}  # request buckets as the last answers showed them, and when
        self._deferred: Counter[str] = Counter()  # requests that are counted with their tokens

    def use(self, config: Config) -> None:
        """From now on these are the tiers."""
        self._config = config
        self._limits.clear()

    def limits(self, key: ApiKey) -> Limits:
        """Return the limits of a key as they are now. Asked for several times per request, and so kept."""
        known, limits = self._limits.get(key.public_id, (None, None))
        if limits is None or known is not key:  # another object: the key was read again, and may have changed
            limits = limits_of(key, self._config.tiers.get(key.tier))
            self._limits[key.public_id] = (key, limits)
        return limits

    def begin(self, key: ApiKey) -> None:
        """Count a request as running or waiting, until `end`. Raises `ApiError` when the key has too many of them."""
        most = self.limits(key).parallel_requests
        if most == 0:
            raise quota_spent("Your key may run no requests at all. Ask whoever runs this server.")
        if most is not None and self._parallel.of(key.public_id) >= most:
            raise too_many(
                f"Your key may have {most} requests running at the same time, and has. Wait for one of them to end.",
                retry_after_seconds=1,
            )
        self._parallel.add(key.public_id)

    def end(self, key: ApiKey) -> None:
        """Count one less."""
        self._parallel.remove(key.public_id)

    def refuse_early(self, key: ApiKey) -> None:
        """Raise `ApiError` for a key whose last answer said that it has no request left at this moment.

        Before any work is done for the request. A key of which nothing is known passes: `take` is what counts.
        """
        level, at = self._seen.get(key.public_id, (None, 0.0))
        most = self.limits(key).requests_per_minute
        if level is None or not most or level.limit != most:
            return
        used = level.reset_seconds - (time.monotonic() - at)
        wait = used - 60 * (1 - 1 / most)
        if wait > 0:
            spent = replace(level, remaining=0, reset_seconds=used)
            raise _refusal(Refused(level.bucket, wait, (spent,)), _one_request(key, most))

    def defer(self, key: ApiKey) -> bool:
        """Whether a request may be counted later, together with its tokens, until `end_deferral`.

        Only as many at a time as the key has requests left by its last answer: others would be rendered in vain.
        """
        if self.limits(key).tokens_per_minute is None:
            return False
        most = self.limits(key).requests_per_minute
        level, _ = self._seen.get(key.public_id, (None, 0.0))
        if most is not None:
            left = 0 if level is None or level.limit != most else level.remaining
            if left - self._deferred[key.public_id] < 1:
                return False
        self._deferred[key.public_id] += 1
        return True

    def end_deferral(self, key: ApiKey) -> None:
        """Count one less that is counted later."""
        self._deferred[key.public_id] -= 1
        if not self._deferred[key.public_id]:
            del self._deferred[key.public_id]

    async def take(
        self, key: ApiKey, tokens: int | None = None, *, request: bool = True, asked: bool = False
    ) -> tuple[Ask | None, tuple[Level, ...]]:
        """Take a request and `tokens` from the key's buckets, both or neither.

        With `asked` the client itself asked for so many tokens: more than the bucket ever holds is then refused. Else
        they are what the model would allow, which is no reason to refuse a short answer: all there is will do.
        Returns the tokens that were taken, for `give_back`, and how full the buckets are. Raises `ApiError`.
        """
        limits, asks, of_tokens = self.limits(key), [], None
        if request and limits.requests_per_minute is not None:
            asks.append(_one_request(key, limits.requests_per_minute))
        if tokens is not None and limits.tokens_per_minute is not None:
            most = limits.tokens_per_minute
            cost = tokens if asked or not most else min(tokens, most)
            of_tokens = Ask.per_minute(f"{key.public_id}:tokens", cost, most)
            asks.append(of_tokens)
        if not asks:
            return None, ()
        taken = await self._buckets.take(*asks)
        if isinstance(taken, TooLarge):
            raise _never_fits(taken)
        for level in taken.levels:
            if level.bucket.endswith(":requests"):
                self._seen[key.public_id] = level, time.monotonic()
        if isinstance(taken, Refused):
            raise _refusal(taken, next(ask for ask in asks if ask.bucket == taken.bucket))
        return of_tokens, taken.levels

    def charge(self, key: ApiKey) -> None:
        """Take a request whose client has left. Never waits or fails."""
        if most := self.limits(key).requests_per_minute:
            self._buckets.charge(_one_request(key, most))

    def give_back(self, ask: Ask, unused: int) -> None:
        """Give back tokens of what was taken. Never waits or fails."""
        if unused > 0:
            self._buckets.give_back(replace(ask, cost=min(unused, ask.cost)))


def _one_request(key: ApiKey, most: int) -> Ask:
    return Ask.per_minute(f"{key.public_id}:requests", 1, most)


class ImageQuota:
    """Images per day, of all keys by their public ids. Use as `async with`, on one event loop."""

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
        taking = self._tasks.start(self._quotas.take(key, _IMAGES, images, per_day))
        try:
            taken = await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(partial(self._came_late, key, images))
            raise
        if isinstance(taken, QuotaTaken):
            return taken
        raise _no_images_left(taken, images)

    def give_back(self, key: str, images: int, taken: QuotaTaken) -> None:
        """Uncount images that were not made. Does not wait or fail."""
        if images > 0:
            self._tasks.start(self._try_to_give_back(key, images, taken))

    async def _try_to_give_back(self, key: str, images: int, taken: QuotaTaken) -> None:
        try:
            await self._quotas.give_back(key, _IMAGES, images, taken.day)
        except StoreUnavailableError as error:
            _log.warning("%d images of key %s stay counted for today: %s", images, key, error.message)

    def _came_late(self, key: str, images: int, taking: asyncio.Task[QuotaTaken | QuotaExceeded]) -> None:
        if not taking.cancelled() and taking.exception() is None and isinstance(taken := taking.result(), QuotaTaken):
            self.give_back(key, images, taken)


def headers_of(levels: tuple[Level, ...]) -> dict[str, str]:
    """Return `x-ratelimit-*` headers, of the buckets that the key has."""
    headers = {}
    for level in levels:
        kind = level.bucket.rpartition(":")[2]
        headers[f"x-ratelimit-limit-{kind}"] = f"{level.limit:.0f}"
        headers[f"x-ratelimit-remaining-{kind}"] = str(level.remaining)
        headers[f"x-ratelimit-reset-{kind}"] = duration(level.reset_seconds)
    return headers


def duration(seconds: float) -> str:
    """Return a duration as the convention writes it: `350ms`, `12s`, `1m5s`."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def too_many(message: str, *, retry_after_seconds: float, headers: dict[str, str] | None = None) -> ApiError:
    """Make the error of a limit that passes with time."""
    wait = min(max(math.ceil(retry_after_seconds), 1), _LONGEST_RETRY_SECONDS)
    return ApiError(
        429,
        "rate_limit_exceeded",
        message,
        type="rate_limit_error",
        headers={"Retry-After": str(wait), **(headers or {})},
    )


def quota_spent(message: str) -> ApiError:
    """Make the error of a limit that does not pass soon: clients should not try again by themselves."""
    return ApiError(429, "insufficient_quota", message, type="rate_limit_error", headers={"x-should-retry": "false"})


def _refusal(refused: Refused, ask: Ask) -> ApiError:
    kind = refused.bucket.rpartition(":")[2]
    asked = f" This request may need {ask.cost:.0f}." if kind == "tokens" else ""
    advice = (
        " Ask for fewer with `max_tokens`." if kind == "tokens" else " Whoever runs this server can raise the limit."
    )
    return too_many(
        f"Rate limit reached: {ask.burst:.0f} {kind} per minute.{asked} Try again in"
        f" {duration(refused.retry_after_seconds)}.{advice}",
        retry_after_seconds=refused.retry_after_seconds,
        headers=headers_of(refused.levels),
    )


def _never_fits(large: TooLarge) -> ApiError:
    kind = large.bucket.rpartition(":")[2]
    if large.burst == 0:
        return quota_spent(f"Your key may use no {kind} at all. Ask whoever runs this server.")
    return ApiError(
        400,
        "invalid_value",
        f"This request may need {large.cost:.0f} tokens (the prompt, and as many as `max_tokens` allows), and your key "
        f"has {large.burst:.0f} per minute. Ask for fewer with `max_tokens`, or shorten the prompt.",
        param="max_tokens",
    )


def _no_images_left(spent: QuotaExceeded, images: int) -> ApiError:
    if spent.limit == 0:
        return quota_spent("Your key may make no images at all. Ask whoever runs this server.")
    hours, minutes = divmod(int(spent.reset_seconds) // 60, 60)
    fewer = " Ask for fewer with `n`, or" if 0 < spent.remaining < images else " Until then"
    return quota_spent(
        f"Your key may make {spent.limit} images a day and has {spent.remaining} of them left; this request asks for"
        f" {images}. The next day begins at midnight UTC, in {hours} h {minutes} min.{fewer} ask whoever runs this"
        " server for more."
    )
