"""Stable Diffusion XL: a UNet, guided against zeros or a negative prompt; any scheduler of its own kind."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from numpy.typing import NDArray

from engine.backends.diffusers.adapters.common import (
    Denoising,
    Order,
    finish,
    guide,
    schedule,
    seeded,
    stacked,
    unscaled,
)

MIXES_SIZES = False


def suits(pipe: Any) -> bool:
    # Distilled to be told its guidance: not taken apart here.
    return pipe.unet.config.time_cond_proj_dim is None


def prepare(pipe: Any, order: Order) -> Denoising:
    guided = order.guidance > 1
    generator = seeded(order.seed)
    prompt, negative, pooled, negative_pooled = pipe.encode_prompt(
        prompt=[order.prompt],
        negative_prompt=None if order.negative_prompt is None else [order.negative_prompt],
        do_classifier_free_guidance=guided,
    )
    scheduler = schedule(pipe, num_inference_steps=order.steps)
    edge = order.edge // pipe.vae_scale_factor
    device = pipe._execution_device  # noqa: SLF001  # as the pipeline does
    noise = randn_tensor(
        (1, pipe.unet.config.in_channels, edge, edge), generator=generator, device=device, dtype=prompt.dtype
    )
    times = _size_condition(pipe, order.edge, pooled).to(device)
    return Denoising(
        edge=order.edge,
        guidance=order.guidance,
        latents=noise * scheduler.init_noise_sigma,
        scheduler=scheduler,
        generator=generator,
        positive={"prompt": prompt, "pooled": pooled, "times": times},
        negative={"prompt": negative, "pooled": negative_pooled, "times": times} if guided else None,
    )


def _size_condition(pipe: Any, edge: int, pooled: Any) -> Any:
    """The size that the model is given: the whole picture, nothing cropped."""
    size = (edge, edge)
    encoder = pipe.text_encoder_2
    width = pooled.shape[-1] if encoder is None else encoder.config.projection_dim
    return pipe._get_add_time_ids(size, (0, 0), size, dtype=pooled.dtype, text_encoder_projection_dim=width)  # noqa: SLF001


def forward(pipe: Any, states: Sequence[Denoising]) -> list[Any]:
    guided = states[0].negative is not None
    latents = torch.cat([state.scheduler.scale_model_input(state.latents, state.timestep) for state in states])
    timesteps = torch.stack([state.timestep for state in states])
    out = pipe.unet(
        torch.cat([latents, latents]) if guided else latents,
        torch.cat([timesteps, timesteps]) if guided else timesteps,
        encoder_hidden_states=stacked(states, "prompt", guided=guided),
        added_cond_kwargs={
            "text_embeds": stacked(states, "pooled", guided=guided),
            "time_ids": stacked(states, "times", guided=guided),
        },
        return_dict=False,
    )[0]
    return guide(states, out) if guided else list(out.split(1))


def decode(pipe: Any, latents: Any, edge: int) -> NDArray[Any]:  # noqa: ARG001  # latents here know their size
    vae = pipe.vae
    if vae.dtype == torch.float16 and vae.config.force_upcast:
        vae.to(dtype=torch.float32)  # it overflows in half precision; once is enough, nothing else uses it
    return finish(pipe, vae.decode(unscaled(vae, latents.to(vae.dtype)), return_dict=False)[0])
