"""Makes events of 1 MiB, each of which says its number, and never looks at what came in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from misbehaving.well import Counter

if TYPE_CHECKING:
    from engine.process.protocol import Outlet
    from engine.types import Report

EVENT_BYTES = 2**20


class Flood(Counter):
    def step(self) -> None:
        for job, (_, end) in list(self.jobs.items()):
            for count in range(end):
                self.outlet.event(job, count.to_bytes(4, "big") + bytes(EVENT_BYTES - 4))
            del self.jobs[job]
            self.outlet.done(job)


def open_service(options: bytes, outlet: Outlet, report: Report) -> Flood:
    return Flood(outlet)
