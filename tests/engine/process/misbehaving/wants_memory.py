"""Runs out of memory as libraries do, when it is submitted or in a step, or makes answers that are too large."""

from __future__ import annotations

from typing import TYPE_CHECKING

from misbehaving.well import Counter

if TYPE_CHECKING:
    from engine.process.protocol import Outlet
    from engine.types import Report


class OutOfMemoryError(RuntimeError):
    """torch's, by name."""


class WantsMemory(Counter):
    way = ""

    def take(self, job: int, payload: bytes) -> None:
        if payload == b"at once":
            raise MemoryError
        self.way = payload.decode()
        self.jobs[job] = (0, 2)

    def step(self) -> None:
        if self.way == "python":
            bytearray(2**60)
        if self.way == "cuda":
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        if self.way == "cpu":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        if self.way == "huge event":
            for job in self.jobs:
                self.outlet.event(job, bytes(64 * 2**20))
        super().step()


def open_service(options: bytes, outlet: Outlet, report: Report) -> WantsMemory:
    return WantsMemory(outlet)
