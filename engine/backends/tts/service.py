"""The service that speaks, as its worker process opens it: text after text in turn, sentence by sentence."""

from __future__ import annotations

import logging
import os
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.backends.tts.encoders import Encoder
from engine.backends.tts.families import LoadedModels, Synthesizer
from engine.backends.tts.protocol import Audio, SpeechEvent, SpeechJob, SpeechOptions, Spoken
from engine.errors import EngineError, GenerationError, LoadError, RequestError
from engine.process.protocol import Outlet, Service
from engine.voices.languages import language_name
from engine.voices.text import Piece, speakable

_log = logging.getLogger(__name__)

SLOWEST, FASTEST = 0.25, 4.0
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # weights come from folders, never from a hub at run time
    "TRANSFORMERS_VERBOSITY": "error",
}
# These say their length at their beginning, and some programs read no file that does not: a text so short comes whole.
_HEADERS_WITH_LENGTH = {"wav", "flac"}
_SHORT_CHARACTERS = 300
_SEEDS = 2**63
_SEED_STEP = 0x9E3779B97F4A7C15  # odd and far from 0, so that neighbouring seeds share no sentence's


def open_service(options: bytes, outlet: Outlet, report: Callable[[str, float], None]) -> Service:
    """Make ready to speak, as `options` (a `SpeechOptions`) say. Voices are loaded when they are first asked for."""
    report("importing torch", 0.1)
    wanted = msgspec.msgpack.decode(options, type=SpeechOptions)
    os.environ.update(_ENVIRONMENT)  # read when the libraries are imported, which is below
    import torch
    import transformers

    from engine.backends.tts.vits import load  # noqa: F401  # takes seconds, and the first request does not wait

    torch.set_num_threads(wanted.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return SpeechService(outlet, mark=wanted.mark)


@dataclass(slots=True)
class _Voice:
    """What a job has once it has begun."""

    model: Synthesizer
    encoder: Encoder
    next: Piece | None


@dataclass(slots=True)
class _Running:
    """A job that has not ended. `voice` comes with its first turn."""

    job: SpeechJob
    pieces: deque[Piece]
    seed: int
    voice: _Voice | None = None
    spoken: int = 0
    seconds: float = 0.0


class SpeechService:
    """A `Service` (engine.process.protocol.py): `step` speaks one sentence of the job whose turn it is."""

    info = b""

    def __init__(self, outlet: Outlet, *, mark: bool) -> None:
        self._models = LoadedModels()
        self._outlet = outlet
        self._mark = mark
        self._running: OrderedDict[int, _Running] = OrderedDict()

    def submit(self, job: int, payload: bytes) -> None:
        """Queue a job. Raises `RequestError` for one that cannot be spoken as it is asked."""
        asked = msgspec.msgpack.decode(payload, type=SpeechJob)
        if not SLOWEST <= asked.speed <= FASTEST:
            raise RequestError(f"speed must be between {SLOWEST} and {FASTEST:g}.", param="speed")
        pieces = speakable(asked.text, asked.language)
        if not pieces:
            raise _nothing_to_say(asked)
        self._running[job] = _Running(
            asked, deque(pieces), secrets.randbelow(_SEEDS) if asked.seed is None else asked.seed
        )

    def cancel(self, job: int) -> None:
        """Let a job go."""
        if self._running.pop(job, None) is not None:
            self._outlet.done(job)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._running)

    def step(self) -> None:
        """Speak the next sentence of the job that has waited longest for one."""
        number, running = next(iter(self._running.items()))
        try:
            finished = self._speak(number, running)
        except EngineError as error:
            self._running.pop(number, None)
            self._outlet.failed(number, _for_clients(error, running.job))
            return
        if finished:
            self._running.pop(number, None)
            self._outlet.done(number)
        elif number in self._running:
            self._running.move_to_end(number)

    def _speak(self, number: int, running: _Running) -> bool:
        """Whether that was all."""
        voice = running.voice = running.voice or self._begin(number, running)
        if voice.next is None:
            return False  # its client left while a sentence was looked for
        piece = voice.next
        samples = _say(voice.model, piece.text, running)
        running.spoken += 1
        voice.next = self._next(number, voice.model, running)
        last = voice.next is None
        silence = np.zeros(round(piece.pause_seconds / running.job.speed * voice.model.sample_rate), np.float32)
        sound = samples if last else np.concatenate((samples, silence))
        seconds = len(sound) / voice.model.sample_rate
        running.seconds += seconds
        self._send(number, Audio(voice.encoder.add(sound, last=last), seconds))
        if last:
            self._send(number, Spoken(running.seconds))
        return last

    def _begin(self, number: int, running: _Running) -> _Voice:
        """Load the voice. Raises `RequestError` for a text of which it can say nothing."""
        model = self._models.get(running.job.family, running.job.folder)
        first = self._next(number, model, running)
        if first is None and number in self._running:
            raise _nothing_to_say(running.job)
        job = running.job
        whole = job.response_format in _HEADERS_WITH_LENGTH and len(job.text) <= _SHORT_CHARACTERS
        encoder = Encoder(job.response_format, model.sample_rate, mark=self._mark, whole=whole)
        return _Voice(model, encoder, first)

    def _next(self, number: int, model: Synthesizer, running: _Running) -> Piece | None:
        """Return the next piece that has a sound. Romanising can take long: meanwhile others may come and leave."""
        while running.pieces and number in self._running:
            piece = running.pieces.popleft()
            if text := model.sayable(piece.text):
                return replace(piece, text=text)
            self._outlet.poll()
        return None

    def _send(self, number: int, event: SpeechEvent) -> None:
        self._outlet.event(number, event)


def _say(model: Synthesizer, text: str, running: _Running) -> NDArray[np.float32]:
    """Raises `GenerationError` for whatever one sentence can do to a model: the next one may do well."""
    job = running.job
    seed = (running.seed + running.spoken * _SEED_STEP) % _SEEDS
    try:
        samples = model.speak(text, job.speaker, job.speed, seed)
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError, MemoryError) as error:
        # Not the error itself, which may quote the text.
        _log.error("A voice of %s failed (%s).", job.family, type(error).__name__)
        raise GenerationError(
            "The voice failed at a sentence of this text. Try again, or write it in other words."
        ) from error
    if not np.isfinite(samples).all():
        raise GenerationError("The voice made no valid sound of this text. Try again with another seed.")
    return samples


def _nothing_to_say(job: SpeechJob) -> RequestError:
    return RequestError(
        f"input holds no letters that this voice knows: it speaks {language_name(job.language)}. Write the text in "
        "that language, or choose a voice of another one (GET /v1/audio/voices lists them).",
        param="input",
    )


def _for_clients(error: EngineError, job: SpeechJob) -> EngineError:
    """A model that cannot be loaded is the operator's concern: its message goes to the log."""
    if not isinstance(error, LoadError):
        return error
    _log.error("A voice of family %s cannot speak: %s", job.family, error.message)
    return GenerationError(
        "The model of this voice cannot be loaded. Choose another voice, or ask whoever runs this server to look into "
        "its log."
    )
