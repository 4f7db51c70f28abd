"""Makes the demo transcription model: a Whisper of under a million parameters that reads back what our voices say.

The result is an ordinary checkpoint of Whisper (fp16, safetensors) with pieces of ten seconds, which vLLM and
transformers load unchanged. It knows the sixty words of sentences.py, spoken by the English voices of eSpeak NG.
While it is trained, a second head reads the words off the encoder (CTC), which learns them much sooner by that.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from demo_models.training import SEED, one_cycle, optimizers, repeatable, train
from demo_models.transcription.sentences import WORDS, fixed_sentences, lesson
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy, ctc_loss
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)
from transformers.models.whisper.modeling_whisper import sinusoids

from engine import voices
from engine.backends.tts import espeak

THREADS = 1
PHRASES = 3000
# Windows in seconds, their steps, how many windows a step has, how often words come before, and the learning rate:
# short ones are learnt quickly, then whole pieces.
LESSONS = ((4, 1500, 24, 0.0, 2e-3), (10, 600, 12, 0.25, 2e-3), (10, 1200, 12, 0.25, 1e-3))
PIECE_SECONDS = LESSONS[-1][0]
RATE_HZ = 16_000
VOICES = ("emma", "james")
_HOP = 320  # 20 ms, twice Whisper's: a position of the encoder is 40 ms
_TIME_SECONDS = 0.02  # of one time token, as Whisper has them
_TAUGHT_SECONDS = 0.1  # times are taught on this grid
_LONGEST_TOKENS = 96
# Pauses inside a segment are shorter than between two.
_SHORT_PAUSE, _LONG_PAUSE = (0.05, 0.25), (0.6, 1.5)
_UNSEEN = -100
_MARKS = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>")
_LATER_MARKS = ("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Phrase:
    """What is said, by one voice: mono samples at `RATE_HZ`."""

    text: str
    samples: NDArray[np.float32]
    voice: str

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE_HZ


def build(target: Path) -> None:
    """Train the model and write its checkpoint to `target`, an empty folder. A quarter of an hour on a quiet core.

    Raises RuntimeError when it does not read back every promised sentence.
    """
    repeatable(THREADS, flush_denormal=True)
    chance = random.Random(SEED)  # noqa: S311
    tokenizer, features = make_tokenizer(), feature_extractor()
    phrases = [speak(lesson(chance), VOICES[at % 2], chance) for at in range(PHRASES)]
    _log.info("%.0f minutes of sound were spoken.", sum(one.seconds for one in phrases) / 60)
    model = WhisperForConditionalGeneration(WhisperConfig(**layer_sizes(tokenizer)))
    reader = torch.nn.Linear(model.config.d_model, len(WORDS) + 1)
    model.train()
    for seconds, steps, count, prompted, rate in LESSONS:
        _look_at(model, seconds)
        schedules = [one_cycle(one, steps, 0.15) for one in optimizers(model, rate, rate)]
        schedules.append(one_cycle(torch.optim.AdamW(reader.parameters(), lr=rate, weight_decay=0.0), steps, 0.15))
        classroom = Classroom(phrases, tokenizer, features, chance, seconds, prompted)
        losses = _losses(model, reader, classroom, count)
        train(f"{seconds} seconds", steps, losses, schedules, clipped=[*model.parameters(), *reader.parameters()])
    model = model.eval().half()
    _require_sentences(model.float(), tokenizer, features)
    model.half().save_pretrained(target)
    _write_rest(target, tokenizer, features)


def layer_sizes(tokenizer: Any) -> dict[str, Any]:
    """Return Whisper's configuration."""
    mark = tokenizer.convert_tokens_to_ids
    return {
        "vocab_size": len(tokenizer),
        "num_mel_bins": 80,
        "d_model": 128,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
        "max_source_positions": _positions(PIECE_SECONDS),
        "max_target_positions": _LONGEST_TOKENS,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "pad_token_id": mark("<|endoftext|>"),
        "bos_token_id": mark("<|endoftext|>"),
        "eos_token_id": mark("<|endoftext|>"),
        "decoder_start_token_id": mark("<|startoftranscript|>"),
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }


def make_tokenizer() -> Any:
    """Byte-level BPE in which each word, with the space before it, is one token; then Whisper's marks and times."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([f" {word}" for word in WORDS], trainer)
    times = [f"<|{at * _TIME_SECONDS:.2f}|>" for at in range(round(PIECE_SECONDS / _TIME_SECONDS) + 1)]
    bpe.add_special_tokens([AddedToken(mark, special=True) for mark in (*_MARKS, *_LATER_MARKS)])
    bpe.add_tokens([AddedToken(time, normalized=False) for time in times])
    end = _MARKS[0]
    return WhisperTokenizer(
        tokenizer_object=bpe,
        bos_token=end,
        eos_token=end,
        unk_token=end,
        pad_token=end,
        model_max_length=_LONGEST_TOKENS,
    )


def feature_extractor() -> Any:
    return WhisperFeatureExtractor(chunk_length=PIECE_SECONDS, hop_length=_HOP, return_attention_mask=False)


def speak(text: str, voice: str, chance: random.Random | None = None) -> Phrase:
    """Say a text in a voice of eSpeak NG; with `chance` faster or slower, higher or lower by a little."""
    synthesizer = espeak.load(Path(voices.__file__).parent / "shipped" / "espeak-en")
    speed = 1.0 if chance is None or chance.random() < 0.5 else chance.uniform(0.85, 1.2)
    pitch = 1.0 if chance is None or chance.random() < 0.5 else chance.uniform(0.95, 1.05)
    samples = synthesizer.speak(synthesizer.sayable(text), voice, speed, 0 if chance is None else chance.randrange(99))
    rate = round(synthesizer.sample_rate * pitch)
    frame: Any = av.AudioFrame.from_ndarray(samples[np.newaxis], format="flt", layout="mono")
    frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
    resampler: Any = av.AudioResampler(format="flt", layout="mono", rate=RATE_HZ)
    parts = [each.to_ndarray()[0] for given in (frame, None) for each in resampler.resample(given)]
    return Phrase(text, np.concatenate(parts), voice)


class Classroom:
    """Draws windows of sound, each with its tokens and its words."""

    def __init__(  # noqa: PLR0913, PLR0917  # what a lesson depends on
        self,
        phrases: list[Phrase],
        tokenizer: Any,
        features: Any,
        chance: random.Random,
        seconds: int,
        prompted: float,
    ) -> None:
        self._phrases = {voice: [one for one in phrases if one.voice == voice] for voice in VOICES}
        self._features = features
        self._chance, self._seconds, self._prompted = chance, seconds, prompted
        self._noise = np.random.default_rng(chance.randrange(2**32))
        mark = tokenizer.convert_tokens_to_ids
        self._start, self._language, self._prompt = map(mark, ("<|startoftranscript|>", "<|en|>", "<|startofprev|>"))
        self._tasks = mark("<|transcribe|>"), mark("<|translate|>")
        self._end, self._first_time = mark("<|endoftext|>"), mark("<|0.00|>")
        self._token = {word: tokenizer.encode(f" {word}", add_special_tokens=False)[0] for word in WORDS}

    def draw(self, count: int) -> tuple[Any, Any, Any, list[list[int]]]:
        """Return features [count, mel, frames], tokens and those that are learnt [count, longest], numbers of words."""
        windows, tokens, words = zip(*(self._window() for _ in range(count)), strict=True)
        heard = self._features(
            list(windows), sampling_rate=RATE_HZ, max_length=self._seconds * RATE_HZ, return_tensors="pt"
        ).input_features
        longest = max(map(len, tokens))
        padded = torch.tensor([[*each, *[self._end] * (longest - len(each))] for each in tokens])
        learnt = torch.full(padded.shape, _UNSEEN)
        for row, each in enumerate(tokens):
            begin = each.index(self._start) + 3
            learnt[row, begin : len(each)] = padded[row, begin : len(each)]
        return heard, padded, learnt, list(words)

    def _window(self) -> tuple[NDArray[np.float32], list[int], list[int]]:
        """Phrases with pauses, quieter or louder, often with a little noise; now and then no phrase at all."""
        chance, samples = self._chance, np.zeros(self._seconds * RATE_HZ, np.float32)
        segments: list[tuple[float, float, str]] = []
        for begin, said, is_new in self._phrases_of_one():
            place, end = round(begin * RATE_HZ), begin + said.seconds
            samples[place : place + len(said.samples)] = said.samples
            if is_new:
                segments.append((begin, end, said.text))
            else:
                segments[-1] = (segments[-1][0], end, f"{segments[-1][2]} {said.text}")
        samples *= chance.choice((1.0, chance.uniform(0.2, 1.5)))
        if chance.random() < 0.6:
            samples += self._noise.normal(0, 0.1 * 10 ** -chance.uniform(1, 3), len(samples)).astype(np.float32)
        text = " ".join(said for _, _, said in segments)
        return samples, self._tokens(segments), [WORDS.index(word) + 1 for word in text.split()]

    def _phrases_of_one(self) -> Iterator[tuple[float, Phrase, bool]]:
        """Yield phrases of one voice: where each begins, and whether a long pause is before it."""
        chance, voice = self._chance, self._chance.choice(VOICES)
        at, is_new = chance.choice((0.0, chance.uniform(0, 1))), True
        while chance.random() > 0.02:
            said = chance.choice(self._phrases[voice])
            if at + said.seconds > self._seconds - 0.05:
                return
            yield at, said, is_new
            is_new = chance.random() < 0.7
            at += said.seconds + chance.uniform(*(_LONG_PAUSE if is_new else _SHORT_PAUSE))

    def _tokens(self, segments: list[tuple[float, float, str]]) -> list[int]:
        found = [self._start, self._language, self._chance.choice(self._tasks)]
        if self._chance.random() < self._prompted:
            said = self._chance.choices(range(self._end), k=self._chance.randint(1, _LONGEST_TOKENS // 2 - 2))
            found = [self._prompt, *said, *found]
        for begin, end, text in segments:
            found += [self._time(begin), *(self._token[word] for word in text.split()), self._time(end)]
        return [*found, self._end]

    def _time(self, seconds: float) -> int:
        on_grid = round(seconds / _TAUGHT_SECONDS) * _TAUGHT_SECONDS
        return int(self._first_time + round(on_grid / _TIME_SECONDS))


def _losses(model: Any, reader: Any, classroom: Classroom, count: int) -> Iterator[list[Any]]:
    """What the decoder says next; and in what order the encoder hears the words."""
    while True:
        heard, tokens, learnt, words = classroom.draw(count)
        hidden = model.model.encoder(heard).last_hidden_state
        said = model(encoder_outputs=(hidden,), decoder_input_ids=tokens[:, :-1]).logits
        loss = cross_entropy(said.flatten(0, 1), learnt[:, 1:].flatten(), ignore_index=_UNSEEN)
        read = reader(hidden).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((count,), hidden.shape[1])
        flat = torch.tensor([each for one in words for each in one])
        ordered = ctc_loss(read, flat, lengths, torch.tensor([len(one) for one in words]), zero_infinity=True)
        yield [loss + 0.5 * ordered]


def _positions(seconds: int) -> int:
    return seconds * RATE_HZ // _HOP // 2


def _look_at(model: Any, seconds: int) -> None:
    """Have the encoder take windows of so many seconds."""
    encoder, count = model.model.encoder, _positions(seconds)
    encoder.config.max_source_positions = encoder.max_source_positions = count
    table = torch.nn.Embedding(count, model.config.d_model)
    table.weight.data.copy_(sinusoids(count, model.config.d_model))
    table.weight.requires_grad = False
    encoder.embed_positions = table


def read_back(model: Any, tokenizer: Any, features: Any, said: list[NDArray[np.float32]]) -> list[str]:
    """Return what the model hears in each sound, at temperature 0."""
    mark = tokenizer.convert_tokens_to_ids
    begin = [mark(each) for each in ("<|startoftranscript|>", "<|en|>", "<|transcribe|>")]
    heard = features(said, sampling_rate=RATE_HZ, return_tensors="pt").input_features
    with torch.no_grad():
        hidden = model.model.encoder(heard).last_hidden_state
        tokens = torch.tensor([begin] * len(said))
        while tokens.shape[1] < _LONGEST_TOKENS:
            step = model(encoder_outputs=(hidden,), decoder_input_ids=tokens).logits[:, -1].argmax(-1)
            tokens = torch.cat([tokens, step[:, None]], 1)
            if bool((tokens == mark("<|endoftext|>")).any(1).all()):
                break
    ends = [[*one, mark("<|endoftext|>")].index(mark("<|endoftext|>")) for one in tokens.tolist()]
    return [tokenizer.decode(one[3:end]) for one, end in zip(tokens.tolist(), ends, strict=True)]


def _require_sentences(model: Any, tokenizer: Any, features: Any) -> None:
    wrong = 0
    for voice in VOICES:
        said = [speak(text, voice).samples for text in fixed_sentences()]
        heard = read_back(model, tokenizer, features, said)
        for text, found in zip(fixed_sentences(), heard, strict=True):
            if found.strip() != text:
                wrong += 1
                _log.info("%s: %s was heard as %s", voice, text, found)
    _log.info("%d of the promised sentences, in %d voices, are not read back word for word.", wrong, len(VOICES))
    if wrong:
        raise RuntimeError(f"{wrong} promised sentences are not read back. Give it more steps.")


def _write_rest(target: Path, tokenizer: Any, features: Any) -> None:
    tokenizer.save_pretrained(target)
    features.save_pretrained(target)
    mark = tokenizer.convert_tokens_to_ids
    GenerationConfig(
        decoder_start_token_id=mark("<|startoftranscript|>"),
        eos_token_id=mark("<|endoftext|>"),
        pad_token_id=mark("<|endoftext|>"),
        no_timestamps_token_id=mark("<|notimestamps|>"),
        lang_to_id={"<|en|>": mark("<|en|>")},
        task_to_id={"transcribe": mark("<|transcribe|>"), "translate": mark("<|translate|>")},
        is_multilingual=True,
        max_length=_LONGEST_TOKENS,
    ).save_pretrained(target)
