"""Makes VITS model folders with random weights: quick to run, and they sound like nothing. Holds no tests."""

import json
from pathlib import Path

import torch
from transformers import VitsConfig

from engine.backends.tts.vits import VitsModel, VitsTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz'- "


def save_vits(folder: Path, *, language: str = "eng", is_uroman: bool = False, speakers: int = 1, rate: int = 16000):
    """Write a folder like Meta's MMS voices, with `speakers` voices."""
    folder.mkdir(parents=True)
    vocabulary = {letter: number for number, letter in enumerate(["|", *LETTERS, "<unk>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    tokenizer = VitsTokenizer(
        str(folder / "vocab.json"), pad_token="|", language=language, is_uroman=is_uroman, phonemize=False
    )
    config = VitsConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=64,
        flow_size=32,
        spectrogram_bins=65,
        upsample_initial_channel=32,
        upsample_rates=[8, 8, 2, 2],
        upsample_kernel_sizes=[16, 16, 4, 4],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        prior_encoder_num_wavenet_layers=2,
        posterior_encoder_num_wavenet_layers=2,
        depth_separable_num_layers=1,
        duration_predictor_num_flows=2,
        prior_encoder_num_flows=2,
        wavenet_kernel_size=3,
        num_speakers=speakers,
        speaker_embedding_size=16 if speakers > 1 else 0,
        sampling_rate=rate,
    )
    torch.manual_seed(7)
    VitsModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
