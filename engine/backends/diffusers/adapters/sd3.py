"""Stable Diffusion 3 and 3.5: flow matching, guided against a negative prompt, empty if there is none."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from numpy.typing import NDArray

from engine.backends.diffusers.adapters.common import (
    Denoising,
    Order,
    decode_shifted,
    flows,
    guide,
    schedule,
    seeded,
    shift_of,
    stacked,
)

MIXES_SIZES = False


def suits(pipe: Any) -> bool:
    return flows(pipe)


def prepare(pipe: Any, order: Order) -> Denoising:
    guided = order.guidance > 1
    generator = seeded(order.seed)
    prompt, negative, pooled, negative_pooled = pipe.encode_prompt(
        prompt=[order.prompt],
        prompt_2=None,
        prompt_3=None,
        negative_prompt=None if order.negative_prompt is None else [order.negative_prompt],
        do_classifier_free_guidance=guided,
        max_sequence_length=order.sequence_length,
    )
    channels, edge = pipe.transformer.config.in_channels, order.edge
    device = pipe._execution_device  # noqa: SLF001  # as the pipeline does
    latents = pipe.prepare_latents(1, channels, edge, edge, prompt.dtype, device, generator)
    settings: dict[str, Any] = {"num_inference_steps": order.steps}
    if pipe.scheduler.config.get("use_dynamic_shifting", None):
        patches = (latents.shape[2] // pipe.transformer.config.patch_size) ** 2
        settings["mu"] = shift_of(pipe, calculate_shift, patches, max_shift=1.16)
    return Denoising(
        edge=order.edge,
        guidance=order.guidance,
        latents=latents,
        scheduler=schedule(pipe, begin=False, **settings),
        generator=generator,
        positive={"prompt": prompt, "pooled": pooled},
        negative={"prompt": negative, "pooled": negative_pooled} if guided else None,
    )


def forward(pipe: Any, states: Sequence[Denoising]) -> list[Any]:
    guided = states[0].negative is not None
    latents = torch.cat([state.latents for state in states])
    timesteps = torch.stack([state.timestep for state in states])
    out = pipe.transformer(
        hidden_states=torch.cat([latents, latents]) if guided else latents,
        timestep=torch.cat([timesteps, timesteps]) if guided else timesteps,
        encoder_hidden_states=stacked(states, "prompt", guided=guided),
        pooled_projections=stacked(states, "pooled", guided=guided),
        return_dict=False,
    )[0]
    return guide(states, out) if guided else list(out.split(1))


def decode(pipe: Any, latents: Any, edge: int) -> NDArray[Any]:  # noqa: ARG001  # latents here know their size
    return decode_shifted(pipe, latents)
