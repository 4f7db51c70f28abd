"""A pipeline's denoising loop taken apart, so that images join and leave between steps.

`Adapter` is what all families share; families.py has each. An image begins with noise, or with a picture under noise
(`Start`); then what is outside a mask is set back to the picture after every step.
"""

import copy
import inspect
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from engine.types import Edit, ImageJob, Picture

Embeddings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """The latents of a picture that an image begins with, the noise over them, and the mask if there is one.

    The mask is 1 where the image may change. Where it is 0, the picture is restored after every step.
    """

    latents: Any
    noise: Any
    mask: Any | None

    def noised(self, scheduler: Any, timestep: Any) -> Any:
        """Return the picture with as much noise as there is at this step."""
        if flows(scheduler):
            return scheduler.scale_noise(self.latents, timestep[None], self.noise)
        return scheduler.add_noise(self.latents, self.noise, timestep[None])


@dataclass(slots=True)
class Denoising:
    """An unfinished image. Tensors have a first axis of length 1. `negative` is None without guidance."""

    edge: int
    guidance: float
    latents: Any
    scheduler: Any
    generator: torch.Generator
    positive: Embeddings
    negative: Embeddings | None
    start: Start | None = None
    first: int = 0
    """Steps of the schedule that are left out because the image begins with a picture."""
    steps_done: int = 0
    outlook: Any = None
    """The finished latents as predicted at the last step, if the scheduler gives them or they are cheap to compute."""

    @property
    def steps(self) -> int:
        return len(self.scheduler.timesteps) - self.first

    @property
    def timestep(self) -> Any:
        return self.scheduler.timesteps[self.first + self.steps_done]

    def read(self) -> Any:
        return self.latents if flows(self.scheduler) else self.scheduler.scale_model_input(self.latents, self.timestep)

    def advance(self, prediction: Any) -> None:
        scheduler = self.scheduler
        taken = inspect.signature(scheduler.step).parameters  # passed as the pipelines do
        more = {name: value for name, value in (("generator", self.generator), ("eta", 0.0)) if name in taken}
        # Predictions of flow matching are velocities from image to noise, so that x0 = x - sigma * v.
        sigma = scheduler.sigmas[self.first + self.steps_done] if flows(scheduler) else None
        outlook = None if sigma is None else self.latents - sigma * prediction
        out = scheduler.step(prediction, self.timestep, self.latents, **more)
        self.latents = out.prev_sample
        self.outlook = out.get("pred_original_sample", self.latents) if outlook is None else outlook
        self.steps_done += 1
        if self.start is not None and self.start.mask is not None:
            self._restore(self.start, self.start.mask)

    def _restore(self, start: Start, mask: Any) -> None:
        """Put the picture back where the mask is 0, with the noise of the next step."""
        done = self.steps_done == self.steps
        kept = start.latents if done else start.noised(self.scheduler, self.timestep)
        self.latents = ((1 - mask) * kept + mask * self.latents).to(self.latents.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to run a pipeline. Without an `adapter`, its images are batched by request only."""

    adapter: "type[Adapter] | None" = None
    sequence_length: int | None = None
    """The `max_sequence_length` that it is called with, if it has one: in some families padding changes the image."""
    longest: int | None = None
    """The most tokens that it reads, in as many of those lengths as it needs; None: as many as its tokenizers say."""
    chat: Mapping[str, bool] | None = None
    """Arguments of the chat template, as the pipeline itself gives them."""
    negative_prompts_above: float | None = None
    """The guidance_scale above which it reads its negative prompt; None: it takes none."""
    without: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its constructor that leave out parts."""

    def count(self, tokenizer: Any, text: str) -> int:
        """Return how many tokens the pipeline reads for a text, with those of its chat template."""
        if self.chat is not None:
            messages = [{"role": "user", "content": text}]
            options = {"tokenize": False, "add_generation_prompt": True, **self.chat}
            text = tokenizer.apply_chat_template(messages, **options)
        return len(tokenizer(text, truncation=False).input_ids)

    def length_for(self, tokenizer: Any, *texts: str | None) -> int | None:
        """Return the `max_sequence_length` for the longest of these texts."""
        length, longest = self.sequence_length, self.longest
        if length is None or longest is None or longest == length:
            return length
        tokens = max(self.count(tokenizer, text) for text in texts if text is not None)
        return min(longest, length * max(1, -(-tokens // length)))


class Adapter:
    """One family; the methods here are those of flow matching, which others override. `pipe` is a pipeline of it.

    It must make the pipeline's own images: tests/engine/backends/diffusers/test_diffusers_golden.py compares them.
    """

    guided_above = 1.0
    packing = 1
    """How many of the VAE's latents make one of the transformer's."""
    noise_dtype: torch.dtype | None = None
    """Number format of the noise; None: the prompt's."""
    most_shift = 1.15
    """How far the schedule of the largest images is shifted to noise, if the configuration does not say."""

    def __init__(self, pipe: Any, family: Family) -> None:
        self.pipe = pipe
        self.family = family
        self.device = pipe._execution_device  # noqa: SLF001  # as the pipelines do
        self.module: Any = sys.modules[type(pipe).__module__]  # has the functions for the pipeline's schedule

    @property
    def vae(self) -> Any:
        return self.pipe.vae

    def suits(self) -> bool:
        """Whether this pipeline, as configured, can be run exactly like its family."""
        return flows(self.pipe.scheduler) and not self.pipe.scheduler.config.invert_sigmas

    def prepare(self, job: ImageJob, *, edge: int, steps: int, guidance: float) -> Denoising:
        """Return the image before its first step, exactly as the pipeline would begin it."""
        generator = seeded(job.seed)
        positive, negative = self.embed(job, guided=guidance > self.guided_above)
        # As in the pipelines, a picture takes its random numbers before the noise does.
        picture = None if job.edit is None else self.source(job.edit, positive, generator)
        noise = self.noise(edge, positive, generator)
        scheduler = copy.deepcopy(self.pipe.scheduler)
        scheduler.set_timesteps(device=self.device, **self.schedule(noise, steps))
        state = Denoising(edge, guidance, noise, scheduler, generator, positive, negative)
        if job.edit is not None and picture is not None:
            self._begin_with(state, picture.to(noise), job.edit, steps)
        else:
            if hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(0)
            if not flows(scheduler):
                state.latents = noise * scheduler.init_noise_sigma
        return state

    def _begin_with(self, state: Denoising, picture: Any, edit: Edit, steps: int) -> None:
        """Put the picture under the noise, and leave out the steps before it."""
        strength, noise, scheduler = edit.strength or 1.0, state.latents, state.scheduler
        state.first = min(self.left_out(steps, strength), steps - 1) * scheduler.order  # of two calls each in some
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(state.first)
        mask = None if edit.mask is None else self.mask(plane_of(edit.mask).to(noise), state.edge)
        state.start = Start(picture, noise, mask)
        if self.begins_with_noise(state.start, strength):
            state.latents = noise * scheduler.init_noise_sigma
        else:
            state.latents = state.start.noised(scheduler, state.timestep)

    def left_out(self, steps: int, strength: float) -> int:
        """Return how many steps of the schedule are left out, for a picture that changes by `strength`."""
        return int(max(steps - min(steps * strength, steps), 0))

    def begins_with_noise(self, start: Start, strength: float) -> bool:  # noqa: ARG002  # a flow's first step is noise
        """Whether the first latents are noise, as for an image of text alone."""
        return False

    def source(self, edit: Edit, positive: Embeddings, generator: torch.Generator) -> Any | None:  # noqa: ARG002
        """Return the latents of the picture that the image begins with; None: it begins with noise.

        What the model looks at of pictures is put into `positive`.
        """
        return self.encode(pixels_of(edit.pictures[0]), generator)

    def encode(self, pixels: Any, generator: torch.Generator) -> Any:
        """Return the latents of a picture, (1, 3, height, width) from -1 to 1. The reverse of `unscaled`."""
        latents = self.vae.encode(pixels.to(self.device, self.vae.dtype)).latent_dist.sample(generator)
        mean, factor = self.scales(latents)
        return (latents - mean) * factor

    def scales(self, latents: Any) -> tuple[Any, Any]:  # noqa: ARG002  # others need its device and dtype
        """Return the mean of the VAE's latents, and the factor for the model."""
        return self.vae.config.shift_factor, self.vae.config.scaling_factor

    def mask(self, plane: Any, edge: int) -> Any:
        """Return a mask, (1, 1, height, width), in the shape of the latents."""
        side = edge // self.pipe.vae_scale_factor
        return interpolate(plane, size=(side, side))

    def embed(self, job: ImageJob, *, guided: bool) -> tuple[Embeddings, Embeddings | None]:
        """Return the `prompt` and what else the model reads, and the same for what it is guided against."""
        raise NotImplementedError

    def noise(self, edge: int, positive: Embeddings, generator: torch.Generator) -> Any:
        channels = self.pipe.transformer.config.in_channels // self.packing
        dtype = self.noise_dtype or positive["prompt"].dtype
        return self.pipe.prepare_latents(1, channels, edge, edge, dtype, self.device, generator)

    def schedule(self, latents: Any, steps: int) -> dict[str, Any]:
        """Return the arguments of the scheduler for its timesteps; here for latents that are rows of patches."""
        return {"sigmas": np.linspace(1.0, 1 / steps, steps), "mu": self.shift(latents.shape[1])}

    def shift(self, patches: int) -> float:
        """Return how far the schedule of an image of so many patches is shifted to noise."""
        config = self.pipe.scheduler.config
        return self.module.calculate_shift(
            patches,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", self.most_shift),
        )

    def forward(self, states: Sequence[Denoising]) -> list[Any]:
        """Return the prediction for each, guided as in the pipeline, with one call of the model for each kind."""
        found: dict[int, Any] = {}
        for kind in dict.fromkeys(map(self.kind, states)):
            group = [state for state in states if self.kind(state) == kind]
            found |= {id(state): made for state, made in zip(group, self._forward_alike(group), strict=True)}
        return [found[id(state)] for state in states]

    def kind(self, state: Denoising) -> Hashable:  # noqa: ARG002  # most families need no difference
        """Return a key: images with the same key may share a call of the model."""
        return None

    def _forward_alike(self, states: Sequence[Denoising]) -> list[Any]:
        latents = torch.cat([state.read() for state in states])
        timesteps = torch.stack([state.timestep for state in states])
        if states[0].negative is None:
            return list(self.predict(states, latents, timesteps).split(1))
        out = self.predict(states, torch.cat([latents, latents]), torch.cat([timesteps, timesteps]))
        away, towards = (half.split(1) for half in out.chunk(2))
        return [self.guide(state.guidance, *both) for state, *both in zip(states, towards, away, strict=True)]

    def predict(self, states: Sequence[Denoising], latents: Any, timesteps: Any) -> Any:
        """Call the model once, for what the images are guided against (if they are), then for their prompts."""
        raise NotImplementedError

    def guide(self, guidance: float, towards: Any, away: Any) -> Any:
        """Classifier-free guidance of one prediction."""
        return away + guidance * (towards - away)

    def decode(self, latents: Any, edge: int) -> NDArray[Any]:
        """Return the picture of one image's latents, (edge, edge, 3) from 0 to 1; not finite if the model failed."""
        pixels = self.pipe.vae.decode(self.unscaled(latents, edge), return_dict=False)[0]
        if pixels.ndim == 5:  # the VAE of a video model: its only frame
            pixels = pixels[:, :, 0]
        return self.pipe.image_processor.postprocess(pixels, output_type="np")[0]

    def unscaled(self, latents: Any, edge: int) -> Any:  # noqa: ARG002  # some need the size
        """Return latents as the VAE takes them."""
        latents = latents.to(self.vae.dtype)
        mean, factor = self.scales(latents)
        return latents / factor + mean


def seeded(seed: int) -> torch.Generator:
    """Return the generator of one image. On the CPU, so that a seed means the same everywhere."""
    return torch.Generator("cpu").manual_seed(seed)


def embeddings(states: Sequence[Denoising], name: str) -> list[Any]:
    """Return an embedding of each, first those of what they are guided against."""
    negative = [state.negative[name] for state in states if state.negative is not None]
    return [*negative, *(state.positive[name] for state in states)]


def pixels_of(picture: Picture) -> Any:
    """Return a picture as (1, 3, height, width) from -1 to 1, as the pipelines read one."""
    values = torch.frombuffer(bytearray(picture.data), dtype=torch.uint8).reshape(picture.height, picture.width, 3)
    return values.permute(2, 0, 1)[None].float() / 255 * 2 - 1


def plane_of(mask: Picture) -> Any:
    """Return a mask as (1, 1, height, width) of 0 and 1."""
    values = torch.frombuffer(bytearray(mask.data), dtype=torch.uint8).reshape(1, 1, mask.height, mask.width)
    return (values >= 128).float()


def flows(scheduler: Any) -> bool:
    """Whether it is the scheduler that the flow matching families here were made for."""
    return type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
