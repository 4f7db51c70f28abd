"""Hears no cancel until it is told by a job called "let go"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from misbehaving.well import Counter

if TYPE_CHECKING:
    from engine.process.protocol import Outlet
    from engine.types import Report


class Deaf(Counter):
    def take(self, job: int, payload: bytes) -> None:
        self.jobs[job] = (0, 0)
        if payload == b"let go":
            for each in list(self.jobs):
                super().cancel(each)
        else:
            self.outlet.event(job, b"started")

    def cancel(self, job: int) -> None:
        pass

    @property
    def busy(self) -> bool:
        return False


def open_service(options: bytes, outlet: Outlet, report: Report) -> Deaf:
    return Deaf(outlet)
