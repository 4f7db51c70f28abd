"""One worker that speaks, loaded as the server does and driven without HTTP: one text at a time, or several at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil
from engine.backends.speech_model import SpeechModel

from benchmarks.errors import BenchError
from benchmarks.figures import Figures, milliseconds, percentile
from engine import EngineError
from engine.process.parent import WorkerDiedError
from engine.voices.types import SpeechRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from engine.config import SpeechModelSpec
    from engine.voices.types import Voice


@dataclass(frozen=True, slots=True)
class SpeechWork:
    """What one run speaks: `text`, `times` over, in one voice."""

    voice: Voice
    text: str
    times: int


@dataclass(slots=True)
class _Seen:
    first_bytes_seconds: list[float] = field(default_factory=list)
    whole_seconds: list[float] = field(default_factory=list)
    audio_seconds: float = 0.0


class SpeechTarget:
    """Has `at_once` texts spoken at the same time."""

    def __init__(self, name: str, model: SpeechModel, at_once: int) -> None:
        self.name = name
        self._model = model
        self._at_once = at_once

    async def measure(self, job: SpeechWork) -> Figures:
        """Speak, after one text that is not measured: it loads the voice. Raises `BenchError`."""
        process = psutil.Process(self._model.worker.pid)
        left, seen = iter(range(job.times)), _Seen()
        try:
            await self._speak(job, -1, _Seen())
            cpu, start = _cpu_seconds(process), time.perf_counter()
            async with asyncio.TaskGroup() as asked:
                for _ in range(self._at_once):
                    asked.create_task(self._one_after_another(job, left, seen))
        except* EngineError as failed:
            raise BenchError(f"a text was not spoken: {failed.exceptions[0]}") from None
        wall = time.perf_counter() - start
        return {
            "cpu_real_time_factor": (_cpu_seconds(process) - cpu) / seen.audio_seconds,
            "wall_real_time_factor": wall / seen.audio_seconds,
            "first_bytes_p50_ms": milliseconds(percentile(seen.first_bytes_seconds, 50)),
            "first_bytes_p95_ms": milliseconds(percentile(seen.first_bytes_seconds, 95)),
            "whole_p50_ms": milliseconds(percentile(seen.whole_seconds, 50)),
            "audio_seconds_per_text": seen.audio_seconds / job.times,
        }

    async def _one_after_another(self, job: SpeechWork, left: Iterator[int], seen: _Seen) -> None:
        for number in left:
            await self._speak(job, number, seen)

    async def _speak(self, job: SpeechWork, number: int, seen: _Seen) -> None:
        request = SpeechRequest(
            request_id=f"bench-{number}", model="bench", voice=job.voice.id, text=job.text, seed=max(number, 0)
        )
        start, first = time.perf_counter(), None
        async with contextlib.aclosing(self._model.speech(request, job.voice)) as chunks:
            async for chunk in chunks:
                if first is None and chunk.data:
                    first = time.perf_counter() - start
                seen.audio_seconds += chunk.seconds
        if first is None:
            raise BenchError(f"the voice {job.voice.id} sent no bytes")
        seen.first_bytes_seconds.append(first)
        seen.whole_seconds.append(time.perf_counter() - start)


@contextlib.asynccontextmanager
async def speaking(spec: SpeechModelSpec, threads: int) -> AsyncIterator[SpeechModel]:
    """Start the worker and end it. Raises `BenchError`."""
    try:
        # `on_cpu` only lowers the worker's priority, for the sake of a chat that is not here.
        model = await SpeechModel.load(
            spec, threads=threads, mark=True, on_cpu=False, report=lambda _phase, _progress: None
        )
    except (EngineError, WorkerDiedError) as error:
        raise BenchError(f"the worker cannot be started: {error}") from error
    try:
        yield model
    finally:
        await model.shutdown()


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
