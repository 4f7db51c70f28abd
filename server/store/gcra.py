"""The arithmetic of a leaky bucket kept as one number, and its statement for both databases.

The number is the time at which the bucket would be full again (the generic cell rate algorithm's theoretical
arrival time, ITU-T I.371), in whole nanoseconds since 1970, so that no rounding lets a request too many through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

_SECOND = 1_000_000_000
_LONGEST_WINDOW = 2**61  # nanoseconds, 73 years: with the time of day still within 64 bits


@dataclass(frozen=True, slots=True)
class Ask:
    """`cost` units of the bucket with this name, which holds `burst` and refills at `rate_per_second`.

    Raises ValueError for numbers that make no bucket. A bucket with burst 0 holds nothing, ever.
    """

    bucket: str
    cost: float
    rate_per_second: float
    burst: float

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.cost, self.rate_per_second, self.burst))):
            raise ValueError(f"bucket {self.bucket}: cost, rate and burst must be finite numbers")
        if self.cost < 0 or self.burst < 0 or (self.rate_per_second <= 0 and self.burst > 0):
            raise ValueError(f"bucket {self.bucket}: cost and burst must not be negative, the rate positive")
        if self.window > _LONGEST_WINDOW:
            raise ValueError(f"bucket {self.bucket}: it would take more than 73 years to refill")

    @classmethod
    def per_minute(cls, bucket: str, cost: float, limit: float) -> Self:
        """A bucket that holds a minute's worth. With limit 0 it holds nothing."""
        return cls(bucket, cost, limit / 60, limit)

    @property
    def nanoseconds(self) -> int:
        """How long the cost takes to flow back."""
        return int(self.cost / self.rate_per_second * _SECOND) if self.rate_per_second else 0

    @property
    def window(self) -> int:
        """How long an empty bucket takes to fill, in nanoseconds."""
        return round(self.burst / self.rate_per_second * _SECOND) if self.rate_per_second else 0


@dataclass(frozen=True, slots=True)
class Level:
    """How full a bucket is: for the headers x-ratelimit-limit, -remaining and -reset (seconds until full)."""

    bucket: str
    limit: float
    remaining: int
    reset_seconds: float


@dataclass(frozen=True, slots=True)
class Taken:
    """All of it was taken. `levels` are those afterwards, in the order asked."""

    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was taken: `bucket` is too empty, and for this cost will be so for `retry_after_seconds` at least."""

    bucket: str
    retry_after_seconds: float
    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Nothing was taken, and waiting will not help: the cost is more than `bucket` ever holds."""

    bucket: str
    cost: float
    burst: float


def level(ask: Ask, tat: int | None, now: int) -> Level:
    used = min(ask.window, max(0, (tat or 0) - now))
    per_unit = _SECOND / ask.rate_per_second if ask.rate_per_second else 0
    # A hair is added before rounding down: 20 units that were cut to whole nanoseconds are still 20
    remaining = int((ask.window - used) / per_unit + 1e-6) if per_unit else 0
    return Level(ask.bucket, ask.burst, remaining, used / _SECOND)


def retry_after_seconds(ask: Ask, tat: int | None, now: int) -> float:
    used = min(ask.window, max(0, (tat or 0) - now))
    return max(0, used + ask.nanoseconds - ask.window) / _SECOND


@dataclass(frozen=True, slots=True)
class Statements:
    """The SQL of one kind of database, with its driver's placeholders."""

    begin: str
    take: str
    take_two: str | None
    look: str
    bring_back: str
    give_back: str
    forget: str


def _statements(begin: str, greatest: str, now: str, placeholder: str, take_two: str | None = None) -> Statements:
    def written(sql: str) -> str:
        # :full is the bucket's time, or now where that has passed: a bucket is never more than full
        sql = sql.replace(":full", f"{greatest}(bucket.tat, :now)").replace(":now", now)
        for name in ("bucket", "cost", "window"):
            sql = sql.replace(f":{name}", placeholder.format(name))
        return sql

    return Statements(
        begin=begin,
        take_two=take_two,
        # No row comes back when it does not fit. The first of a bucket always fits: see TooLarge.
        take=written(
            "INSERT INTO bucket (name, tat) VALUES (:bucket, :now + :cost) "
            "ON CONFLICT (name) DO UPDATE SET tat = :full + :cost WHERE :full + :cost - :now <= :window "
            "RETURNING tat, :now"
        ),
        look=written("SELECT (SELECT tat FROM bucket WHERE name = :bucket), :now"),
        bring_back=written("UPDATE bucket SET tat = :now + :window WHERE name = :bucket AND tat > :now + :window"),
        give_back=written("UPDATE bucket SET tat = tat - :cost WHERE name = :bucket"),
        forget=written("DELETE FROM bucket WHERE tat < :now"),
    )


# From two buckets that are there already, in one round trip and not four; from both or from none. The rows are locked
# in one order everywhere, since two takes would else wait for each other, and the clock is read when it has them.
_NOW = "CAST(extract(epoch FROM clock_timestamp()) * 1000000000 AS bigint)"
_TAKE_TWO = (
    "WITH ask (name, cost, span) AS (VALUES (%(bucket0)s::text, %(cost0)s::bigint, %(window0)s::bigint), "
    "(%(bucket1)s, %(cost1)s, %(window1)s)), "
    "there AS MATERIALIZED (SELECT bucket.name, bucket.tat FROM bucket JOIN ask ON ask.name = bucket.name "
    "ORDER BY bucket.name FOR UPDATE OF bucket), "
    "moment AS MATERIALIZED (SELECT :now AS now FROM (SELECT count(*) FROM there) AS locked), "
    "room AS MATERIALIZED (SELECT count(*) AS buckets FROM there JOIN ask ON ask.name = there.name, moment "
    "WHERE greatest(there.tat, moment.now) + ask.cost - moment.now <= ask.span) "
    "UPDATE bucket SET tat = greatest(bucket.tat, moment.now) + ask.cost FROM ask, moment, room "
    "WHERE bucket.name = ask.name AND room.buckets = 2 RETURNING bucket.name, bucket.tat, moment.now"
).replace(":now", _NOW)

STATEMENTS = {
    "sqlite": _statements("BEGIN IMMEDIATE", "max", ":now", ":{}"),
    # The server's clock, so that hosts need not agree on theirs; read anew each time, after waiting for the row
    "postgresql": _statements("BEGIN", "greatest", _NOW, "%({})s", _TAKE_TWO),
}
