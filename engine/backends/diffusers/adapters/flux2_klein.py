"""FLUX.2 klein: prompts are padded to one length and read whole, so that all of a size can share a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from numpy.typing import NDArray

from engine.backends.diffusers.adapters.common import (
    Denoising,
    Order,
    finish,
    flows,
    guide,
    schedule,
    seeded,
    stacked,
)

MIXES_SIZES = False


def suits(pipe: Any) -> bool:
    return flows(pipe)


def prepare(pipe: Any, order: Order) -> Denoising:
    generator = seeded(order.seed)
    prompt, text_ids = pipe.encode_prompt([order.prompt], max_sequence_length=order.sequence_length)
    negative = None
    if order.guidance > 1 and not pipe.config.is_distilled:
        against, _ = pipe.encode_prompt([""], max_sequence_length=order.sequence_length)
        negative = {"prompt": against, "text_ids": text_ids}
    latents, image_ids = pipe.prepare_latents(
        batch_size=1,
        num_latents_channels=pipe.transformer.config.in_channels // 4,
        height=order.edge,
        width=order.edge,
        dtype=prompt.dtype,
        device=pipe._execution_device,  # noqa: SLF001  # as the pipeline does
        generator=generator,
    )
    mu = compute_empirical_mu(image_seq_len=latents.shape[1], num_steps=order.steps)
    return Denoising(
        edge=order.edge,
        guidance=order.guidance,
        latents=latents,
        scheduler=schedule(pipe, sigmas=np.linspace(1.0, 1 / order.steps, order.steps), mu=mu),
        generator=generator,
        positive={"prompt": prompt, "text_ids": text_ids, "image_ids": image_ids},
        negative=negative,
    )


def forward(pipe: Any, states: Sequence[Denoising]) -> list[Any]:
    guided = states[0].negative is not None
    latents = torch.cat([state.latents for state in states])
    timesteps = torch.stack([state.timestep for state in states]).to(latents.dtype) / 1000
    latents = latents.to(pipe.transformer.dtype)
    out = pipe.transformer(
        hidden_states=torch.cat([latents, latents]) if guided else latents,
        timestep=torch.cat([timesteps, timesteps]) if guided else timesteps,
        guidance=None,
        encoder_hidden_states=stacked(states, "prompt", guided=guided),
        # The same for all: the model takes those of the first.
        txt_ids=states[0].positive["text_ids"],
        img_ids=states[0].positive["image_ids"],
        return_dict=False,
    )[0]
    return guide(states, out) if guided else list(out.split(1))


def decode(pipe: Any, latents: Any, edge: int) -> NDArray[Any]:
    side = edge // (pipe.vae_scale_factor * 2)
    latents = latents.permute(0, 2, 1).reshape(latents.shape[0], -1, side, side)
    norm = pipe.vae.bn
    mean = norm.running_mean.view(1, -1, 1, 1).to(latents.device, latents.dtype)
    variance = norm.running_var.view(1, -1, 1, 1) + pipe.vae.config.batch_norm_eps
    latents = latents * torch.sqrt(variance).to(latents.device, latents.dtype) + mean
    latents = pipe._unpatchify_latents(latents).to(pipe.vae.dtype)  # noqa: SLF001  # as the pipeline does
    return finish(pipe, pipe.vae.decode(latents, return_dict=False)[0])
