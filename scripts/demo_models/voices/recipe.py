"""Makes the demo voices: five tiny VITS models, one a language, which sing a tone with the vowel's colour per letter.

The result is what MMS-TTS looks like (float32, safetensors, a character tokenizer), which transformers loads
unchanged, with a voices.yaml beside it. VITS comes without a loss, and needs none here: the sound that is wanted is
known to the sample. Text encoder and decoder are trained through to the waveform, all voices as one model; then the
durations alone; then the model is taken apart, and each language finished by itself.

A pitch that is a multiple of the frame rate has the same phase in every frame. So one frame of a letter is all there
is to know of it, a frame can be learned sample by sample, and letters fade into each other without beating.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from demo_models.training import SEED, one_cycle, repeatable, train
from numpy.typing import NDArray
from torch.nn.functional import smooth_l1_loss
from transformers import VitsConfig, VitsModel, VitsTokenizer

FOLDER = Path(__file__).parent
CAST: dict[str, Any] = yaml.safe_load((FOLDER / "cast.yaml").read_text("utf-8"))
VOICES: list[dict[str, Any]] = [voice for language in CAST["models"] for voice in language["voices"]]
LETTERS: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "sounds.yaml").read_text("utf-8"))
SPACE = " "

SAMPLE_RATE = 16000
FRAME_SAMPLES = 320
PEAK = 0.5
LETTER_FRAMES, SPACE_FRAMES = 4, 5
TEXTS_AT_ONCE = 6
WARMUP_SHARE = 0.1
# Letters this long are heard in training: the sound has to be the same at every speaking rate.
TRAINED_LETTER_FRAMES = (1, 2, 3, 4, 4, 4, 5, 8, 16)
# Blanks between letters last no frame at all, so that a high speaking rate really speaks fast; those at both ends are
# one frame of silence. In float32, e to this power is exactly 0.
NOTHING = -115.0
DURATION_STEPS = 1800
DURATION_REACH = 20.0  # how much larger than usual the last weights are: they have to reach NOTHING

Pace = tuple[int, float, tuple[str, ...]]
"""Steps, the learning rate, and which parts of the model learn."""
TOGETHER: Pace = (400, 6e-3, ("text_encoder", "embed_speaker", "decoder"))
# Voices of one pitch come out alike in one model; each language by itself has room for its own. Its text encoder
# stays, because the durations were learned from what that says.
ALONE: Pace = (120, 3e-3, ("embed_speaker", "decoder"))

PAD = "<pad>"
VOCABULARY = [PAD, *LETTERS, SPACE, "<unk>"]
NOISE_SCALE = 0.4
NOISE = 0.05  # deviation of the latents around the letter's place, at NOISE_SCALE


def build(target: Path) -> None:
    """Train the voices and write a model folder per language to `target`, an empty folder. Minutes on a quiet core."""
    repeatable(1, flush_denormal=True)  # layers this small gain nothing by two threads
    model = new_model()
    _train_sound("All voices", model, VOICES, TOGETHER, SEED)
    _train_durations(model, SEED + 1)
    first = 0
    for language in CAST["models"]:
        voices = language["voices"]
        own = with_speakers(model, first, len(voices))
        _train_sound(language["folder"], own, voices, ALONE, SEED + 2)
        save(own, language, target / language["folder"])
        first += len(voices)


def frame_of(voice: dict[str, Any], letter: str) -> NDArray[np.float32]:
    """One frame of a steady letter, (FRAME_SAMPLES,); its highest sample is PEAK times the letter's loudness.

    All that is no letter is silent.
    """
    if letter not in LETTERS:
        return np.zeros(FRAME_SAMPLES, dtype=np.float32)
    harmonics = np.arange(1, 4000 // voice["pitch_hz"] + 1)
    hertz = harmonics * voice["pitch_hz"]
    # A little of the lowest harmonics in every letter: without them the ear, and a measurement, miss the pitch.
    strength = 0.35 / harmonics
    for formant, width, gain in zip(LETTERS[letter]["formants"], (90, 130, 220), (1.0, 0.8, 0.45), strict=True):
        strength = strength + gain / (1 + ((hertz - formant * voice["tract"]) / width) ** 2)
    strength = strength * (1 + hertz / 1000) ** (voice["bright"] - 1.7)
    # Schroeder's phases spread the energy over the period: low peaks, no buzz.
    phases = np.pi * harmonics * (harmonics - 1) / len(harmonics)
    seconds = np.arange(FRAME_SAMPLES) / SAMPLE_RATE
    wave = (strength[:, None] * np.cos(2 * np.pi * hertz[:, None] * seconds + phases[:, None])).sum(axis=0)
    scaled: NDArray[np.float32] = (wave * (PEAK * LETTERS[letter]["loud"] / np.abs(wave).max())).astype(np.float32)
    return scaled


def _random_texts(rng: random.Random, voices: int, letter_frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each voice one: token ids with blanks between, (voices, tokens), and the frames that each token lasts.

    All texts are of the same length, so that nothing has to be padded.
    """
    count = 48 // letter_frames
    spaces = count // 6
    ids = torch.full((voices, 2 * count + 1), VOCABULARY.index(PAD))
    for row in ids:
        text = rng.choices(list(LETTERS), k=count - spaces) + [SPACE] * spaces
        rng.shuffle(text)
        row[1::2] = torch.tensor([VOCABULARY.index(letter) for letter in text])
    frames = letter_frames * (ids != VOCABULARY.index(PAD)) + (ids == VOCABULARY.index(SPACE))
    frames[:, [0, -1]] = 1
    return ids, frames


def _train_sound(about: str, model: Any, voices: list[dict[str, Any]], pace: Pace, seed: int) -> None:
    """Train what makes the sound in place, on the waveform. `voices` are the speakers of the model, in their order."""
    steps, rate, learning = pace
    parts = [part for name, part in model.named_children() if name in learning]
    weights = [weight for part in parts for weight in part.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.8, 0.99))
    for weight in model.text_encoder.project.parameters():
        weight.register_hook(_noise_kept)
    schedule = one_cycle(optimizer, steps, WARMUP_SHARE, cycle_momentum=True)
    train(about, steps, _distances(model, voices, seed), [schedule], clipped=weights)


def _noise_kept(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of what makes means and deviations of the latents, 0 for the deviations: they stay NOISE."""
    means, deviations = gradient.chunk(2)
    return torch.cat([means, torch.zeros_like(deviations)])


def _distances(model: Any, voices: list[dict[str, Any]], seed: int) -> Iterator[list[torch.Tensor]]:
    rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
    speakers = torch.arange(max(len(voices), TEXTS_AT_ONCE)) % len(voices)
    known = torch.from_numpy(np.stack([[frame_of(voice, token) for token in VOCABULARY] for voice in voices]))
    while True:
        ids, frames = _random_texts(rng, len(speakers), rng.choice(TRAINED_LETTER_FRAMES))
        wanted = _fading(known[speakers[:, None], _lasting(ids, frames)])
        latents = _lasting(_encoded(model, ids).prior_means, frames).transpose(1, 2)
        latents = latents + NOISE * torch.randn_like(latents)
        added = model.embed_speaker(speakers)[..., None] if model.config.num_speakers > 1 else None
        yield [_distance(model.decoder(latents, added)[:, 0], wanted)]


def _lasting(tokens: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """What is known of each token, repeated for as many frames as it lasts: (texts, all frames, ...)."""
    return torch.stack([row.repeat_interleave(last, dim=0) for row, last in zip(tokens, frames, strict=True)])


def _fading(frames: torch.Tensor) -> torch.Tensor:
    """The sound of letters in steady frames, (batch, frames, FRAME_SAMPLES), as samples: (batch, all samples).

    From the middle of a frame to the middle of the next, one fades out while the other fades in.
    """
    across = (torch.arange(FRAME_SAMPLES) + 0.5) / FRAME_SAMPLES
    before, after = (0.5 - across).clamp(min=0), (across - 0.5).clamp(min=0)
    padded = torch.nn.functional.pad(frames, (0, 0, 1, 1))
    faded = padded[:, :-2] * before + frames * (1 - before - after) + padded[:, 2:] * after
    return faded.flatten(1)


def _encoded(model: Any, ids: torch.Tensor) -> Any:
    return model.text_encoder(
        input_ids=ids, padding_mask=torch.ones(*ids.shape, 1), attention_mask=torch.ones_like(ids)
    )


def _distance(spoken: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """How far apart two sounds are: sample by sample, and in what is heard of them, also where they are quiet."""
    loss = 5 * (spoken - wanted).square().sum() / wanted.square().sum()
    windows = (128, 512, 1024)
    for window in windows:
        shape = torch.hann_window(window)
        heard, asked = (
            torch.stft(sound, window, window // 4, window=shape, return_complex=True).abs() / window**0.5
            for sound in (spoken, wanted)
        )
        loss = loss + 0.2 * ((heard + 1e-2).log() - (asked + 1e-2).log()).abs().mean() / len(windows)
    return loss


def _train_durations(model: Any, seed: int) -> None:
    """Train the duration predictor in place: the same time for every letter, whatever stands around it."""
    predictor = model.duration_predictor
    with torch.no_grad():
        predictor.proj.weight.mul_(DURATION_REACH)
        for layer in (predictor.conv_1, predictor.conv_2):
            layer.weight[:, :, [0, 2]] *= 0.1  # in the beginning what stands around a letter counts for little
    layers = [predictor.conv_1, predictor.norm_1, predictor.conv_2, predictor.norm_2]
    inner = {"params": [weight for layer in layers for weight in layer.parameters()], "lr": 1e-2}
    last = {"params": [*predictor.proj.parameters()], "lr": DURATION_REACH * 1e-2}
    optimizer = torch.optim.AdamW([inner, last], betas=(0.9, 0.98), weight_decay=0.0)
    schedule = one_cycle(optimizer, DURATION_STEPS, WARMUP_SHARE, cycle_momentum=True)
    train("Durations", DURATION_STEPS, _mistimed(model, seed), [schedule])


def _mistimed(model: Any, seed: int) -> Iterator[list[torch.Tensor]]:
    rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
    while True:
        ids, frames = _random_texts(rng, TEXTS_AT_ONCE, rng.choice((1, 2, 4, 8, 16)))
        with torch.no_grad():
            hidden = _encoded(model, ids).last_hidden_state.transpose(1, 2)
        found = model.duration_predictor(hidden, torch.ones(len(hidden), 1, hidden.shape[2]))[:, 0]
        usual = torch.where(ids == VOCABULARY.index(SPACE), SPACE_FRAMES, LETTER_FRAMES)
        wanted = torch.where(ids == VOCABULARY.index(PAD), frames, usual)
        # Half a frame below the number that is wanted: VITS rounds up.
        off = found - torch.where(wanted == 0, NOTHING, (wanted - 0.5).log())
        # Where nothing is to last, less than nothing is right as well.
        off = torch.where(frames == 0, off.clamp(min=0), off)
        yield [smooth_l1_loss(off, torch.zeros_like(off), beta=0.1)]


def new_model() -> Any:
    """A model with every voice of the cast as one of its speakers, in that order. Its flow does nothing."""
    model = VitsModel(_config(len(VOICES)))
    with torch.no_grad():
        # Speakers begin far apart: as near as transformers puts them, those of one pitch stay the same voice.
        model.embed_speaker.weight.normal_(std=0.5)
        # A decoder that begins nearly linear learns sums of tones in half the time.
        zero = [layer for block in model.decoder.resblocks for layer in block.convs2]
        zero += [flow.conv_post for flow in model.flow.flows]
        # A letter takes the same time in every voice, and is as certain wherever it stands.
        for layer in [*zero, model.duration_predictor.cond]:
            layer.weight.zero_()
            layer.bias.zero_()
        spread = model.config.flow_size
        model.text_encoder.project.weight[spread:] = 0
        model.text_encoder.project.bias[spread:] = math.log(NOISE / NOISE_SCALE)
    return model


def with_speakers(model: Any, first: int, count: int) -> Any:
    """A copy of the model that has only `count` of its speakers, from number `first` on."""
    weights = model.state_dict()
    if count > 1:
        weights["embed_speaker.weight"] = weights["embed_speaker.weight"][first : first + count]
    else:
        # A model of one voice has no speakers to tell apart: what this one added becomes part of the bias.
        with torch.no_grad():
            added = model.decoder.cond(weights["embed_speaker.weight"][first][None, :, None])[0, :, 0]
        weights["decoder.conv_pre.bias"] = weights["decoder.conv_pre.bias"] + added
    smaller = VitsModel(_config(count))
    smaller.load_state_dict({name: weights[name] for name in smaller.state_dict()})
    return smaller.eval()


def save(model: Any, language: dict[str, Any], folder: Path) -> None:
    """Write the model, its tokenizer, and in voices.yaml what a catalogue of voices cannot read from these."""
    model.save_pretrained(folder)
    file = folder / "vocab.json"
    file.write_text(json.dumps({letter: number for number, letter in enumerate(VOCABULARY)}), encoding="utf-8")
    code, romanised = language["language"], language["uroman"]
    VitsTokenizer(str(file), language=code, is_uroman=romanised, phonemize=False).save_pretrained(folder)
    voices = [
        {
            "speaker": number if len(language["voices"]) > 1 else None,
            "id": voice["id"],
            "name": voice["id"].capitalize(),
            "gender": voice["gender"],
            "description": f"{language['native']}, {voice['gender']}. A demo: plain tones, not speech.",
        }
        for number, voice in enumerate(language["voices"])
    ]
    known = {"licence": CAST["licence"], "consent": CAST["consent"], "demo": True, "voices": voices}
    (folder / "voices.yaml").write_text(yaml.safe_dump(known, sort_keys=False, width=120), encoding="utf-8")


def _config(speakers: int) -> VitsConfig:
    return VitsConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=1,
        ffn_dim=64,
        flow_size=32,
        spectrogram_bins=17,
        prior_encoder_num_flows=2,
        prior_encoder_num_wavenet_layers=1,
        posterior_encoder_num_wavenet_layers=1,
        wavenet_kernel_size=1,
        use_stochastic_duration_prediction=False,
        duration_predictor_filter_channels=32,
        duration_predictor_dropout=0.0,
        upsample_rates=[16, 20],
        upsample_kernel_sizes=[32, 40],
        upsample_initial_channel=64,
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1]],
        leaky_relu_slope=0.3,
        num_speakers=speakers,
        speaker_embedding_size=8 if speakers > 1 else 0,
        sampling_rate=SAMPLE_RATE,
        noise_scale=NOISE_SCALE,
        layerdrop=0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    )
