"""Builds the folder of an image pipeline with random weights, in the shape of a real model: noise, at its cost.

Nothing is downloaded. `python -m benchmarks.images_random sdxl full FOLDER`; the only part that loads torch.
"""

from __future__ import annotations

import string
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
import transformers

_SEED = 7


@dataclass(frozen=True, slots=True)
class TextShape:
    """A CLIP text encoder."""

    hidden: int
    layers: int
    heads: int
    activation: Literal["quick_gelu", "gelu"] = "quick_gelu"


@dataclass(frozen=True, slots=True)
class Shape:
    """What differs between the real size and one that a CPU runs in no time."""

    words: int
    first_text: TextShape
    second_text: TextShape
    third_text: dict[str, Any]
    decoder_blocks: tuple[int, ...]
    unet: dict[str, Any]
    transformer: dict[str, Any]
    dtype: torch.dtype


SHAPES = {
    "full": Shape(
        words=49408,
        first_text=TextShape(768, 12, 12),
        second_text=TextShape(1280, 32, 20, "gelu"),
        third_text={"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64},
        decoder_blocks=(128, 256, 512, 512),
        unet={
            "sample_size": 128,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": (5, 10, 20),
            "transformer_layers_per_block": (1, 2, 10),
            "addition_time_embed_dim": 256,
        },
        transformer={
            "sample_size": 128,
            "num_layers": 24,
            "num_attention_heads": 24,
            "attention_head_dim": 64,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 192,
        },
        dtype=torch.float16,
    ),
    "tiny": Shape(
        words=1024,
        first_text=TextShape(32, 2, 4),
        second_text=TextShape(32, 2, 4),
        third_text={"d_model": 128, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4},
        decoder_blocks=(8, 8, 8, 8),
        unet={
            "sample_size": 8,
            "block_out_channels": (32, 64),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": (2, 4),
            "transformer_layers_per_block": (1, 2),
            "addition_time_embed_dim": 8,
            "layers_per_block": 1,
        },
        transformer={
            "sample_size": 16,
            "num_layers": 2,
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 128,
        },
        dtype=torch.float32,
    ),
}


def sdxl(shape: Shape) -> Any:
    """Return an SDXL pipeline."""
    tokenizer, words = _tokenizer()
    first, second = shape.first_text, shape.second_text
    unet = diffusers.UNet2DConditionModel(
        in_channels=4,
        out_channels=4,
        use_linear_projection=True,
        addition_embed_type="text_time",
        projection_class_embeddings_input_dim=6 * shape.unet["addition_time_embed_dim"] + second.hidden,
        cross_attention_dim=first.hidden + second.hidden,
        **shape.unet,
    )
    return diffusers.StableDiffusionXLPipeline(
        vae=_autoencoder(shape, channels=4, scaling_factor=0.13025).to(shape.dtype),
        text_encoder=_text_encoder(shape.words, first, words, projected=False).to(shape.dtype),
        text_encoder_2=_text_encoder(shape.words, second, words, projected=True).to(shape.dtype),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet.to(shape.dtype),
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            steps_offset=1,
            timestep_spacing="leading",
        ),
        add_watermarker=False,
    )


def sd3(shape: Shape) -> Any:
    """Return a pipeline in the shape of Stable Diffusion 3 medium."""
    tokenizer, words = _tokenizer()
    last_tokenizer, last_encoder = _last_text(shape)
    first, second = shape.first_text, shape.second_text
    transformer = diffusers.SD3Transformer2DModel(
        in_channels=16,
        out_channels=16,
        patch_size=2,
        joint_attention_dim=shape.third_text["d_model"],
        pooled_projection_dim=first.hidden + second.hidden,
        **shape.transformer,
    )
    vae = _autoencoder(
        shape, channels=16, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer.to(shape.dtype),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae.to(shape.dtype),
        text_encoder=_text_encoder(shape.words, first, words, projected=True).to(shape.dtype),
        tokenizer=tokenizer,
        text_encoder_2=_text_encoder(shape.words, second, words, projected=True).to(shape.dtype),
        tokenizer_2=tokenizer,
        text_encoder_3=last_encoder,
        tokenizer_3=last_tokenizer,
    )


def _autoencoder(shape: Shape, *, channels: int, **more: Any) -> Any:
    blocks = shape.decoder_blocks
    return diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(blocks),
        up_block_types=("UpDecoderBlock2D",) * len(blocks),
        block_out_channels=blocks,
        norm_num_groups=min(32, *blocks),
        layers_per_block=2,
        sample_size=1024,
        **more,
    ).eval()


def _text_encoder(size: int, shape: TextShape, words: dict[str, int], *, projected: bool) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=size,
        hidden_size=shape.hidden,
        intermediate_size=4 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        hidden_act=shape.activation,
        projection_dim=shape.hidden,
        max_position_embeddings=77,
        bos_token_id=words["<|startoftext|>"],
        eos_token_id=words["<|endoftext|>"],
        pad_token_id=words["<|endoftext|>"],
    )
    kind = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return kind(config).eval()


def _last_text(shape: Shape) -> tuple[Any, Any]:
    """A T5 and a tokenizer that spells."""
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -2.0)]
    words += [(letter, -3.0) for letter in string.printable if letter.strip()]
    tokenizer = transformers.T5TokenizerFast(vocab=words, extra_ids=0, model_max_length=512)
    config = transformers.T5Config(vocab_size=shape.words, feed_forward_proj="gated-gelu", **shape.third_text)
    return tokenizer, transformers.T5EncoderModel(config).eval().to(shape.dtype)


def _tokenizer() -> tuple[Any, dict[str, int]]:
    """One that spells every word: what a text costs depends on its padded length alone."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = [*map(chr, plain), *(chr(256 + place) for place in range(256 - len(plain)))]
    spelt = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    words = {word: place for place, word in enumerate(spelt)}
    return transformers.CLIPTokenizer(vocab=words, merges=[], model_max_length=77), words


FAMILIES = {"sdxl": sdxl, "sd3": sd3}


def main() -> None:
    """Arguments: family, shape, folder."""
    family, shape, folder = sys.argv[1:]
    torch.manual_seed(_SEED)
    # Billions of random numbers: a GPU draws them at once.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.no_grad():
        pipe = FAMILIES[family](SHAPES[shape])
    pipe.save_pretrained(Path(folder), safe_serialization=True)


if __name__ == "__main__":
    main()
