"""The VITS models of the demo voices: one that speaks with all nine, and how a language is taken out of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from demo_models.voices.cast import LETTERS, SAMPLE_RATE, SPACE, LanguageModel, all_voices, overlay
from transformers import VitsConfig, VitsModel, VitsTokenizer

PAD, UNKNOWN = "<pad>", "<unk>"
VOCABULARY = [PAD, *LETTERS, SPACE, UNKNOWN]
NOISE_SCALE = 0.4
NOISE = 0.05  # deviation of the latents around the letter's place, at NOISE_SCALE
SPEAKER_SIZE = 8
# Speakers begin far apart: as near as transformers puts them, those of one pitch stay the same voice.
SPEAKER_SPREAD = 0.5


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
