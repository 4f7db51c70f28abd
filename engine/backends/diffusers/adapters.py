"""A pipeline's denoising loop taken apart, so that images join and leave between steps: what all families share."""

import copy
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.backends.diffusers.protocol import ImageJob

Embeddings = dict[str, Any]


@dataclass(slots=True)
class Denoising:
    """An image on its way. Tensors have a first axis of length 1. `negative` is None where nothing is guided."""

    edge: int
    guidance: float
    latents: Any
    scheduler: Any
    generator: torch.Generator
    positive: Embeddings
    negative: Embeddings | None
    steps_done: int = 0
    outlook: Any = None
    """The finished latents as the last step foresaw them, where the scheduler says or it is cheap to know."""

    @property
    def steps(self) -> int:
        return len(self.scheduler.timesteps)

    @property
    def timestep(self) -> Any:
        return self.scheduler.timesteps[self.steps_done]

    def advance(self, prediction: Any) -> None:
        scheduler = self.scheduler
        more = {"generator": self.generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
        # Predictions of flow matching are velocities from image to noise, so that x0 = x - sigma * v.
        outlook = self.latents - scheduler.sigmas[self.steps_done] * prediction if _flows(scheduler) else None
        out = scheduler.step(prediction, self.timestep, self.latents, **more)
        self.latents = out.prev_sample
        self.outlook = out.get("pred_original_sample", self.latents) if outlook is None else outlook
        self.steps_done += 1


class Adapter:
    """One family; this is what one of flow matching does unless it says otherwise. `pipe` is a pipeline of it.

    It must make the pipeline's own pictures: tests/engine/backends/diffusers/test_diffusers_golden.py compares them.
    """

    mixes_sizes = False
    """Whether one call of the model takes images of different sizes."""
    guided_above = 1.0
    packing = 1
    """How many of the VAE's latents are one of the transformer's."""
    noise_dtype: torch.dtype | None = None
    """Of the latents, where it is not the prompt's."""
    most_shift = 1.15
    """How far the schedule of the largest images leans to noise, where its configuration does not say."""

    def __init__(self, pipe: Any, sequence_length: int | None) -> None:
        self.pipe = pipe
        self.sequence_length = sequence_length
        self.device = pipe._execution_device  # noqa: SLF001  # as the pipelines do
        self.module: Any = sys.modules[type(pipe).__module__]  # with the sums that the pipeline makes its schedule by

    def suits(self) -> bool:
        """Whether this pipeline, as it is configured, is run exactly like the family."""
        return _flows(self.pipe.scheduler) and not self.pipe.scheduler.config.invert_sigmas

    def prepare(self, job: ImageJob, *, edge: int, steps: int, guidance: float) -> Denoising:
        """Return the image before its first step, exactly as the pipeline would begin it."""
        generator = seeded(job.seed)
        positive, negative = self.embed(job, guided=guidance > self.guided_above)
        latents = self.noise(edge, positive, generator)
        scheduler = copy.deepcopy(self.pipe.scheduler)
        scheduler.set_timesteps(device=self.device, **self.schedule(latents, steps))
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)
        return Denoising(edge, guidance, latents, scheduler, generator, positive, negative)

    def embed(self, job: ImageJob, *, guided: bool) -> tuple[Embeddings, Embeddings | None]:
        """Return the `prompt`, and what else the model reads, and the same of what it is guided against."""
        raise NotImplementedError

    def noise(self, edge: int, positive: Embeddings, generator: torch.Generator) -> Any:
        channels = self.pipe.transformer.config.in_channels // self.packing
        dtype = self.noise_dtype or positive["prompt"].dtype
        return self.pipe.prepare_latents(1, channels, edge, edge, dtype, self.device, generator)

    def schedule(self, latents: Any, steps: int) -> dict[str, Any]:
        """Return what the scheduler is told of its timesteps; here of latents that are rows of patches."""
        return {"sigmas": np.linspace(1.0, 1 / steps, steps), "mu": self.shift(latents.shape[1])}

    def shift(self, patches: int) -> float:
        """Return how far the schedule of an image of so many patches leans to noise."""
        config = self.pipe.scheduler.config
        mu: float = self.module.calculate_shift(
            patches,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", self.most_shift),
        )
        return mu

    def forward(self, states: Sequence[Denoising]) -> list[Any]:
        """Return the prediction for each in one call of the model, guided where the pipeline guides."""
        latents = torch.cat([self.read_latents(state) for state in states])
        timesteps = torch.stack([state.timestep for state in states])
        if states[0].negative is None:
            return list(self.predict(states, latents, timesteps).split(1))
        out = self.predict(states, torch.cat([latents, latents]), torch.cat([timesteps, timesteps]))
        away, towards = (half.split(1) for half in out.chunk(2))
        return [self.guide(state.guidance, *both) for state, *both in zip(states, towards, away, strict=True)]

    def read_latents(self, state: Denoising) -> Any:
        return state.latents

    def predict(self, states: Sequence[Denoising], latents: Any, timesteps: Any) -> Any:
        """Call the model once, for what the images are guided against and then, or only, for their prompts."""
        raise NotImplementedError

    def guide(self, guidance: float, towards: Any, away: Any) -> Any:
        """Classifier-free guidance of one prediction."""
        return away + guidance * (towards - away)

    def decode(self, latents: Any, edge: int) -> NDArray[Any]:
        """Return the picture of one image's latents, (edge, edge, 3) from 0 to 1; not finite where the model failed."""
        pixels = self.pipe.vae.decode(self.unscaled(latents, edge), return_dict=False)[0]
        if pixels.ndim == 5:  # the VAE of a video model: its only frame
            pixels = pixels[:, :, 0]
        picture: NDArray[Any] = self.pipe.image_processor.postprocess(pixels, output_type="np")[0]
        return picture

    def unscaled(self, latents: Any, edge: int) -> Any:  # noqa: ARG002  # some latents do not know their size
        """Return latents as the VAE wants them; here they were scaled and shifted."""
        vae = self.pipe.vae
        return latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor


def seeded(seed: int) -> torch.Generator:
    """Return the generator of one image. On the CPU, so that a seed means the same everywhere."""
    return torch.Generator("cpu").manual_seed(seed)


def embeddings(states: Sequence[Denoising], name: str) -> list[Any]:
    """Return an embedding of all, that of what they are guided against first."""
    negative = [state.negative[name] for state in states if state.negative is not None]
    return [*negative, *(state.positive[name] for state in states)]


def _flows(scheduler: Any) -> bool:
    """Whether it is the one that every flow matching family here was made for."""
    return type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
