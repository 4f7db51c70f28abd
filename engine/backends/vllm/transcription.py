"""A model like Whisper on vLLM, which transcribes a sound file, with times.

A file comes in pieces (engine/sound), each of which is one request to the core and waits for its turn: two at a time,
and after the first minute as batches, so that a long file does not block others. vLLM's own server has neither
subtitles nor a handling of silence; only `AsyncLLM.generate` is used.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, cast

from engine.admission import Admission, Room
from engine.backends import together
from engine.backends.vllm.engine import WARM_UP, Launch, VllmAuxiliary, auxiliary_arguments, starting
from engine.backends.vllm.processes import EngineWatch
from engine.config import TranscriptionModelSpec
from engine.errors import GenerationError, LoadError, RequestError
from engine.sound import RATE_HZ, Piece
from engine.sound.reading import SoundFile
from engine.stream import Stream, TranscriptionStream
from engine.types import Segment, TranscriptionRequest, Urgency
from engine.weights.layouts import WhisperFolder

_FILES = 8  # that are read at the same time
_AT_ONCE = 2  # pieces of one file
_INTERACTIVE_SECONDS = 60.0  # of a file; the rest waits behind others' requests
_TOKENS_PER_SECOND = 50  # of what an encoder reads, for fairness
_TIME = re.compile(r"<\|(\d{1,2}\.\d\d)\|>")
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_WITHOUT_SPACES = {"ja", "lo", "my", "th", "yue", "zh"}  # between words
_ISO = {"jw": "jv"}  # Whisper's code -> the standard's
_SAME = {"nb": "no", "fil": "tl"}  # a code -> Whisper's, of a wider language
_START, _TRANSCRIBE, _TRANSLATE = "<|startoftranscript|>", "<|transcribe|>", "<|translate|>"
_BEFORE, _WITHOUT_TIMES = "<|startofprev|>", "<|notimestamps|>"
# A model that has repeated a sequence of at most so many tokens so often does not stop by itself.
_REPEATS, _REPEATED_TOKENS = 8, 32
_NEVER = -100.0


class VllmTranscription(VllmAuxiliary[TranscriptionModelSpec]):
    """One loaded model for transcription. Made by `load`."""

    def __init__(
        self,
        engine: Any,
        words: Words,
        launch: Launch[TranscriptionModelSpec],
        watch: EngineWatch,
        folder: WhisperFolder,
    ) -> None:
        super().__init__(engine, launch, watch)
        spec = launch.spec.engine
        # Each file that is read has a process.
        kept = _FILES // 4
        self._files = Admission(Room(_FILES, spec.max_queued_requests, kept_for_newcomers=kept, fair=spec.fair_queue))
        self._words, self._folder = words, folder

    def _on_exit(self) -> None:
        self._files.close()
        super()._on_exit()

    @classmethod
    async def load(cls, launch: Launch[TranscriptionModelSpec]) -> Self:
        """Start the engine and transcribe a first piece. Raises like `starting`."""
        folder = await asyncio.to_thread(WhisperFolder.read, launch.weights)
        async with starting(launch, partial(transcription_arguments, launch, folder)) as (engine, watch):
            words = await asyncio.to_thread(_words_of, engine, folder, launch.spec)
            model = cls(engine, words, launch, watch, folder)
            launch.report("hearing a first piece", 0.9)
            await model._warm_up()
            model.give_way_to_chat()
        return model

    def transcribe(self, request: TranscriptionRequest, stream: TranscriptionStream) -> None:
        """Put the segments of a file into `stream`; closing it aborts. It ends with `EngineError`s."""
        self.start(stream, partial(self._transcribe, request))

    async def _transcribe(self, request: TranscriptionRequest, stream: Stream[Segment]) -> None:
        self._words.check_language(request)
        spec = self._launch.spec.engine
        sound = SoundFile(request.path, piece_seconds=self._folder.piece_seconds, most_seconds=spec.max_seconds)
        self.admission.arrive(request)
        try:
            async with self._files.enter(request.owner, prompt_tokens=1, max_tokens=0, urgency=request.urgency), sound:
                hearing = _Hearing(request, cast("TranscriptionStream", stream), sound, request.language)
                await together(self._work(hearing) for _ in range(_AT_ONCE))
        finally:
            self.admission.depart(request)

    async def _work(self, hearing: _Hearing) -> None:
        """Transcribe piece after piece. The two workers take pieces in turn, and put segments in the file's order."""
        while True:
            async with hearing.reading:
                piece = await hearing.sound.next()
                if piece is None:
                    hearing.stream.seconds = hearing.sound.seconds
                    return
                number, before, said = hearing.pieces, hearing.before, asyncio.Event()
                hearing.pieces, hearing.before = number + 1, said
                if hearing.language is None:
                    hearing.language = await self._language(hearing.request, piece)
            await self._hear(hearing, piece, number, before)
            said.set()

    async def _hear(self, hearing: _Hearing, piece: Piece, number: int, before: asyncio.Event) -> None:
        """Put the segments of a piece into the stream, from when all pieces before it are finished."""
        request, language = hearing.request, hearing.language or ""
        prompt = self._words.prompt(language, request.prompt, translate=request.translate)
        scribe = Scribe(self._words, piece, language)
        async with self._turn(request, piece) as ticket:
            hearing.stream.dispatched()
            parameters = self._words.parameters(len(prompt), request.temperature)
            async for ids, logprobs in self._tokens(
                f"{request.request_id}-{number}", piece, prompt, parameters, ticket
            ):
                ticket.answer_tokens += len(ids)
                scribe.take(ids, logprobs)
                if before.is_set():
                    hearing.put(scribe)
            scribe.end()
        await before.wait()
        hearing.put(scribe)
        hearing.stream.seconds = max(hearing.stream.seconds, piece.start + piece.seconds)

    async def _language(self, request: TranscriptionRequest, piece: Piece) -> str:
        """Return the language of a piece; "" if the model knows none. Raises `GenerationError` if it names none."""
        words = self._words
        if len(words.languages) < 2:
            return next(iter(words.languages), "en")
        prompt = words.marks(_START)
        parameters = words.parameters(0, 0.0, allowed=list(words.languages.values()))
        async with self._turn(request, piece) as ticket:
            async for ids, _ in self._tokens(f"{request.request_id}-language", piece, prompt, parameters, ticket):
                for name, token in words.languages.items():
                    if token in ids:
                        return name
        raise GenerationError("The model did not say in which language the recording is. Name it as `language`.")

    def _turn(self, request: TranscriptionRequest, piece: Piece) -> Any:
        late = piece.start >= _INTERACTIVE_SECONDS
        return self.admission.enter(
            request.owner,
            prompt_tokens=int(piece.seconds * _TOKENS_PER_SECOND),
            max_tokens=0,
            weight=request.queue_share,
            urgency=max(request.urgency, Urgency.BATCH) if late else request.urgency,
        )

    async def _tokens(
        self, name: str, piece: Piece, prompt: list[int], parameters: Any, ticket: Any
    ) -> AsyncIterator[tuple[list[int], list[float]]]:
        """Yield the tokens of a piece, and their probabilities, as they come. Closing it aborts."""
        import numpy as np
        from vllm.renderers.inputs.preprocess import parse_enc_dec_prompt

        from engine.backends.vllm.outputs import TranslatedErrors

        sound = np.frombuffer(piece.samples, np.int16).astype(np.float32) / 2**15
        with TranslatedErrors(self._words.context, None):
            heard = {"prompt": "", "multi_modal_data": {"audio": (sound, RATE_HZ)}}
            asked = parse_enc_dec_prompt({"encoder_prompt": heard, "decoder_prompt": {"prompt_token_ids": prompt}})
            (inputs,) = await self._engine.renderer.render_cmpl_async([asked])
            async for output in self._engine.generate(inputs, parameters, f"hear-{name}", priority=ticket.priority):
                made = output.outputs[0]
                ids = list(made.token_ids)
                yield ids, [each[token].logprob for each, token in zip(made.logprobs, ids, strict=True)]

    async def _warm_up(self) -> None:
        import numpy as np

        words = self._words
        noise = (np.random.default_rng(0).normal(0, 0.05, RATE_HZ) * 2**15).astype(np.int16)
        request = TranscriptionRequest(request_id="warm-up", model=self._launch.spec.id, path=self._launch.weights)
        piece = Piece(0.0, noise.tobytes())
        prompt = words.prompt(next(iter(words.languages), "en"), WARM_UP, translate=False)
        async with self._turn(request, piece) as ticket:
            async for _ in self._tokens("warm-up", piece, prompt, words.parameters(len(prompt), 0.0), ticket):
                pass


@dataclass(slots=True)
class _Hearing:
    """One file in transcription. `before` is set when all pieces so far are in the stream."""

    request: TranscriptionRequest
    stream: TranscriptionStream
    sound: SoundFile
    language: str | None
    pieces: int = 0
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    before: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.before.set()

    def put(self, scribe: Scribe) -> None:
        for segment in scribe.done:
            self.stream.put(segment)
        scribe.done.clear()


class Words:
    """The tokens of one model: those that begin a transcript, times, and languages. Making it blocks."""

    def __init__(self, engine: Any, folder: WhisperFolder, spec: TranscriptionModelSpec) -> None:
        self.tokenizer, self.context = engine.renderer.tokenizer, engine.model_config.max_model_len
        self._folder = folder
        self._known: Mapping[str, int] = self.tokenizer.get_added_vocab()
        if _START not in self._known:
            raise LoadError(f"{spec.id}: its tokenizer has no {_START}, with which every transcript of Whisper begins.")
        if "translation" in spec.capabilities and not (folder.multilingual and _TRANSLATE in self._known):
            raise LoadError(
                f"{spec.id}: models.yaml claims `translation`, but it was not trained for it. Take that out."
            )
        self.special = frozenset(self._known.values())
        self.times = {token: float(found[1]) for name, token in self._known.items() if (found := _TIME.fullmatch(name))}
        self.languages: dict[str, int] = {}
        if folder.multilingual:
            named = ((_LANGUAGE.fullmatch(name), token) for name, token in self._known.items())
            self.languages = {_ISO.get(found[1], found[1]): token for found, token in named if found}
            self.languages |= {code: self.languages[wide] for code, wide in _SAME.items() if wide in self.languages}
        silenced = [*folder.suppressed, *(self.marks(_WITHOUT_TIMES) if self.times else ())]
        self._bias = dict.fromkeys(silenced, _NEVER)

    def marks(self, *names: str) -> list[int]:
        """Return the ids of those of these tokens that the model has."""
        return [self._known[name] for name in names if name in self._known]

    def check_language(self, request: TranscriptionRequest) -> None:
        """Raise `RequestError` for a language that the model does not know."""
        if request.language is None or request.language in self.languages:
            return
        known = ", ".join(sorted(self.languages)) or "en"
        if self.languages or request.language != "en":
            raise RequestError(f"This model does not know this `language`. It knows: {known}.", param="language")

    def prompt(self, language: str, said: str, *, translate: bool) -> list[int]:
        """Return the beginning of a transcript, after the end of what was `said` before, in half of the context."""
        before = self.marks(_BEFORE) if said.strip() else []
        if before:
            said_ids = self.tokenizer.encode(" " + said.strip(), add_special_tokens=False)
            before += [each for each in said_ids if each not in self.special][-(self.context // 2 - 2) :]
        begin = self.marks(_START)
        if self._folder.multilingual:
            spoken = self.languages.get(language)
            begin += [*(() if spoken is None else (spoken,)), *self.marks(_TRANSLATE if translate else _TRANSCRIBE)]
        return [*before, *begin, *(() if self.times else self.marks(_WITHOUT_TIMES))]

    def parameters(self, prompt_tokens: int, temperature: float, *, allowed: list[int] | None = None) -> Any:
        """Return vLLM's `SamplingParams`; with `allowed`, for a single token that is one of these."""
        from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams

        repeated = RepetitionDetectionParams(max_pattern_size=_REPEATED_TOKENS, min_count=_REPEATS)
        return SamplingParams(
            temperature=temperature,
            max_tokens=1 if allowed else self.context - prompt_tokens,
            allowed_token_ids=allowed,
            logit_bias=None if allowed else self._bias or None,
            repetition_detection=None if allowed else repeated,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )


class Scribe:
    """Makes segments from the tokens of one piece. Times never go back, and stay within the piece."""

    def __init__(self, words: Words, piece: Piece, language: str) -> None:
        self.done: list[Segment] = []
        self._words, self._piece, self._language = words, piece, language
        self._at = 0.0  # seconds into the piece
        self._ids: list[int] = []
        self._logprobs: list[float] = []

    def take(self, ids: Iterable[int], logprobs: Iterable[float]) -> None:
        """Take the next tokens. A time ends a segment, or begins one."""
        for token, logprob in zip(ids, logprobs, strict=True):
            seconds = self._words.times.get(token)
            if seconds is None and token not in self._words.special:
                self._ids.append(token)
                self._logprobs.append(logprob)
            elif seconds is not None:
                until = min(max(seconds, self._at), self._piece.seconds)
                self._close(until)
                self._at = until

    def end(self) -> None:
        """Close a segment without an end time."""
        self._close(self._piece.seconds)

    def _close(self, until: float) -> None:
        ids, self._ids = self._ids, []
        logprobs, self._logprobs = self._logprobs, []
        text = self._words.tokenizer.decode(ids) if ids else ""
        if text.strip():
            # Whisper begins each with a space; fine-tuned models may not.
            if not text[0].isspace() and self._language not in _WITHOUT_SPACES:
                text = f" {text}"
            begin, end = (round(self._piece.start + each, 2) for each in (self._at, until))
            mean = sum(logprobs) / len(logprobs)
            self.done.append(Segment(begin, max(begin, end), text, tuple(ids), mean, self._language))


def _words_of(engine: Any, folder: WhisperFolder, spec: TranscriptionModelSpec) -> Words:
    """Block for seconds: import here what requests would otherwise import on the event loop."""
    for name in ("vllm.renderers.inputs.preprocess", "vllm.sampling_params", "engine.backends.vllm.outputs"):
        importlib.import_module(name)
    return Words(engine, folder, spec)


def transcription_arguments(launch: Launch[TranscriptionModelSpec], folder: WhisperFolder) -> dict[str, Any]:
    own = {"limit_mm_per_prompt": {"audio": 1}, "mm_processor_cache_gb": 0}
    return {**auxiliary_arguments(launch, folder.saved_in), **own}
