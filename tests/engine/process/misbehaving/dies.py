"""Dies in the middle of a job, each time in another way: the payload names it."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from typing import TYPE_CHECKING

from misbehaving.well import Counter

if TYPE_CHECKING:
    from engine.process.protocol import Outlet
    from engine.types import Report


class Dying(Counter):
    def take(self, job: int, payload: bytes) -> None:
        self.job, self.way = job, payload.decode()
        self.jobs[job] = (0, 1)

    def step(self) -> None:
        if self.way == "finish first":
            self.outlet.event(self.job, b"x" * 150_000)
            self.outlet.done(self.job)
            os._exit(4)
        self.outlet.event(self.job, b"started")
        if self.way == "raise":
            raise ValueError("zwieback")
        if self.way == "exit":
            os._exit(3)
        if self.way == "close":
            os.close(int(sys.argv[1]))
            signal.pause()
        if self.way == "segfault":
            faulthandler._sigsegv()
        if self.way == "write nonsense":
            os.write(int(sys.argv[1]), b"\0\0\0\3abc")
            signal.pause()
        if self.way == "write a huge frame":
            os.write(int(sys.argv[1]), b"\xff\xff\xff\xff" * 1000)
            signal.pause()
        signal.pause()


def open_service(options: bytes, outlet: Outlet, report: Report) -> Dying:
    return Dying(outlet)
