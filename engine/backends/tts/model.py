"""Voices as the server's process sees them: a queue, a worker process that speaks, and jobs for it."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Self

import msgspec

from engine.admission import Room
from engine.config import SpeechModelSpec
from engine.process.parent import WorkerBackend, WorkerProcess, start_worker
from engine.process.watchdog import Patience
from engine.stream import SpeechStream, Stream
from engine.types import Report
from engine.voices.types import SpeechChunk, SpeechJob, SpeechRequest, Voice

_KEPT_ONE_IN = 8  # of the places, for keys with nothing running: a text may take minutes
_FORMANT_TEXTS = 8  # are spoken in the place of one of a neural voice: they take a fiftieth of its time
_SERVICE = "engine.backends.tts.service:open_service"


class SpeechModel(WorkerBackend):
    """All voices of one entry of models.yaml. Made by `load`."""

    def __init__(self, worker: WorkerProcess, spec: SpeechModelSpec) -> None:
        engine = spec.engine
        texts = engine.max_parallel_requests
        newcomers = math.ceil(texts / _KEPT_ONE_IN) if engine.fair_queue and texts > 1 else 0
        places, kept = texts * _FORMANT_TEXTS, newcomers * _FORMANT_TEXTS
        room = Room(places, engine.max_queued_requests, kept_for_newcomers=kept, fair=engine.fair_queue)
        super().__init__(worker, room)
        self._spec = spec

    @property
    def running(self) -> int:
        return self.worker.jobs

    @classmethod
    async def load(  # noqa: PLR0913  # what a start depends on
        cls, spec: SpeechModelSpec, voices: Iterable[Voice], *, threads: int, mark: bool, on_cpu: bool, report: Report
    ) -> Self:
        """Start a worker for `voices`. It loads them when they are first requested."""
        families = sorted({voice.family for voice in voices if voice.available})
        report(f"importing {', '.join(families) or 'nothing'}", 0.1)
        patience = Patience.of(spec.engine.stall_seconds, on_cpu=True)  # it speaks on the CPU, GPU or not
        worker = await start_worker(
            _SERVICE, (mark, families), report, threads=threads, on_cpu=on_cpu, patience=patience
        )
        return cls(worker, spec)

    def speech(self, request: SpeechRequest, voice: Voice, stream: SpeechStream) -> None:
        """Put the file into `stream` piece by piece as it is spoken; closing it aborts. It ends with `EngineError`s."""
        self.start(stream, partial(self._speak, request, voice))

    async def _speak(self, request: SpeechRequest, voice: Voice, chunks: Stream[SpeechChunk]) -> None:
        if request.before_turn is not None:
            await request.before_turn()
        turn = self.admission.enter(
            request.owner,
            prompt_tokens=len(request.text),  # for fairness a text costs its length
            max_tokens=0,
            sequences=1 if voice.quality == "formant" else _FORMANT_TEXTS,
            weight=request.queue_share,
        )

        def take(payload: msgspec.Raw) -> None:
            turn.answer_tokens += 1
            chunks.put(msgspec.msgpack.decode(payload, type=SpeechChunk))

        speaker = (str(voice.folder), voice.family, voice.speaker, voice.language)
        asked = (request.text, request.speed, request.seed, request.response_format)
        job = SpeechJob(*speaker, *asked, request.owner, self._spec.engine.max_seconds)
        async with turn:
            chunks.dispatched()
            await self.worker.run(job, take)
