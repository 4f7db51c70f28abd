"""The parts of the demo image model that think: their sizes, and how pictures of a size are scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffusers import FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3Model

from engine.demo.image.autoencoder import LATENT_CHANNELS
from engine.demo.image.tokenizer import CONTEXT_TOKENS

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

WORD_FEATURES = 64
SHIFT = 3.0
"""As in the model it is modelled on: most of the steps go where place and shape are decided."""


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


def new_scheduler() -> Any:
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT, use_dynamic_shifting=False)
