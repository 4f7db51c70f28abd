"""Trains the demo voices: first what letters sound like, then how long they last.

VITS comes without a loss, and needs none here: the sound that is wanted is known to the sample, so text encoder and
decoder are trained through to the waveform, and the duration predictor alone afterwards.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import smooth_l1_loss

from engine.demo.voices.model import NOISE, PAD, VOCABULARY
from engine.demo.voices.sounds import LETTERS, SPACE, fading, frame_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.demo.voices.cast import Part

LETTER_FRAMES = 4
SPACE_FRAMES = 5
FRAMES_PER_TEXT = 48
# Letters this long are heard in training: the sound has to be the same at every speaking rate.
TRAINED_LETTER_FRAMES = (1, 2, 3, 4, 4, 4, 5, 8, 16)
WINDOWS = (128, 512, 1024)
HEARING = 0.2  # beside the difference of the samples
# Blanks between letters last no frame at all, so that a high speaking rate really speaks fast; those at both ends are
# one frame of silence. In float32, e to this power is exactly 0.
NOTHING = -115.0
DURATION_STEPS = 1800
DURATION_LEARNING_RATE = 1e-2
DURATION_REACH = 20.0  # how much larger than usual the last weights are: they have to reach NOTHING
TEXTS_AT_ONCE = 6

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """How long, how fast, and which parts of the model learn."""

    steps: int
    learning_rate: float
    parts: tuple[str, ...]


TOGETHER = Pace(steps=400, learning_rate=6e-3, parts=("text_encoder", "embed_speaker", "decoder"))
# Voices of one pitch come out alike in one model; each language by itself has room for its own. Its text encoder
# stays, because the durations were learned from what that says.
ALONE = Pace(steps=120, learning_rate=3e-3, parts=("embed_speaker", "decoder"))


@dataclass(frozen=True)
class Texts:
    """Random texts, one a voice: token ids with blanks between, (voices, tokens), and frames that each token lasts."""

    ids: torch.Tensor
    frames: torch.Tensor


def random_texts(rng: random.Random, voices: int, letter_frames: int) -> Texts:
    """All texts of the same length, so that nothing has to be padded."""
    count = FRAMES_PER_TEXT // letter_frames
    spaces = count // 6
    all_ids, all_frames = [], []
    for _ in range(voices):
        text = rng.choices(list(LETTERS), k=count - spaces) + [SPACE] * spaces
        rng.shuffle(text)
        ids, frames = [VOCABULARY.index(PAD)], [1]
        for letter in text:
            ids += [VOCABULARY.index(letter), VOCABULARY.index(PAD)]
            frames += [letter_frames + (letter == SPACE), 0]
        frames[-1] = 1
        all_ids.append(ids)
        all_frames.append(frames)
    return Texts(torch.tensor(all_ids), torch.tensor(all_frames))


def frames_of(part: Part) -> torch.Tensor:
    """A frame of every token that the voice knows, (tokens, FRAME_SAMPLES); blanks are silent."""
    tokens = (token if token in LETTERS else SPACE for token in VOCABULARY)
    return torch.stack([torch.from_numpy(frame_of(part, token)) for token in tokens])


def lasting(tokens: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """What is known of each token, repeated for as many frames as it lasts: (texts, all frames, ...)."""
    return torch.stack([row.repeat_interleave(last, dim=0) for row, last in zip(tokens, frames, strict=True)])


def train_sound(model: Any, voices: Sequence[Part], pace: Pace, seed: int) -> None:
    """Train what makes the sound in place, on the waveform. `voices` are the speakers of the model, in their order."""
    rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
    speakers = torch.arange(max(len(voices), TEXTS_AT_ONCE)) % len(voices)
    known = torch.stack([frames_of(voice) for voice in voices])
    parts = {name: part for name, part in model.named_children() if name in pace.parts}
    weights = [weight for part in parts.values() for weight in part.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=pace.learning_rate, betas=(0.8, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, pace.learning_rate, pace.steps, pct_start=0.1)
    started = time.process_time()
    for step in range(1, pace.steps + 1):
        texts = random_texts(rng, len(speakers), rng.choice(TRAINED_LETTER_FRAMES))
        wanted = fading(known[speakers[:, None], lasting(texts.ids, texts.frames)])
        loss = _distance(_spoken(model, texts, speakers), wanted)
        model.zero_grad()
        loss.backward()
        _keep_the_noise(model)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            cpu_seconds = time.process_time() - started
            _log.info("Step %d of %d, loss %.4f, %.0f s of CPU.", step, pace.steps, loss.item(), cpu_seconds)


def _encoded(model: Any, ids: torch.Tensor) -> Any:
    return model.text_encoder(
        input_ids=ids, padding_mask=torch.ones(*ids.shape, 1), attention_mask=torch.ones_like(ids)
    )


def _spoken(model: Any, texts: Texts, speakers: torch.Tensor) -> torch.Tensor:
    means = _encoded(model, texts.ids).prior_means
    latents = lasting(means, texts.frames).transpose(1, 2)
    latents = latents + NOISE * torch.randn_like(latents)
    voices = model.embed_speaker(speakers)[..., None] if model.config.num_speakers > 1 else None
    return model.decoder(latents, voices)[:, 0]


def _keep_the_noise(model: Any) -> None:
    spread = model.config.flow_size
    for weight in model.text_encoder.project.parameters():
        weight.grad[spread:] = 0


def _distance(spoken: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """How far apart two sounds are: sample by sample, and in what is heard of them, also where they are quiet."""
    loss = 5 * (spoken - wanted).square().sum() / wanted.square().sum()
    for window in WINDOWS:
        shape = torch.hann_window(window)
        heard, asked = (
            torch.stft(sound, window, window // 4, window=shape, return_complex=True).abs() / window**0.5
            for sound in (spoken, wanted)
        )
        loss = loss + HEARING * ((heard + 1e-2).log() - (asked + 1e-2).log()).abs().mean() / len(WINDOWS)
    return loss


def train_durations(model: Any, seed: int) -> None:
    """Train the duration predictor in place: the same time for every letter, whatever stands around it."""
    rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
    predictor = model.duration_predictor
    optimizer, schedule = _start_durations(predictor)
    for step in range(1, DURATION_STEPS + 1):
        texts = random_texts(rng, TEXTS_AT_ONCE, rng.choice((1, 2, 4, 8, 16)))
        with torch.no_grad():
            hidden = _encoded(model, texts.ids).last_hidden_state.transpose(1, 2)
        found = predictor(hidden, torch.ones(len(hidden), 1, hidden.shape[2]))[:, 0]
        off = found - _wanted_log_frames(texts)
        # Where nothing is to last, less than nothing is right as well.
        off = torch.where(texts.frames == 0, off.clamp(min=0), off)
        loss = smooth_l1_loss(off, torch.zeros_like(off), beta=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 300 == 0:
            _log.info("Durations, step %d of %d, loss %.4f.", step, DURATION_STEPS, loss.item())


def _start_durations(predictor: Any) -> tuple[Any, Any]:
    """The optimizer and its schedule. In the beginning what stands around a letter counts for little."""
    with torch.no_grad():
        predictor.proj.weight.mul_(DURATION_REACH)
        for layer in (predictor.conv_1, predictor.conv_2):
            layer.weight[:, :, [0, 2]] *= 0.1
    layers = [predictor.conv_1, predictor.norm_1, predictor.conv_2, predictor.norm_2]
    rates = [DURATION_LEARNING_RATE, DURATION_REACH * DURATION_LEARNING_RATE]
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight for layer in layers for weight in layer.parameters()], "lr": rates[0]},
            {"params": [*predictor.proj.parameters()], "lr": rates[1]},
        ],
        betas=(0.9, 0.98),
        weight_decay=0.0,
    )
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, DURATION_STEPS, pct_start=0.1)


def _wanted_log_frames(texts: Texts) -> torch.Tensor:
    """Half a frame below the number that is wanted: VITS rounds up."""
    frames = torch.where(texts.ids == VOCABULARY.index(SPACE), SPACE_FRAMES, LETTER_FRAMES)
    frames = torch.where(texts.ids == VOCABULARY.index(PAD), texts.frames, frames)
    return torch.where(frames == 0, NOTHING, (frames - 0.5).log())
