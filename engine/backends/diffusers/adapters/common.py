"""What the families share: an image on its way, its schedule, guidance, decoding."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

# What the authors of Qwen-Image give where there is no negative prompt: its pipeline guides only against one.
BLANK = " "


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What an image is made of. `sequence_length`: tokens of the prompt, padded or cut to that by the pipeline."""

    prompt: str
    negative_prompt: str | None
    seed: int
    edge: int
    steps: int
    guidance: float
    sequence_length: int | None


@dataclass(slots=True, kw_only=True)
class Denoising:
    """An image on its way. Tensors have a first axis of length 1. `negative` is None where nothing is guided."""

    edge: int
    guidance: float
    latents: Any
    scheduler: Any
    generator: torch.Generator
    positive: dict[str, Any]
    negative: dict[str, Any] | None
    steps_done: int = 0
    outlook: Any = None
    """The finished latents as the last step foresaw them, where the scheduler says or it is cheap to know."""

    @property
    def steps(self) -> int:
        """How many steps there are in all."""
        return len(self.scheduler.timesteps)

    @property
    def timestep(self) -> Any:
        """Of the next step."""
        return self.scheduler.timesteps[self.steps_done]


def seeded(seed: int) -> torch.Generator:
    """Return the generator of one image. On the CPU, so that a seed means the same everywhere."""
    return torch.Generator("cpu").manual_seed(seed)


def schedule(pipe: Any, *, begin: bool = True, **settings: Any) -> Any:
    """Return a scheduler of one image's own. `begin`: its first index is set, as most pipelines do."""
    scheduler = copy.deepcopy(pipe.scheduler)
    with quiet():
        scheduler.set_timesteps(device=pipe._execution_device, **settings)  # noqa: SLF001  # as the pipelines do
    if begin and hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    return scheduler


@contextmanager
def quiet() -> Iterator[None]:
    """Let a scheduler make its schedule without numpy's remark on how torch hands out arrays."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        yield


def advance(state: Denoising, prediction: Any) -> None:
    """Take one step with what the model predicted."""
    scheduler = state.scheduler
    more = {"generator": state.generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
    sigma = scheduler.sigmas[state.steps_done] if _flows(scheduler) else None
    outlook = None if sigma is None else state.latents - sigma * prediction
    out = scheduler.step(prediction, state.timestep, state.latents, **more)
    state.outlook = out.get("pred_original_sample") if outlook is None else outlook
    state.latents = out.prev_sample
    state.steps_done += 1


def _flows(scheduler: Any) -> bool:
    """Whether predictions are velocities from image to noise, so that x0 = x - sigma * v."""
    return type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"


def flows(pipe: Any) -> bool:
    """Whether the pipeline has the scheduler that every flow matching family here was made for."""
    return _flows(pipe.scheduler) and not pipe.scheduler.config.invert_sigmas


def stacked(states: Sequence[Denoising], name: str, *, guided: bool) -> Any:
    """Return one embedding of all: the positive ones, and if `guided` the negative ones before them."""
    parts = [state.positive[name] for state in states]
    if guided:
        parts = [state.negative[name] for state in states if state.negative is not None] + parts
    return torch.cat(parts)


def guide(states: Sequence[Denoising], prediction: Any) -> list[Any]:
    """Classifier-free guidance of predictions, the negative ones first, as the pipelines of Stable Diffusion do."""
    away, towards = prediction.chunk(2)
    return [
        away[place : place + 1] + state.guidance * (towards[place : place + 1] - away[place : place + 1])
        for place, state in enumerate(states)
    ]


def shift_of(pipe: Any, calculate: Callable[..., float], patches: int, *, max_shift: float) -> float:
    """Return `mu`: how far the schedule leans to noise for an image of so many patches, by the pipeline's own sum."""
    config = pipe.scheduler.config
    return calculate(
        patches,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )


def unscaled(vae: Any, latents: Any) -> Any:
    """Return latents as the VAE wants them, by its mean and deviation if it has them."""
    config = vae.config
    if getattr(config, "latents_mean", None) is None or getattr(config, "latents_std", None) is None:
        return latents / config.scaling_factor
    mean = torch.tensor(config.latents_mean).view(1, -1, 1, 1).to(latents.device, latents.dtype)
    std = torch.tensor(config.latents_std).view(1, -1, 1, 1).to(latents.device, latents.dtype)
    return latents * std / config.scaling_factor + mean


def finish(pipe: Any, pixels: Any) -> NDArray[Any]:
    """Return what the VAE made as pictures, (n, edge, edge, 3) from 0 to 1; not finite where the model failed."""
    pictures: NDArray[Any] = pipe.image_processor.postprocess(pixels, output_type="np")
    return pictures


def decode_shifted(pipe: Any, latents: Any) -> NDArray[Any]:
    """Decode with a VAE whose latents were scaled and shifted, as those of SD3 and Z-Image are."""
    config = pipe.vae.config
    latents = latents.to(pipe.vae.dtype) / config.scaling_factor + config.shift_factor
    return finish(pipe, pipe.vae.decode(latents, return_dict=False)[0])
