"""Z-Image: one call of its transformer takes images of different sizes and prompts of different lengths."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.z_image.pipeline_z_image import calculate_shift, get_default_z_image_sigmas
from numpy.typing import NDArray

from engine.backends.diffusers.adapters.common import (
    Denoising,
    Order,
    decode_shifted,
    flows,
    schedule,
    seeded,
    shift_of,
)

MIXES_SIZES = True


def suits(pipe: Any) -> bool:
    return flows(pipe)


def prepare(pipe: Any, order: Order) -> Denoising:
    generator = seeded(order.seed)
    guided = order.guidance > 0
    positive, negative = pipe.encode_prompt(
        [order.prompt],
        negative_prompt=None if order.negative_prompt is None else [order.negative_prompt],
        do_classifier_free_guidance=guided,
        max_sequence_length=order.sequence_length,
    )
    latents = pipe.prepare_latents(
        1,
        pipe.transformer.in_channels,
        order.edge,
        order.edge,
        torch.float32,
        pipe._execution_device,  # noqa: SLF001  # as the pipeline does
        generator,
    )
    return Denoising(
        edge=order.edge,
        guidance=order.guidance,
        latents=latents,
        scheduler=_schedule(pipe, latents, order.steps),
        generator=generator,
        positive={"prompt": positive[0]},
        negative={"prompt": negative[0]} if guided else None,
    )


def _schedule(pipe: Any, latents: Any, steps: int) -> Any:
    patches = (latents.shape[2] // 2) * (latents.shape[3] // 2)
    mu = shift_of(pipe, calculate_shift, patches, max_shift=1.15)
    return schedule(pipe, sigmas=get_default_z_image_sigmas(steps), mu=mu)


def forward(pipe: Any, states: Sequence[Denoising]) -> list[Any]:
    latents = [state.latents[0].to(pipe.transformer.dtype).unsqueeze(1) for state in states]
    timesteps = [(1000 - state.timestep) / 1000 for state in states]
    prompts = [state.positive["prompt"] for state in states]
    negatives = [state.negative["prompt"] for state in states if state.negative is not None]
    if negatives:
        latents, timesteps = latents * 2, timesteps * 2
    out = pipe.transformer(latents, torch.stack(timesteps), prompts + negatives, return_dict=False)[0]
    towards = [part.float() for part in out[: len(states)]]
    if negatives:
        away = [part.float() for part in out[len(states) :]]
        towards = [yes + state.guidance * (yes - no) for state, yes, no in zip(states, towards, away, strict=True)]
    return [-part.squeeze(1).unsqueeze(0) for part in towards]


def decode(pipe: Any, latents: Any, edge: int) -> NDArray[Any]:  # noqa: ARG001  # latents here know their size
    return decode_shifted(pipe, latents)
