"""Looks at no message for as long as its job says: `compute 3` and `sleep 3` are one step of three seconds each."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from misbehaving.well import Counter

if TYPE_CHECKING:
    from engine.process.protocol import Outlet
    from engine.types import Report


class Slow(Counter):
    def take(self, job: int, payload: bytes) -> None:
        self.way, seconds = payload.decode().split()
        self.seconds = float(seconds)
        self.jobs[job] = (0, 1)

    def step(self) -> None:
        (job,) = self.jobs
        self.outlet.event(job, b"started")
        if self.way == "compute":
            end = time.monotonic() + self.seconds
            while time.monotonic() < end:
                pass
        else:
            signal.sigtimedwait([], self.seconds)
        del self.jobs[job]
        self.outlet.done(job)


def open_service(options: bytes, outlet: Outlet, report: Report) -> Slow:
    return Slow(outlet)
