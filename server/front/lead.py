"""The lead as a front sees it: what is asked of it, and what comes back, each to whoever has asked."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Self, TypeAlias

from server.front.messages import (
    Cancel,
    Counted,
    End,
    Failed,
    Headers,
    More,
    Piece,
    Result,
    Start,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from server.front.messages import Body, Call, Ended, Gone, PassedOn, Request, Taken, ToLead

About: TypeAlias = Headers | Step | Result | Counted | Failed | End | Start | Piece | More


class Line:
    """One call: `async with` it, and it is cancelled unless it has ended by itself."""

    def __init__(self, lead: Lead, number: int) -> None:
        self.number = number
        self._lead = lead
        self._came: deque[About] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lead.forget(self.number)
        if not self._ended:
            self._lead.say(Cancel(self.number))

    async def next(self) -> About:
        """Return what comes next."""
        while not self._came:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._came.popleft()

    def add(self, message: About) -> None:
        """Something has come."""
        self._came.append(message)
        if isinstance(message, End | Failed | Result | Counted):
            self._ended = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Lead:
    """`say` sends it a message."""

    def __init__(self, say: Callable[[ToLead], None]) -> None:
        self.say: Callable[[Call | Request | Body | Gone | Taken | PassedOn | Cancel | Ended], None] = say
        self._lines: dict[int, Line] = {}
        self._numbers = count(1)

    def line(self) -> Line:
        """Return what a new call is asked through."""
        number = next(self._numbers)
        self._lines[number] = line = Line(self, number)
        return line

    def forget(self, number: int) -> None:
        """Nobody listens any more."""
        del self._lines[number]

    def on_message(self, message: About) -> None:
        """Take what is about a call. One that was left is no longer known here."""
        if (line := self._lines.get(message.call)) is not None:
            line.add(message)
