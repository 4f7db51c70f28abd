"""Qwen-Image: guided against a prompt, a blank if there is none; a mask lets prompts of all lengths share a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from engine.backends.diffusers.adapters.common import (
    BLANK,
    Denoising,
    Order,
    finish,
    flows,
    schedule,
    seeded,
    shift_of,
)

MIXES_SIZES = False


def suits(pipe: Any) -> bool:
    config = pipe.transformer.config
    return flows(pipe) and not config.guidance_embeds and not config.zero_cond_t


def prepare(pipe: Any, order: Order) -> Denoising:
    generator = seeded(order.seed)
    positive = _read(pipe, order.prompt, order)
    negative = _read(pipe, order.negative_prompt or BLANK, order) if order.guidance > 1 else None
    latents = pipe.prepare_latents(
        1,
        pipe.transformer.config.in_channels // 4,
        order.edge,
        order.edge,
        positive["prompt"].dtype,
        pipe._execution_device,  # noqa: SLF001  # as the pipeline does
        generator,
    )
    mu = shift_of(pipe, calculate_shift, latents.shape[1], max_shift=1.15)
    return Denoising(
        edge=order.edge,
        guidance=order.guidance,
        latents=latents,
        scheduler=schedule(pipe, sigmas=np.linspace(1.0, 1 / order.steps, order.steps), mu=mu),
        generator=generator,
        positive=positive,
        negative=negative,
    )


def _read(pipe: Any, text: str, order: Order) -> dict[str, Any]:
    embedded, _ = pipe.encode_prompt([text], max_sequence_length=order.sequence_length)
    return {"prompt": embedded}


def forward(pipe: Any, states: Sequence[Denoising]) -> list[Any]:
    guided = states[0].negative is not None
    prompts = [state.positive["prompt"][0] for state in states]
    prompts += [state.negative["prompt"][0] for state in states if state.negative is not None]
    latents = torch.cat([state.latents for state in states])
    timesteps = torch.stack([state.timestep for state in states]).to(latents.dtype) / 1000
    side = states[0].edge // pipe.vae_scale_factor // 2
    out = pipe.transformer(
        hidden_states=torch.cat([latents, latents]) if guided else latents,
        timestep=torch.cat([timesteps, timesteps]) if guided else timesteps,
        guidance=None,
        encoder_hidden_states=pad_sequence(prompts, batch_first=True),
        encoder_hidden_states_mask=_mask(prompts),
        img_shapes=[[(1, side, side)]] * len(prompts),
        attention_kwargs={},
        return_dict=False,
    )[0]
    return _guide(states, out) if guided else list(out.split(1))


def _mask(prompts: list[Any]) -> Any:
    """Which tokens count; None where all do, as the pipeline has it."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=prompts[0].device)
    if (lengths == lengths[0]).all():
        return None
    return torch.arange(int(lengths.max()), device=lengths.device)[None, :] < lengths[:, None]


def _guide(states: Sequence[Denoising], out: Any) -> list[Any]:
    """Guided, then brought back to the length that the prediction had without."""
    guided = []
    for place, state in enumerate(states):
        towards, away = out[place : place + 1], out[place + len(states) : place + len(states) + 1]
        both = away + state.guidance * (towards - away)
        guided.append(both * (torch.norm(towards, dim=-1, keepdim=True) / torch.norm(both, dim=-1, keepdim=True)))
    return guided


def decode(pipe: Any, latents: Any, edge: int) -> NDArray[Any]:
    vae = pipe.vae
    latents = pipe._unpack_latents(latents, edge, edge, pipe.vae_scale_factor).to(vae.dtype)  # noqa: SLF001
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents.device, latents.dtype)
    std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents.device, latents.dtype)
    return finish(pipe, vae.decode(latents / std + mean, return_dict=False)[0][:, :, 0])
