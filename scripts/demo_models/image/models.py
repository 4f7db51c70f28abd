"""The parts of the demo image model, untrained: a Z-Image pipeline of two million parameters.

The autoencoder brings pictures of flat colours to a sixteenth of their edge, and back. From random weights most of its
training would go into finding out that colours matter, so it starts with passing them on, blurred.
"""

from __future__ import annotations

from typing import Any

import torch
from demo_models.image.prompts import CONTEXT_TOKENS
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

LATENT_CHANNELS = 12
WORD_FEATURES = 64
SHIFT = 3.0
"""As in the model it is modelled on: most of the steps go where place and shape are decided."""
# Two channels carry a constant through all layers. Without them the group norms would scale a picture of one colour
# like a picture of another, and its colour were lost.
CONSTANT = 3.0
FIRST = 2
RANDOM_PART = 0.3
SMALL_LOG_VARIANCE = -4.6


def new_autoencoder() -> Any:
    model = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=LATENT_CHANNELS,
        down_block_types=("DownEncoderBlock2D",) * 5,
        up_block_types=("UpDecoderBlock2D",) * 5,
        block_out_channels=(8, 16, 32, 48, 64),
        layers_per_block=1,
        norm_num_groups=1,
        sample_size=256,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
    _start_as_a_blur(model)
    return model


def _start_as_a_blur(model: Any) -> None:
    """Set the weights in place: every layer outside the residuals passes its channels on, and averages going down."""
    with torch.no_grad():
        for name, layer in model.named_modules():
            if name.endswith(".conv2"):
                layer.weight.zero_()
            elif isinstance(layer, torch.nn.Conv2d) and not name.endswith(".conv1"):
                layer.weight *= RANDOM_PART
                layer.bias.zero_()
                _pass_on(name, layer)
                if not name.endswith("conv_out"):
                    layer.weight[:FIRST] = 0
                    layer.bias[0], layer.bias[1] = CONSTANT, -CONSTANT
        model.encoder.conv_out.weight[LATENT_CHANNELS:] = 0
        model.encoder.conv_out.bias[LATENT_CHANNELS:] = SMALL_LOG_VARIANCE


def _pass_on(name: str, layer: Any) -> None:
    weight = layer.weight
    outputs, inputs = weight.shape[:2]
    middle = weight.shape[2] // 2
    into, out_of, gain = FIRST, FIRST, 1.0
    if name.endswith("conv_in"):
        out_of = 0
    elif name.endswith("conv_out"):
        into, gain = 0, 2.0
    for number in range(min(outputs - into, inputs - out_of)):
        if "downsamplers" in name:
            weight[into + number, out_of + number, :2, :2] += gain / 4
        else:
            weight[into + number, out_of + number, middle, middle] += gain


def new_text_encoder(tokenizer: Qwen2Tokenizer) -> Any:
    """The pipeline takes what comes out of the last layer but one, as it does with the big one."""
    return Qwen3Model(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=WORD_FEATURES,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=CONTEXT_TOKENS,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def new_transformer() -> Any:
    return ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=96,
        n_layers=4,
        n_refiner_layers=1,
        n_heads=3,
        n_kv_heads=3,
        qk_norm=True,
        cap_feat_dim=WORD_FEATURES,
        axes_dims=[8, 12, 12],
        axes_lens=[CONTEXT_TOKENS + 64, 64, 64],
    )


def new_scheduler() -> Any:
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT, use_dynamic_shifting=False)
