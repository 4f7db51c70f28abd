"""The statements of the buckets, run in one thread on a plain connection.

That is a tenth of what they cost through the asynchronous layers. `buckets.py` owns the thread and is the only user.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

from server.store.errors import StoreUnavailableError
from server.store.gcra import STATEMENTS, Ask, Level, Refused, Taken, level, retry_after_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from server.store.database import Database

T = TypeVar("T")


class Work:
    """One piece of work. `returns`, nanoseconds by bucket, are given back before anything is taken.

    After an error `may_be_done` and `may_be_returned` tell what must not be tried again.
    """

    def __init__(self, asks: Sequence[Ask], returns: dict[str, int], wait_seconds: float) -> None:
        self.asks = asks
        self.returns = returns
        self.deadline = time.monotonic() + wait_seconds
        self.may_be_done = False
        self.may_be_returned = False


class BucketStatements:
    """What runs in the thread. Errors are StoreUnavailableError; the next call then connects anew."""

    def __init__(self, database: Database, clock_nanoseconds: Callable[[], int]) -> None:
        self._database = database
        self._clock = clock_nanoseconds
        self._sql = STATEMENTS[database.kind]
        self._connection: Any = None
        self._cursor: Any = None  # one for all: making one is a tenth of what a statement costs

    def take(self, work: Work) -> Taken | Refused:
        return self._run(work, self._take)

    def look(self, work: Work) -> tuple[Level, ...]:
        return self._run(work, self._levels)

    def give_back(self, work: Work) -> None:
        self._run(work, self._give_back)

    def forget_full(self, work: Work) -> None:
        """Drop the rows of full buckets: none is needed to know that."""
        self._run(work, lambda _: self._cursor.execute(self._sql.forget, {"now": self._clock()}))

    def close(self) -> None:
        connection, self._connection, self._cursor = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def _run(self, work: Work, step: Callable[[Work], T]) -> T:
        if time.monotonic() > work.deadline:  # it waited behind others that found the database locked
            raise StoreUnavailableError("The key database is busy. Try again in a few seconds.")
        with self._database.translated():
            self._database.check()
            try:
                return self._connected(work, step)
            except BaseException:
                self.close()
                raise

    def _connected(self, work: Work, step: Callable[[Work], T]) -> T:
        if self._connection is None:
            self._connect()
            return step(work)
        try:
            return step(work)
        except Exception:
            # PostgreSQL was restarted since the last call: once more, unless it may have happened already
            if not getattr(self._connection, "broken", False) or work.may_be_done or work.may_be_returned:
                raise
        self.close()
        self._connect()
        return step(work)

    def _connect(self) -> None:
        self._connection = self._database.plain()
        self._cursor = self._connection.cursor()

    def _take(self, work: Work) -> Taken | Refused:
        self._give_back(work)
        if len(work.asks) == 1:
            # The statement is a transaction by itself, which spares PostgreSQL two of three round trips. What it
            # refuses is asked again below: on SQLite its clock was read before it waited for the write lock. Where the
            # connection breaks at this very moment, it may count twice.
            row = self._ask(self._sql.take, work.asks[0]).fetchone()
            if row is not None:
                return Taken((level(work.asks[0], *row),))
        if self._sql.take_two is not None and len(work.asks) == 2:  # likewise, where both are there and have room
            rows = {name: state for name, *state in self._ask_two(self._sql.take_two, *work.asks).fetchall()}
            if rows:
                return Taken(tuple(level(ask, *rows[ask.bucket]) for ask in work.asks))
        self._cursor.execute(self._sql.begin)
        levels = {}
        # In one order everywhere: on PostgreSQL two takes would else wait for each other's rows
        for ask in sorted(work.asks, key=lambda ask: ask.bucket):
            row = self._ask(self._sql.take, ask).fetchone()
            if row is None:
                self._cursor.execute("ROLLBACK")
                return self._refused(ask, work)
            levels[ask.bucket] = level(ask, *row)
        work.may_be_done = True
        self._cursor.execute("COMMIT")
        return Taken(tuple(levels[ask.bucket] for ask in work.asks))

    def _refused(self, ask: Ask, work: Work) -> Refused:
        tat, now = self._ask(self._sql.look, ask).fetchone()
        if tat is not None and tat - now > ask.window:
            # The clock was set back, or the limit lowered: without this the bucket would stay shut until then
            self._ask(self._sql.bring_back, ask)
        return Refused(ask.bucket, retry_after_seconds(ask, tat, now), self._levels(work))

    def _levels(self, work: Work) -> tuple[Level, ...]:
        return tuple(level(ask, *self._ask(self._sql.look, ask).fetchone()) for ask in work.asks)

    def _give_back(self, work: Work) -> None:
        if not work.returns or work.may_be_returned:
            return
        self._cursor.execute(self._sql.begin)
        rows = [{"bucket": bucket, "cost": cost} for bucket, cost in sorted(work.returns.items())]
        self._cursor.executemany(self._sql.give_back, rows)
        work.may_be_returned = True
        self._cursor.execute("COMMIT")

    def _ask(self, sql: str, ask: Ask) -> Any:
        # Read here, after the wait for the write lock. PostgreSQL asks its own clock and ignores this one
        now = self._clock()
        values = {"bucket": ask.bucket, "cost": ask.nanoseconds, "window": ask.window, "now": now}
        return self._cursor.execute(sql, values)

    def _ask_two(self, sql: str, *asks: Ask) -> Any:
        values: dict[str, Any] = {}
        for number, ask in enumerate(asks):
            values |= {f"bucket{number}": ask.bucket, f"cost{number}": ask.nanoseconds, f"window{number}": ask.window}
        return self._cursor.execute(sql, values)
