"""Does not know when a job is over: ends it twice, speaks of it afterwards, and of jobs that never were."""

from misbehaving.well import Counter

from engine.errors import GenerationError
from engine.process.protocol import Outlet
from engine.types import Report


class TalksOn(Counter):
    def step(self) -> None:
        before = set(self.jobs)
        super().step()
        for job in (*(before - set(self.jobs)), 99):
            self.outlet.event(job, b"one more thing")
            self.outlet.failed(job, GenerationError("Again."))
            self.outlet.done(job)


def open_service(options: bytes, outlet: Outlet, report: Report) -> TalksOn:
    return TalksOn(outlet)
