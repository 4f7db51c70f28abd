"""A pipeline's denoising loop taken apart, so that images join and leave between steps, and what each family is.

`Adapter` is what all share. A family without one is run request by request.
"""

import copy
import inspect
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from msgspec import structs
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from engine.types import ImageJob
from engine.weights.safety import LEFT_OUT

# What the authors of Qwen-Image give where there is no negative prompt: its pipeline guides only against one.
BLANK = " "
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

    def read(self) -> Any:
        """Return the latents as the model reads them."""
        return self.latents if _flows(self.scheduler) else self.scheduler.scale_model_input(self.latents, self.timestep)

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

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.family = FAMILIES[type(pipe).__name__]
        self.device = pipe._execution_device  # noqa: SLF001  # as the pipelines do
        self.module: Any = sys.modules[type(pipe).__module__]  # with the sums that the pipeline makes its schedule by

    def length(self, *texts: str | None) -> int | None:
        """Return the `max_sequence_length` for these texts."""
        return self.family.length_for(getattr(self.pipe, "tokenizer", None), *texts)

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
        if not _flows(scheduler):
            latents = latents * scheduler.init_noise_sigma
        return Denoising(edge, guidance, latents, scheduler, generator, positive, negative)

    def embed(self, job: ImageJob, *, guided: bool) -> tuple[Embeddings, Embeddings | None]:
        """Return the `prompt`, and what else the model reads, and the same of what it is guided against."""
        raise NotImplementedError

    def noise(self, edge: int, positive: Embeddings, generator: torch.Generator) -> Any:
        channels = self.pipe.transformer.config.in_channels // self.packing
        dtype = self.noise_dtype or positive["prompt"].dtype
        return self.pipe.prepare_latents(1, channels, edge, edge, dtype, self.device, generator)

    def schedule(self, latents: Any, steps: int) -> dict[str, Any]:
        """Return the arguments of the scheduler for its timesteps; here of latents that are rows of patches."""
        return {"sigmas": np.linspace(1.0, 1 / steps, steps), "mu": self.shift(latents.shape[1])}

    def shift(self, patches: int) -> float:
        """Return how far the schedule of an image of so many patches leans to noise."""
        config = self.pipe.scheduler.config
        return self.module.calculate_shift(
            patches,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", self.most_shift),
        )

    def forward(self, states: Sequence[Denoising]) -> list[Any]:
        """Return the prediction for each in one call of the model, guided where the pipeline guides."""
        latents = torch.cat([state.read() for state in states])
        timesteps = torch.stack([state.timestep for state in states])
        if states[0].negative is None:
            return list(self.predict(states, latents, timesteps).split(1))
        out = self.predict(states, torch.cat([latents, latents]), torch.cat([timesteps, timesteps]))
        away, towards = (half.split(1) for half in out.chunk(2))
        return [self.guide(state.guidance, *both) for state, *both in zip(states, towards, away, strict=True)]

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
        return self.pipe.image_processor.postprocess(pixels, output_type="np")[0]

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


class Flux2Klein(Adapter):
    """Prompts are padded to a length and read whole, so that all of a size can share a step."""

    packing = 4

    def embed(self, job: ImageJob, *, guided: bool) -> tuple[Embeddings, Embeddings | None]:
        length = self.length(job.prompt)
        prompt, text_ids = self.pipe.encode_prompt([job.prompt], max_sequence_length=length)
        positive = {"prompt": prompt, "text_ids": text_ids}
        if not guided or self.pipe.config.is_distilled:
            return positive, None
        against, _ = self.pipe.encode_prompt([""], max_sequence_length=length)
        return positive, {"prompt": against}

    def forward(self, states: Sequence[Denoising]) -> list[Any]:
        return _by_length(states, super().forward)

    def noise(self, edge: int, positive: Embeddings, generator: torch.Generator) -> Any:
        latents, positive["image_ids"] = super().noise(edge, positive, generator)
        return latents

    def schedule(self, latents: Any, steps: int) -> dict[str, Any]:
        mu = self.module.compute_empirical_mu(image_seq_len=latents.shape[1], num_steps=steps)
        return {"sigmas": np.linspace(1.0, 1 / steps, steps), "mu": mu}

    def predict(self, states: Sequence[Denoising], latents: Any, timesteps: Any) -> Any:
        return self.pipe.transformer(
            hidden_states=latents.to(self.pipe.transformer.dtype),
            timestep=timesteps.to(latents.dtype) / 1000,
            guidance=None,
            encoder_hidden_states=torch.cat(embeddings(states, "prompt")),
            # The same for all: the model takes those of the first.
            txt_ids=states[0].positive["text_ids"],
            img_ids=states[0].positive["image_ids"],
            return_dict=False,
        )[0]

    def unscaled(self, latents: Any, edge: int) -> Any:
        vae = self.pipe.vae
        side = edge // (self.pipe.vae_scale_factor * 2)
        latents = latents.permute(0, 2, 1).reshape(latents.shape[0], -1, side, side)
        mean = vae.bn.running_mean.view(1, -1, 1, 1).to(latents.device, latents.dtype)
        variance = vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps
        latents = latents * torch.sqrt(variance).to(latents.device, latents.dtype) + mean
        return self.pipe._unpatchify_latents(latents).to(vae.dtype)  # noqa: SLF001  # as the pipeline does


class QwenImage(Adapter):
    """Guided against a prompt, a blank if there is none; a mask lets prompts of all lengths share a step."""

    packing = 4

    def suits(self) -> bool:
        config = self.pipe.transformer.config
        return super().suits() and not config.guidance_embeds and not config.zero_cond_t

    def embed(self, job: ImageJob, *, guided: bool) -> tuple[Embeddings, Embeddings | None]:
        return self._read(job.prompt), self._read(job.negative_prompt or BLANK) if guided else None

    def _read(self, text: str) -> Embeddings:
        return {"prompt": self.pipe.encode_prompt([text], max_sequence_length=self.family.longest)[0]}

    def predict(self, states: Sequence[Denoising], latents: Any, timesteps: Any) -> Any:
        prompts = [prompt[0] for prompt in embeddings(states, "prompt")]
        side = states[0].edge // self.pipe.vae_scale_factor // 2
        return self.pipe.transformer(
            hidden_states=latents,
            timestep=timesteps.to(latents.dtype) / 1000,
            guidance=None,
            encoder_hidden_states=pad_sequence(prompts, batch_first=True),
            encoder_hidden_states_mask=_mask(prompts),
            img_shapes=[[(1, side, side)]] * len(prompts),
            attention_kwargs={},
            return_dict=False,
        )[0]

    def guide(self, guidance: float, towards: Any, away: Any) -> Any:
        """Bring it back to the length that the prediction had without."""
        both = super().guide(guidance, towards, away)
        return both * (torch.norm(towards, dim=-1, keepdim=True) / torch.norm(both, dim=-1, keepdim=True))

    def unscaled(self, latents: Any, edge: int) -> Any:
        vae = self.pipe.vae
        latents = self.pipe._unpack_latents(latents, edge, edge, self.pipe.vae_scale_factor).to(vae.dtype)  # noqa: SLF001
        shape = (1, vae.config.z_dim, 1, 1, 1)
        mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents.device, latents.dtype)
        std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents.device, latents.dtype)
        return latents / std + mean


def _by_length(states: Sequence[Denoising], forward: Callable[[Sequence[Denoising]], list[Any]]) -> list[Any]:
    """Have prompts of the same length share a call: padding would change the pictures."""
    found: dict[int, Any] = {}
    for length in {state.positive["prompt"].shape[1] for state in states}:
        group = [state for state in states if state.positive["prompt"].shape[1] == length]
        found |= {id(state): made for state, made in zip(group, forward(group), strict=True)}
    return [found[id(state)] for state in states]


def _mask(prompts: list[Any]) -> Any:
    """Which tokens count; None where all do, as the pipeline has it."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=prompts[0].device)
    if (lengths == lengths[0]).all():
        return None
    return torch.arange(int(lengths.max()), device=lengths.device)[None, :] < lengths[:, None]


def _read_twice(pipe: Any, job: ImageJob, *, guided: bool, **more: Any) -> tuple[Embeddings, Embeddings | None]:
    """Read a prompt word by word and as a whole (pooled), and what it is guided against if it is."""
    prompt, negative, pooled, negative_pooled = pipe.encode_prompt(
        prompt=job.prompt, negative_prompt=job.negative_prompt, do_classifier_free_guidance=guided, **more
    )
    positive = {"prompt": prompt, "pooled": pooled}
    return positive, {"prompt": negative, "pooled": negative_pooled} if guided else None


def _joined(parts: list[Embeddings]) -> Embeddings:
    """Put parts of a prompt one behind the other; empty without any."""
    return {**parts[0], "prompt": torch.cat([part["prompt"] for part in parts], dim=1)} if parts else {}


def _pieces(word: str, fits: Callable[[str], bool]) -> Iterator[str]:
    """Divide a word into the longest pieces that fit."""
    while word:
        length = max(1, bisect_left(range(1, len(word) + 1), x=True, key=lambda size: not fits(word[:size])))
        yield word[:length]
        word = word[length:]


class StableDiffusion3(Adapter):
    """Stable Diffusion 3 and 3.5: guided against a negative prompt, empty if there is none."""

    most_shift = 1.16

    def embed(self, job: ImageJob, *, guided: bool) -> tuple[Embeddings, Embeddings | None]:
        more = {"prompt_2": None, "prompt_3": None, "max_sequence_length": self.family.sequence_length}
        return _read_twice(self.pipe, job, guided=guided, **more)

    def schedule(self, latents: Any, steps: int) -> dict[str, Any]:
        if not self.pipe.scheduler.config.get("use_dynamic_shifting", None):
            return {"num_inference_steps": steps}
        patches = (latents.shape[2] // self.pipe.transformer.config.patch_size) ** 2
        return {"num_inference_steps": steps, "mu": self.shift(patches)}

    def predict(self, states: Sequence[Denoising], latents: Any, timesteps: Any) -> Any:
        return self.pipe.transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=torch.cat(embeddings(states, "prompt")),
            pooled_projections=torch.cat(embeddings(states, "pooled")),
            return_dict=False,
        )[0]


class StableDiffusionXL(Adapter):
    """A UNet, guided against zeros or a negative prompt; any scheduler of its own kind."""

    def suits(self) -> bool:
        # Distilled to be told its guidance: not taken apart here.
        return self.pipe.unet.config.time_cond_proj_dim is None

    def embed(self, job: ImageJob, *, guided: bool) -> tuple[Embeddings, Embeddings | None]:
        """Read prompts in parts of as many tokens as CLIP takes, one behind the other; the first part is also pooled.

        The shorter of prompt and negative prompt gets empty parts. With a single part it is the pipeline's own way.
        """
        prompts, negatives = self._prompts(job, guided=guided)
        read = [
            _read_twice(
                self.pipe,
                structs.replace(
                    job,
                    prompt=prompts[at] if at < len(prompts) else "",
                    negative_prompt=(negatives[at] if at < len(negatives) else "") if job.negative_prompt else None,
                ),
                guided=guided,
            )
            for at in range(max(len(prompts), len(negatives)))
        ]
        return _joined([positive for positive, _ in read]), _joined([away for _, away in read if away]) or None

    def parts(self, job: ImageJob, *, guided: bool) -> int:
        """Return in how many parts the prompts of an image are read."""
        return max(map(len, self._prompts(job, guided=guided)))

    def _prompts(self, job: ImageJob, *, guided: bool) -> tuple[list[str], list[str]]:
        """Return the parts of the prompt, and of what it is guided against."""
        return self._divided(job.prompt), self._divided((guided and job.negative_prompt) or "")

    def _divided(self, text: str) -> list[str]:
        """Divide a text between words, where a word alone is too long between characters."""
        tokenizers = [each for each in (self.pipe.tokenizer, self.pipe.tokenizer_2) if each is not None]

        def fits(part: str) -> bool:
            return all(len(each(part, truncation=False).input_ids) <= each.model_max_length for each in tokenizers)

        if fits(text):
            return [text]
        parts: list[str] = []
        for piece in (piece for word in text.split() for piece in _pieces(word, fits)):
            longer = f"{parts[-1]} {piece}" if parts else ""
            if longer and fits(longer):
                parts[-1] = longer
            else:
                parts.append(piece)
        return parts

    def forward(self, states: Sequence[Denoising]) -> list[Any]:
        return _by_length(states, super().forward)

    def noise(self, edge: int, positive: Embeddings, generator: torch.Generator) -> Any:
        side = edge // self.pipe.vae_scale_factor
        shape = (1, self.pipe.unet.config.in_channels, side, side)
        return randn_tensor(shape, generator=generator, device=self.device, dtype=positive["prompt"].dtype)

    def schedule(self, latents: Any, steps: int) -> dict[str, Any]:  # noqa: ARG002  # the same for all sizes
        return {"num_inference_steps": steps}

    def predict(self, states: Sequence[Denoising], latents: Any, timesteps: Any) -> Any:
        pooled = torch.cat(embeddings(states, "pooled"))
        return self.pipe.unet(
            latents,
            timesteps,
            encoder_hidden_states=torch.cat(embeddings(states, "prompt")),
            added_cond_kwargs={"text_embeds": pooled, "time_ids": self._size_condition(states[0].edge, pooled)},
            return_dict=False,
        )[0]

    def _size_condition(self, edge: int, pooled: Any) -> Any:
        """The size that the model is given: the whole picture, nothing cropped."""
        size, encoder = (edge, edge), self.pipe.text_encoder_2
        width = pooled.shape[-1] if encoder is None else encoder.config.projection_dim
        times = self.pipe._get_add_time_ids(  # noqa: SLF001  # as the pipeline does
            size, (0, 0), size, dtype=pooled.dtype, text_encoder_projection_dim=width
        )
        return times.to(self.device).repeat(len(pooled), 1)

    def unscaled(self, latents: Any, edge: int) -> Any:  # noqa: ARG002  # latents here know their size
        vae, config = self.pipe.vae, self.pipe.vae.config
        if vae.dtype == torch.float16 and config.force_upcast:
            vae.to(dtype=torch.float32)  # it overflows in half precision; once is enough, nothing else uses it
        latents = latents.to(vae.dtype)
        values = (getattr(config, "latents_mean", None), getattr(config, "latents_std", None))
        if None in values:
            return latents / config.scaling_factor
        mean, std = (torch.tensor(one).view(1, -1, 1, 1).to(latents.device, latents.dtype) for one in values)
        return latents * std / config.scaling_factor + mean


class ZImage(Adapter):
    """One call of its transformer takes images of different sizes and prompts of different lengths."""

    mixes_sizes = True
    guided_above = 0.0
    noise_dtype = torch.float32

    def embed(self, job: ImageJob, *, guided: bool) -> tuple[Embeddings, Embeddings | None]:
        positive, negative = self.pipe.encode_prompt(
            job.prompt,
            negative_prompt=job.negative_prompt,
            do_classifier_free_guidance=guided,
            max_sequence_length=self.length(job.prompt, job.negative_prompt),
        )
        return {"prompt": positive[0]}, {"prompt": negative[0]} if guided else None

    def schedule(self, latents: Any, steps: int) -> dict[str, Any]:
        patches = (latents.shape[2] // 2) * (latents.shape[3] // 2)
        return {"sigmas": self.module.get_default_z_image_sigmas(steps), "mu": self.shift(patches)}

    def forward(self, states: Sequence[Denoising]) -> list[Any]:
        latents = [state.latents[0].to(self.pipe.transformer.dtype).unsqueeze(1) for state in states]
        timesteps = torch.stack([(1000 - state.timestep) / 1000 for state in states])
        guided = states[0].negative is not None
        if guided:
            latents, timesteps = latents * 2, torch.cat([timesteps, timesteps])
        out = self.pipe.transformer(latents, timesteps, embeddings(states, "prompt"), return_dict=False)[0]
        parts = [part.float() for part in out]
        if guided:
            pairs = zip(states, parts[len(states) :], parts[: len(states)], strict=True)
            parts = [towards + state.guidance * (towards - away) for state, towards, away in pairs]
        return [-part.squeeze(1).unsqueeze(0) for part in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is to be known of a pipeline to run it. Without an `adapter`, its images are joined by request only."""

    adapter: type[Adapter] | None = None
    sequence_length: int | None = None
    """The `max_sequence_length` that it is called with, if it has one: what it pads to decides some pictures."""
    most_lengths: int = 1
    """How many times that a prompt may have, which is then padded to as many of them as it needs."""
    chat: Mapping[str, bool] | None = None
    """Arguments of the chat template, as the pipeline itself gives them."""
    negative_prompts_above: float | None = None
    """The guidance_scale above which it reads its negative prompt; None: it takes none."""
    reads_in_parts: bool = False
    """Whether its adapter takes prompts that are longer than its encoders do."""
    without: Mapping[str, Any] = field(default_factory=dict)
    """What is left out of it, by its own constructor's arguments."""

    @property
    def longest(self) -> int | None:
        """Tokens that it reads at most; None: as many as its tokenizers say."""
        return None if self.sequence_length is None else self.sequence_length * self.most_lengths

    def count(self, tokenizer: Any, text: str) -> int:
        """Return how many tokens it reads for a text, with those of its chat template."""
        if self.chat is not None:
            messages = [{"role": "user", "content": text}]
            options = {"tokenize": False, "add_generation_prompt": True, **self.chat}
            text = tokenizer.apply_chat_template(messages, **options)
        return len(tokenizer(text, truncation=False).input_ids)

    def length_for(self, tokenizer: Any, *texts: str | None) -> int | None:
        """Return the `max_sequence_length` to call it with for the longest of these texts."""
        if self.sequence_length is None or self.most_lengths == 1:
            return self.sequence_length
        tokens = max(self.count(tokenizer, text) for text in texts if text is not None)
        return self.sequence_length * min(self.most_lengths, max(1, -(-tokens // self.sequence_length)))


# Three tokens for each of 1,000 characters, which Ethiopic letters may take.
_LONG = 3072


FAMILIES = {
    "Flux2KleinPipeline": Family(
        adapter=Flux2Klein, sequence_length=512, most_lengths=_LONG // 512, chat={"enable_thinking": False}
    ),
    "FluxPipeline": Family(sequence_length=512),
    "QwenImagePipeline": Family(
        adapter=QwenImage, sequence_length=1024, most_lengths=_LONG // 1024, negative_prompts_above=1
    ),
    "StableDiffusion3Pipeline": Family(adapter=StableDiffusion3, sequence_length=256, negative_prompts_above=1),
    "StableDiffusionPipeline": Family(
        negative_prompts_above=1, without={**dict.fromkeys(LEFT_OUT), "requires_safety_checker": False}
    ),
    "StableDiffusionXLPipeline": Family(
        adapter=StableDiffusionXL,
        negative_prompts_above=1,
        reads_in_parts=True,
        without={"add_watermarker": False},
    ),
    "ZImagePipeline": Family(
        adapter=ZImage,
        sequence_length=512,
        most_lengths=_LONG // 512,
        chat={"enable_thinking": True},
        negative_prompts_above=0,
    ),
}


def read_long(pipe: Any) -> None:
    """Have a pipeline read prompts of the `longest` that its family may have; others it reads as before."""
    kind, longest = type(pipe).__name__, FAMILIES[type(pipe).__name__].longest
    if kind == "QwenImagePipeline":
        pipe.tokenizer_max_length = longest
    if kind == "ZImagePipeline":  # it counts the prompt's tokens and the image on one axis
        rope = pipe.transformer.rope_embedder
        rope.axes_lens = [max(rope.axes_lens[0], 2 * _LONG), *rope.axes_lens[1:]]


def adapter_for(pipe: Any) -> Adapter | None:
    """Return the adapter for a pipeline, None if its requests can only be run as a whole."""
    family = FAMILIES[type(pipe).__name__]
    adapter = None if family.adapter is None else family.adapter(pipe)
    return adapter if adapter is not None and adapter.suits() else None
