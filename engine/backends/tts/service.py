"""The speech service in the worker process: texts in turn, sentence by sentence."""

import importlib
import itertools
import logging
import math
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.backends.tts.sound import Encoder
from engine.errors import EngineError, GenerationError, LoadError, RequestError
from engine.process.protocol import Outlet, Service
from engine.types import Report
from engine.voices.languages import language_name
from engine.voices.readers import FAMILIES
from engine.voices.text import Piece, speakable
from engine.voices.types import SpeechChunk, SpeechJob

_log = logging.getLogger(__name__)

MAX_LOADED = 4
# These formats have their length at the beginning, and some programs read no file without it: a short text comes whole.
_HEADERS_WITH_LENGTH = {"wav", "flac"}
_SHORT_CHARACTERS = 300
# Encoding a sentence takes longer than speaking it with a formant voice, and a listener waits for its beginning.
_SLICE_SECONDS = 0.5
# A listener who has so much sound ahead can wait until older texts are finished.
_AHEAD_SECONDS = 10.0
_SEEDS = 2**63
_SEED_STEP = 0x9E3779B97F4A7C15  # odd and far from 0, so that neighbouring seeds share no sentence's


def open_service(options: bytes, outlet: Outlet, _report: Report) -> Service:
    """Prepare to speak; voices are loaded when they are first requested.

    `options`: whether files are marked as made by AI, and the families of the voices.
    """
    mark, families = msgspec.msgpack.decode(options, type=tuple[bool, list[str]])
    # So that the first request does not wait: torch takes seconds, and tables of languages some tenths of one.
    for family in families:
        _module(family)
    next(speakable(language_name("en"), "en"))
    return SpeechService(outlet, mark=mark)


class Synthesizer(Protocol):
    """A loaded model of one or more speakers. `load(folder)` in its family's file makes it, or raises `LoadError`."""

    @property
    def sample_rate(self) -> int:
        """In Hz."""

    def sayable(self, text: str) -> str:
        """Return the part of a text that `speak` can say, in letters that it takes; without letters if none."""

    def speak(self, text: str, speaker: int | str | None, speed: float, seed: int) -> NDArray[np.float32]:
        """Say what `sayable` returned: mono samples, 1/`speed` as long as at speed 1. The same seed, the same sound."""


def loaded(family: str, folder: Path) -> Synthesizer:
    """Return a model, loaded when it is first needed; the last used ones stay. Raises `LoadError`."""
    try:
        changed_at = max((file.stat().st_mtime_ns for file in folder.iterdir()), default=0)
    except OSError as error:
        raise LoadError(f"The folder {folder.name} cannot be read. Reload the models.") from error
    return _load(family, folder, changed_at)


@lru_cache(MAX_LOADED)
def _load(family: str, folder: Path, _changed_at: int) -> Synthesizer:
    """Load a model. `_changed_at`: one that was replaced on disk is another one."""
    for known in FAMILIES:
        if known.name == family and not known.installed:
            raise LoadError(f"What runs {family} is not installed: {known.install}")
    try:
        return _module(family).load(folder)
    except EngineError:
        raise
    except Exception as error:  # the errors of the families' libraries share no other class
        _log.exception("%s could not load %s", family, folder.name)
        raise LoadError(
            f"{folder.name} cannot be loaded ({type(error).__name__}; the log has the details). Check that the "
            "download is complete."
        ) from error


def _module(family: str) -> Any:
    return importlib.import_module(f"engine.backends.tts.{family}")


@dataclass(slots=True)
class _Job:
    """A text that is spoken. `silent_at`: when a listener from its first sound on has heard all; -inf: no sound."""

    asked: SpeechJob
    slices: Iterator[tuple[SpeechChunk, bool]]
    took_seconds: float = 0.0
    silent_at: float = -math.inf

    def step(self) -> tuple[SpeechChunk | None, bool]:
        """Make the next slice; return it, and whether it is the last. Raises `EngineError`s."""
        begun = time.monotonic()
        chunk, last = next(self.slices, (None, True))
        now = time.monotonic()
        self.took_seconds += now - begun
        if self.took_seconds > self.asked.max_seconds and not last:
            raise GenerationError(
                f"It took longer than {self.asked.max_seconds:g} s and was given up. Send a shorter text."
            )
        self.silent_at = max(self.silent_at, now) + (chunk.seconds if chunk is not None else 0.0)
        return chunk, last


class SpeechService:
    """A `Service` (process/protocol.py): `step` makes half a second of sound for one job.

    Owners take turns. Of one owner's jobs the one goes first whose listener would first run out of sound, so that all
    begin early; if none does soon, the oldest. A sentence is spoken whole in the step of its first half second; later
    steps encode the rest.
    """

    def __init__(self, outlet: Outlet, *, mark: bool) -> None:
        self._outlet, self._mark = outlet, mark
        self._running: dict[int, _Job] = {}  # in the order in which they came
        self._turns: dict[str, int] = {}  # of owners with a job: the number of their last step
        self._steps = itertools.count(1)

    def submit(self, job: int, payload: bytes) -> None:
        """Queue a job. Raises `RequestError` for one that cannot be spoken."""
        asked = msgspec.msgpack.decode(payload, type=SpeechJob)
        pieces = speakable(asked.text, asked.language)
        first = next(pieces, None)
        if first is None:
            raise _nothing_to_say(asked)
        self._running[job] = _Job(asked, self._speak(job, asked, itertools.chain([first], pieces)))
        self._turns.setdefault(asked.owner, 0)

    def cancel(self, job: int) -> None:
        if self._remove(job):
            self._outlet.done(job)

    def _remove(self, number: int) -> bool:
        removed = self._running.pop(number, None)
        if removed is not None and all(job.asked.owner != removed.asked.owner for job in self._running.values()):
            del self._turns[removed.asked.owner]
        return removed is not None

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def step(self) -> None:
        owner = min(self._turns, key=self._turns.__getitem__)
        self._turns[owner] = next(self._steps)
        soon = time.monotonic() + _AHEAD_SECONDS
        own = [(number, job) for number, job in self._running.items() if job.asked.owner == owner]
        number, job = min(own, key=lambda one: min(one[1].silent_at, soon))
        try:
            chunk, last = job.step()
            if chunk is not None:
                self._outlet.event(number, chunk)
        except EngineError as error:
            self._remove(number)
            self._outlet.failed(number, _for_clients(error))
            return
        if last:
            self.cancel(number)

    def _speak(self, number: int, job: SpeechJob, pieces: Iterable[Piece]) -> Iterator[tuple[SpeechChunk, bool]]:
        """Yield slices of sound, and whether each is the last; nothing of a job that was cancelled before its first."""
        model = loaded(job.family, Path(job.folder))
        sayable = self._sayable(number, model, pieces)
        piece = next(sayable, None)
        if piece is None and number in self._running:
            raise _nothing_to_say(job)
        whole = job.response_format in _HEADERS_WITH_LENGTH and len(job.text) <= _SHORT_CHARACTERS
        encoder = Encoder(job.response_format, model.sample_rate, mark=self._mark, whole=whole)
        seeds = itertools.count(secrets.randbelow(_SEEDS) if job.seed is None else job.seed, _SEED_STEP)
        begun = False
        while piece is not None:
            sound = _say(model, piece.text, job, next(seeds) % _SEEDS)
            following = next(sayable, None)
            if following is not None:
                silence = np.zeros(round(piece.pause_seconds / job.speed * model.sample_rate), np.float32)
                sound = np.concatenate((sound, silence))
            # A file of one piece comes whole: then it has its length, if its format can.
            begun = begun or following is not None
            if not begun and not len(sound):  # like a lone glottal stop
                raise _nothing_to_say(job)
            *earlier, rest = _slices(sound, round(_SLICE_SECONDS * model.sample_rate) if begun else len(sound))
            for part in earlier:
                yield SpeechChunk(encoder.add(part, last=False), len(part) / model.sample_rate), False
            data = encoder.add(rest, last=following is None)
            yield SpeechChunk(data, len(rest) / model.sample_rate), following is None
            piece = following

    def _sayable(self, number: int, model: Synthesizer, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces that have a sound. Romanising can take long: meanwhile messages are read."""
        with _one_sentence(model):
            for piece in pieces:
                if number not in self._running:
                    return
                text = model.sayable(piece.text)
                if any(map(str.isalnum, text)):
                    yield replace(piece, text=text)
                else:
                    self._outlet.poll()


@contextmanager
def _one_sentence(model: Synthesizer) -> Iterator[None]:
    """Raise `GenerationError` for any error over one sentence: the next one may work."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError, MemoryError) as error:
        # Without the error's message, which may quote the text.
        _log.error("A voice failed (%s: %s).", type(model).__name__, type(error).__name__)
        raise GenerationError(
            "The voice failed at a sentence of this text. Try again, or write it in other words."
        ) from error


def _say(model: Synthesizer, text: str, job: SpeechJob, seed: int) -> NDArray[np.float32]:
    with _one_sentence(model):
        samples = model.speak(text, job.speaker, job.speed, seed)
    if not np.isfinite(samples).all():
        raise GenerationError("The voice made no valid sound of this text. Try again with another seed.")
    return samples


def _slices(sound: NDArray[np.float32], size: int) -> list[NDArray[np.float32]]:
    """Cut a sound into parts of `size` samples; the last is shorter, and the only one of silence is empty."""
    return [sound[at : at + size] for at in range(0, max(1, len(sound)), max(1, size))]


def _nothing_to_say(job: SpeechJob) -> RequestError:
    return RequestError(
        f"`input` has no letters that this voice knows: it speaks {language_name(job.language)}. Write the text in "
        "that language, or choose a voice of another one (GET /v1/audio/voices lists them).",
        param="input",
    )


def _for_clients(error: EngineError) -> EngineError:
    """A model that cannot be loaded is the operator's concern: its message goes to the log."""
    if not isinstance(error, LoadError):
        return error
    _log.error("A voice cannot speak: %s", error.message)
    return GenerationError(
        "The model of this voice cannot be loaded. Choose another voice, or ask your administrator to look into "
        "the log."
    )
