"""The one that behaves: a job counts to the number in its payload, one event a step. The others are made of it."""

import os

import msgspec

from engine.errors import GenerationError, OverloadedError, RequestError
from engine.process.protocol import Outlet
from engine.types import Report


class Counter:
    def __init__(self, outlet: Outlet) -> None:
        self.outlet = outlet
        self.jobs: dict[int, tuple[int, int]] = {}

    def submit(self, job: int, payload: msgspec.Raw) -> None:
        self.take(job, msgspec.msgpack.decode(payload))

    def take(self, job: int, payload: bytes) -> None:
        if payload == b"too much":
            raise OverloadedError("Enough.", retry_after_seconds=7)
        if payload == b"bug":
            raise KeyError("zwieback")
        if not payload.isdigit():
            raise RequestError("`to` is not a number.", param="to")
        self.jobs[job] = (0, int(payload))

    def cancel(self, job: int) -> None:
        del self.jobs[job]
        self.outlet.done(job)

    @property
    def busy(self) -> bool:
        return bool(self.jobs)

    def step(self) -> None:
        for job, (count, end) in list(self.jobs.items()):
            if count == 13 and end == 13:
                del self.jobs[job]
                self.outlet.failed(job, GenerationError("Thirteen."))
            elif count == end:
                del self.jobs[job]
                self.outlet.done(job)
            else:
                self.jobs[job] = (count + 1, end)
                self.outlet.event(job, b"%d" % count)


def open_service(options: bytes, outlet: Outlet, report: Report) -> Counter:
    report("reading", 0.25)
    report(f"priority {os.getpriority(os.PRIO_PROCESS, 0)}, word {os.environ.get('WORD')}", 0.75)
    return Counter(outlet)
