"""Makes the demo voices: five tiny VITS models, one a language, which sing a tone with the vowel's colour per letter.

The result is what MMS-TTS looks like (float32, safetensors, a character tokenizer), which transformers loads
unchanged, with a voices.yaml beside it. VITS comes without a loss, and needs none here: the sound that is wanted is
known to the sample. Text encoder and decoder are trained through to the waveform, all voices as one model; then the
durations alone; then the model is taken apart, and each language finished by itself.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from demo_models.training import SEED, one_cycle, repeatable, train
from demo_models.voices.cast import (
    FRAME_SAMPLES,
    LETTERS,
    SAMPLE_RATE,
    SPACE,
    LanguageModel,
    Part,
    all_voices,
    cast,
    frame_of,
    overlay,
)
from torch.nn.functional import smooth_l1_loss
from transformers import VitsConfig, VitsModel, VitsTokenizer

THREADS = 1  # layers this small gain nothing by two
LETTER_FRAMES = 4
SPACE_FRAMES = 5
FRAMES_PER_TEXT = 48
TEXTS_AT_ONCE = 6
WARMUP_SHARE = 0.1
# Letters this long are heard in training: the sound has to be the same at every speaking rate.
TRAINED_LETTER_FRAMES = (1, 2, 3, 4, 4, 4, 5, 8, 16)
WINDOWS = (128, 512, 1024)
HEARING = 0.2  # beside the difference of the samples
# Blanks between letters last no frame at all, so that a high speaking rate really speaks fast; those at both ends are
# one frame of silence. In float32, e to this power is exactly 0.
NOTHING = -115.0
DURATION_STEPS, DURATION_RATE = 1800, 1e-2
DURATION_REACH = 20.0  # how much larger than usual the last weights are: they have to reach NOTHING

PAD, UNKNOWN = "<pad>", "<unk>"
VOCABULARY = [PAD, *LETTERS, SPACE, UNKNOWN]
NOISE_SCALE = 0.4
NOISE = 0.05  # deviation of the latents around the letter's place, at NOISE_SCALE
SPEAKER_SIZE = 8
# Speakers begin far apart: as near as transformers puts them, those of one pitch stay the same voice.
SPEAKER_SPREAD = 0.5


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


def build(target: Path) -> None:
    """Train the voices and write a model folder per language to `target`, an empty folder. Minutes on a quiet core."""
    repeatable(THREADS, flush_denormal=True)
    model = new_model()
    _train_sound("All voices", model, all_voices(), TOGETHER, SEED)
    _train_durations(model, SEED + 1)
    first = 0
    for language in cast():
        own = with_speakers(model, first, len(language.voices))
        _train_sound(language.folder, own, language.voices, ALONE, SEED + 2)
        save(own, language, target / language.folder)
        first += len(language.voices)


def _random_texts(rng: random.Random, voices: int, letter_frames: int) -> Texts:
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


def _train_sound(about: str, model: Any, voices: Sequence[Part], pace: Pace, seed: int) -> None:
    """Train what makes the sound in place, on the waveform. `voices` are the speakers of the model, in their order."""
    parts = [part for name, part in model.named_children() if name in pace.parts]
    weights = [weight for part in parts for weight in part.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=pace.learning_rate, betas=(0.8, 0.99))
    for weight in model.text_encoder.project.parameters():
        weight.register_hook(_noise_kept)
    schedule = one_cycle(optimizer, pace.steps, WARMUP_SHARE, cycle_momentum=True)
    train(about, pace.steps, _distances(model, voices, seed), [schedule], clipped=weights)


def _noise_kept(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of what makes means and deviations of the latents, 0 for the deviations: they stay NOISE."""
    means = len(gradient) // 2
    return torch.cat([gradient[:means], torch.zeros_like(gradient[means:])])


def _distances(model: Any, voices: Sequence[Part], seed: int) -> Iterator[list[torch.Tensor]]:
    rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
    speakers = torch.arange(max(len(voices), TEXTS_AT_ONCE)) % len(voices)
    known = torch.stack([_frames_of(voice) for voice in voices])
    while True:
        texts = _random_texts(rng, len(speakers), rng.choice(TRAINED_LETTER_FRAMES))
        wanted = _fading(known[speakers[:, None], _lasting(texts.ids, texts.frames)])
        yield [_distance(_spoken(model, texts, speakers), wanted)]


def _frames_of(part: Part) -> torch.Tensor:
    """A frame of every token that the voice knows, (tokens, FRAME_SAMPLES); blanks are silent."""
    tokens = (token if token in LETTERS else SPACE for token in VOCABULARY)
    return torch.stack([torch.from_numpy(frame_of(part, token)) for token in tokens])


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


def _spoken(model: Any, texts: Texts, speakers: torch.Tensor) -> torch.Tensor:
    means = _encoded(model, texts.ids).prior_means
    latents = _lasting(means, texts.frames).transpose(1, 2)
    latents = latents + NOISE * torch.randn_like(latents)
    voices = model.embed_speaker(speakers)[..., None] if model.config.num_speakers > 1 else None
    return model.decoder(latents, voices)[:, 0]


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


def _train_durations(model: Any, seed: int) -> None:
    """Train the duration predictor in place: the same time for every letter, whatever stands around it."""
    predictor = model.duration_predictor
    with torch.no_grad():
        predictor.proj.weight.mul_(DURATION_REACH)
        for layer in (predictor.conv_1, predictor.conv_2):
            layer.weight[:, :, [0, 2]] *= 0.1  # in the beginning what stands around a letter counts for little
    layers = [predictor.conv_1, predictor.norm_1, predictor.conv_2, predictor.norm_2]
    optimizer = torch.optim.AdamW(
        [
            {"params": [weight for layer in layers for weight in layer.parameters()], "lr": DURATION_RATE},
            {"params": [*predictor.proj.parameters()], "lr": DURATION_REACH * DURATION_RATE},
        ],
        betas=(0.9, 0.98),
        weight_decay=0.0,
    )
    schedule = one_cycle(optimizer, DURATION_STEPS, WARMUP_SHARE, cycle_momentum=True)
    train("Durations", DURATION_STEPS, _mistimed(model, seed), [schedule])


def _mistimed(model: Any, seed: int) -> Iterator[list[torch.Tensor]]:
    rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
    while True:
        texts = _random_texts(rng, TEXTS_AT_ONCE, rng.choice((1, 2, 4, 8, 16)))
        with torch.no_grad():
            hidden = _encoded(model, texts.ids).last_hidden_state.transpose(1, 2)
        found = model.duration_predictor(hidden, torch.ones(len(hidden), 1, hidden.shape[2]))[:, 0]
        off = found - _wanted_log_frames(texts)
        # Where nothing is to last, less than nothing is right as well.
        off = torch.where(texts.frames == 0, off.clamp(min=0), off)
        yield [smooth_l1_loss(off, torch.zeros_like(off), beta=0.1)]


def _wanted_log_frames(texts: Texts) -> torch.Tensor:
    """Half a frame below the number that is wanted: VITS rounds up."""
    frames = torch.where(texts.ids == VOCABULARY.index(SPACE), SPACE_FRAMES, LETTER_FRAMES)
    frames = torch.where(texts.ids == VOCABULARY.index(PAD), texts.frames, frames)
    return torch.where(frames == 0, NOTHING, (frames - 0.5).log())


def new_model() -> Any:
    """A model with every voice of the cast as one of its speakers, in that order. Its flow does nothing."""
    model = VitsModel(_config(len(all_voices())))
    with torch.no_grad():
        model.embed_speaker.weight.normal_(std=SPEAKER_SPREAD)
        # A decoder that begins nearly linear learns sums of tones in half the time.
        for block in model.decoder.resblocks:
            for layer in block.convs2:
                layer.weight.zero_()
                layer.bias.zero_()
        for flow in model.flow.flows:
            flow.conv_post.weight.zero_()
            flow.conv_post.bias.zero_()
        # A letter takes the same time in every voice, and is as certain wherever it stands.
        model.duration_predictor.cond.weight.zero_()
        model.duration_predictor.cond.bias.zero_()
        spread = model.config.flow_size
        model.text_encoder.project.weight[spread:] = 0
        model.text_encoder.project.bias[spread:] = math.log(NOISE / NOISE_SCALE)
    return model


def with_speakers(model: Any, first: int, count: int) -> Any:
    """A copy of the model that has only `count` of its speakers, from number `first` on."""
    weights = model.state_dict()
    if count > 1:
        weights["embed_speaker.weight"] = weights["embed_speaker.weight"][first : first + count].clone()
    else:
        # A model of one voice has no speakers to tell apart: what this one added becomes part of the bias.
        with torch.no_grad():
            added = model.decoder.cond(weights["embed_speaker.weight"][first][None, :, None])[0, :, 0]
        weights["decoder.conv_pre.bias"] = weights["decoder.conv_pre.bias"] + added
    smaller = VitsModel(_config(count))
    smaller.load_state_dict({name: weights[name] for name in smaller.state_dict()})
    return smaller.eval()


def save(model: Any, language: LanguageModel, folder: Path) -> None:
    """Write the model, its tokenizer and voices.yaml to `folder`, which is made."""
    model.save_pretrained(folder)
    vocabulary = {letter: number for number, letter in enumerate(VOCABULARY)}
    file = folder / "vocab.json"
    file.write_text(json.dumps(vocabulary), encoding="utf-8")
    VitsTokenizer(
        str(file),
        pad_token=PAD,
        unk_token=UNKNOWN,
        language=language.language,
        is_uroman=language.uroman,
        phonemize=False,
        normalize=True,
        add_blank=True,
    ).save_pretrained(folder)
    (folder / "voices.yaml").write_text(overlay(language), encoding="utf-8")


def _config(speakers: int) -> VitsConfig:
    return VitsConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
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
        speaker_embedding_size=SPEAKER_SIZE if speakers > 1 else 0,
        sampling_rate=SAMPLE_RATE,
        noise_scale=NOISE_SCALE,
        layerdrop=0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    )
