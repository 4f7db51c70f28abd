"""The smallest pipelines of each family, with random weights, made of configurations alone: nothing is fetched.

Each comes back as a saved folder, as a user would have downloaded it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tiny_texts import clip, clip_tokenizer, qwen3, qwen_tokenizer, t5


def save(family: str, folder: Path, **options: Any) -> Path:
    """Write a random pipeline of a family, the same every time, and return its folder; `options` are diffusers'."""
    torch.manual_seed(7)
    _FAMILIES[family]().save_pretrained(folder, **options)
    return folder


def _vae(latent_channels: int, *, shift: float | None = None) -> Any:
    quantised = latent_channels == 4
    return diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=latent_channels,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8,) * 4,
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=64,
        scaling_factor=0.5,
        shift_factor=shift,
        use_quant_conv=quantised,
        use_post_quant_conv=quantised,
    ).eval()


def _z_image() -> Any:
    tokenizer, words = qwen_tokenizer()
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        norm_eps=1e-5,
        qk_norm=True,
        cap_feat_dim=32,
        rope_theta=256.0,
        t_scale=1000.0,
        axes_dims=[8, 4, 4],
        axes_lens=[1536, 512, 512],
    )
    # They are uninitialised or zero in a new model; trained ones are neither.
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token)
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=_vae(16, shift=0.1),
        text_encoder=qwen3(words, layers=3, kind=transformers.Qwen3Model),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def _sdxl() -> Any:
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=6 * 8 + 32,
        cross_attention_dim=64,
    )
    return diffusers.StableDiffusionXLPipeline(
        vae=_vae(4),
        text_encoder=clip(),
        text_encoder_2=clip(projection=32),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            steps_offset=1,
            timestep_spacing="leading",
        ),
        add_watermarker=False,
    )


def _sd3() -> Any:
    tokenizer, encoder = t5()
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=64,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(4, shift=0.06),
        text_encoder=clip(projection=32),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip(projection=32),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=encoder,
        tokenizer_3=tokenizer,
    )


def _sd3_without_t5() -> Any:
    return diffusers.StableDiffusion3Pipeline(**_sd3().components | {"text_encoder_3": None, "tokenizer_3": None})


def _flux2_klein() -> Any:
    tokenizer, words = qwen_tokenizer()
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=96,
        timestep_guidance_channels=256,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    vae = diffusers.AutoencoderKLFlux2(
        sample_size=64,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8,) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()
    return diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=qwen3(words, layers=28, kind=transformers.Qwen3ForCausalLM),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def _qwen_image() -> Any:
    tokenizer, words = qwen_tokenizer()
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": words,
            "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
            "rope_theta": 1000000.0,
            "max_position_embeddings": 2048,
        },
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16},
        hidden_size=16,
        vision_start_token_id=words - 5,
        vision_end_token_id=words - 4,
        image_token_id=words - 3,
        video_token_id=words - 2,
    )
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.1, 0.2, 0.0],
        latents_std=[1.0, 1.5, 0.8, 1.1],
    ).eval()
    # As they are made, a prompt hardly moves a pixel.
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(8)
        for weights in transformer.transformer_blocks.parameters():
            weights.mul_(3)
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config).eval(),
        tokenizer=tokenizer,
        transformer=transformer,
    )


_FAMILIES: dict[str, Callable[[], Any]] = {
    "z_image": _z_image,
    "sdxl": _sdxl,
    "sd3": _sd3,
    "sd3_without_t5": _sd3_without_t5,
    "flux2_klein": _flux2_klein,
    "qwen_image": _qwen_image,
}
