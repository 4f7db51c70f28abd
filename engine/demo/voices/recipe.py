"""Makes the demo voices: five tiny VITS models, one a language, which sing a tone with the vowel's colour per letter.

The result is what MMS-TTS looks like (float32, safetensors, a character tokenizer), which transformers loads
unchanged, with a voices.yaml beside it. All voices are trained as one model, which is then taken apart, and each
language finished by itself. Fixed seeds: the same machine makes the same bytes again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from transformers import VitsModel, VitsTokenizer
from transformers.utils.logging import disable_progress_bar

from engine.demo.voices.cast import cast, everybody
from engine.demo.voices.model import VOCABULARY, new_model, save, with_speakers
from engine.demo.voices.pitch import median_pitch_hz
from engine.demo.voices.sounds import FRAME_SAMPLES, PEAK, SAMPLE_RATE, SPACE, fading
from engine.demo.voices.training import (
    ALONE,
    LETTER_FRAMES,
    SPACE_FRAMES,
    TOGETHER,
    frames_of,
    train_durations,
    train_sound,
)

if TYPE_CHECKING:
    from pathlib import Path

    from engine.demo.voices.cast import LanguageModel, Part

SEED = 7
THREADS = 1  # part of the recipe: another number adds up in another order, and layers this small gain nothing by two
# How the sample of every voice is examined: against the sound that it was to learn.
LARGEST_PITCH_ERROR = 0.02
PEAKS = (0.7 * PEAK, 1.3 * PEAK)
LOUDEST_END = 0.02
SMALLEST_SIGNAL_TO_ERROR_DB = 10.0

_log = logging.getLogger(__name__)


def build(target: Path) -> None:
    """Train the voices and write a model folder per language to `target`, an empty folder.

    Raises RuntimeError when a voice does not sound as it was to.
    """
    torch.set_num_threads(THREADS)
    torch.set_flush_denormal(True)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(SEED)
    disable_progress_bar()
    model = new_model()
    _log.info("Training %.2f million parameters, three minutes on a quiet core.", model.num_parameters() / 1e6)
    train_sound(model, everybody(), TOGETHER, SEED)
    train_durations(model, SEED + 1)
    first = 0
    for language in cast():
        _log.info("Now %s by itself.", language.folder)
        own = with_speakers(model, first, len(language.voices))
        train_sound(own, language.voices, ALONE, SEED + 2)
        save(own, language, target / language.folder)
        first += len(language.voices)
    torch.set_flush_denormal(False)  # numpy, which measures the pitch, warns of it
    for language in cast():
        _examine(language, target / language.folder)


def _examine(language: LanguageModel, folder: Path) -> None:
    """Raise RuntimeError unless each voice says its sample at its pitch, in time, cleanly and not too loud."""
    model = VitsModel.from_pretrained(folder).eval()
    read = VitsTokenizer.from_pretrained(folder)(language.sample, return_tensors="pt")
    for speaker, part in enumerate(language.voices):
        torch.manual_seed(SEED)
        with torch.inference_mode():
            spoken = model(**read, speaker_id=speaker).waveform[0]
        wanted = _wanted(language.sample, part)
        if len(spoken) != len(wanted):
            raise _wrong(part, f"speaks for {len(spoken)} samples and not {len(wanted)}")
        _judge(part, spoken, wanted)


def _wanted(sample: str, part: Part) -> torch.Tensor:
    tokens = [(letter, SPACE_FRAMES if letter == SPACE else LETTER_FRAMES) for letter in sample]
    numbers = [VOCABULARY.index(letter) for letter, last in [(SPACE, 1), *tokens, (SPACE, 1)] for _ in range(last)]
    return fading(frames_of(part)[torch.tensor(numbers)][None])[0]


def _judge(part: Part, spoken: torch.Tensor, wanted: torch.Tensor) -> None:
    pitch = median_pitch_hz(spoken.numpy(), SAMPLE_RATE)
    peak = spoken.abs().max().item()
    ends = torch.cat([spoken[: FRAME_SAMPLES // 4], spoken[-FRAME_SAMPLES // 4 :]]).abs().max().item()
    error_db = 10 * torch.log10(wanted.square().sum() / (wanted - spoken).square().sum()).item()
    _log.info("%s: %.0f Hz, peak %.2f, ends %.3f, %.1f dB above its error.", part.id, pitch, peak, ends, error_db)
    if abs(pitch / part.pitch_hz - 1) > LARGEST_PITCH_ERROR:
        raise _wrong(part, f"speaks at {pitch:.0f} Hz and not at {part.pitch_hz}")
    if not PEAKS[0] <= peak <= PEAKS[1]:
        raise _wrong(part, f"has a peak of {peak:.2f}, which is not between {PEAKS[0]:.2f} and {PEAKS[1]:.2f}")
    if ends > LOUDEST_END:
        raise _wrong(part, f"begins or ends with a click of {ends:.3f}")
    if error_db < SMALLEST_SIGNAL_TO_ERROR_DB:
        raise _wrong(part, f"is only {error_db:.1f} dB louder than what is wrong with it")


def _wrong(part: Part, what: str) -> RuntimeError:
    return RuntimeError(
        f"The demo voice {part.id} {what}. Give it more steps (TOGETHER, ALONE and DURATION_STEPS in"
        " engine/demo/voices/training.py)."
    )
