"""The families of pipelines: an adapter that makes images step by step, and what requests may ask for.

A family without an adapter is run request by request.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from torch.nn.functional import interpolate
from torch.nn.utils.rnn import pad_sequence

from engine.backends.diffusers.denoising import Adapter, Denoising, Embeddings, Family, Start, embeddings, pixels_of
from engine.types import Edit, ImageJob
from engine.weights.safety import LEFT_OUT

# What the authors of Qwen-Image pass if there is no negative prompt: its pipeline guides only against one.
BLANK = " "


class Flux2Klein(Adapter):
    """Prompts are padded to one length and read whole, so that all images of a size can share a step."""

    packing = 4

    def embed(self, job: ImageJob, *, guided: bool) -> tuple[Embeddings, Embeddings | None]:
        length = self.family.length_for(self.pipe.tokenizer, job.prompt)
        prompt, text_ids = self.pipe.encode_prompt([job.prompt], max_sequence_length=length)
        positive = {"prompt": prompt, "text_ids": text_ids}
        if not guided or self.pipe.config.is_distilled:
            return positive, None
        against, _ = self.pipe.encode_prompt([""], max_sequence_length=length)
        return positive, {"prompt": against}

    def noise(self, edge: int, positive: Embeddings, generator: torch.Generator) -> Any:
        latents, positive["image_ids"] = super().noise(edge, positive, generator)
        return latents

    def schedule(self, latents: Any, steps: int) -> dict[str, Any]:
        mu = self.module.compute_empirical_mu(image_seq_len=latents.shape[1], num_steps=steps)
        return {"sigmas": np.linspace(1.0, 1 / steps, steps), "mu": mu}

    def source(self, edit: Edit, positive: Embeddings, generator: torch.Generator) -> Any | None:
        """The model looks at the pictures; with a strength the image also begins with the first of them."""
        multiple = self.pipe.vae_scale_factor * 2
        pictures = [_cut(pixels_of(picture), multiple) for picture in edit.pictures]
        seen, ids = self.pipe.prepare_image_latents(pictures, 1, generator, self.device, self.pipe.vae.dtype)
        positive |= {"pictures": seen, "picture_ids": ids, "shapes": tuple(one.shape[2:] for one in pictures)}
        if edit.strength is None:
            return None
        height, width = pictures[0].shape[2:]
        return seen[:, : (height // multiple) * (width // multiple)]

    def mask(self, plane: Any, edge: int) -> Any:
        side = edge // (self.pipe.vae_scale_factor * 2)
        return interpolate(plane, size=(side, side), mode="bilinear").reshape(1, -1, 1)

    def kind(self, state: Denoising) -> Hashable:
        """In one call prompts are padded to the same length, and pictures have the same shapes."""
        return state.positive["prompt"].shape[1], state.positive.get("shapes")

    def predict(self, states: Sequence[Denoising], latents: Any, timesteps: Any) -> Any:
        first, made = states[0].positive, latents.shape[1]
        image_ids = first["image_ids"]
        if "pictures" in first:
            seen = torch.cat([state.positive["pictures"] for state in states]).to(latents)
            latents = torch.cat([latents, seen.repeat(len(latents) // len(states), 1, 1)], dim=1)
            image_ids = torch.cat([image_ids, first["picture_ids"]], dim=1)
        return self.pipe.transformer(
            hidden_states=latents.to(self.pipe.transformer.dtype),
            timestep=timesteps.to(latents.dtype) / 1000,
            guidance=None,
            encoder_hidden_states=torch.cat(embeddings(states, "prompt")),
            # The same for all: the model takes those of the first.
            txt_ids=first["text_ids"],
            img_ids=image_ids,
            return_dict=False,
        )[0][:, :made]

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

    def encode(self, pixels: Any, generator: torch.Generator) -> Any:
        return self._packed(super().encode(pixels[:, :, None], generator)[:, :, 0])

    def mask(self, plane: Any, edge: int) -> Any:
        channels = self.pipe.transformer.config.in_channels // self.packing
        return self._packed(super().mask(plane, edge).repeat(1, channels, 1, 1))

    def _packed(self, latents: Any) -> Any:
        return self.pipe._pack_latents(latents, *latents.shape)  # noqa: SLF001  # as the pipeline does

    def scales(self, latents: Any) -> tuple[Any, Any]:
        config = self.vae.config
        values = torch.tensor(config.latents_mean), 1.0 / torch.tensor(config.latents_std)
        mean, factor = (one.view(1, config.z_dim, 1, 1, 1).to(latents.device, latents.dtype) for one in values)
        return mean, factor

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
        """Scale the guided prediction back to its length without guidance."""
        both = super().guide(guidance, towards, away)
        return both * (torch.norm(towards, dim=-1, keepdim=True) / torch.norm(both, dim=-1, keepdim=True))

    def unscaled(self, latents: Any, edge: int) -> Any:
        unpacked = self.pipe._unpack_latents(latents, edge, edge, self.pipe.vae_scale_factor)  # noqa: SLF001
        return super().unscaled(unpacked, edge)


def _cut(pixels: Any, multiple: int) -> Any:
    """Cut all sides to multiples of that number."""
    height, width = (side // multiple * multiple for side in pixels.shape[2:])
    top, left = (pixels.shape[2] - height) // 2, (pixels.shape[3] - width) // 2
    return pixels[:, :, top : top + height, left : left + width]


def _mask(prompts: list[Any]) -> Any:
    """Which tokens count; None if all do, as in the pipeline."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=prompts[0].device)
    if (lengths == lengths[0]).all():
        return None
    return torch.arange(int(lengths.max()), device=lengths.device)[None, :] < lengths[:, None]


def _read_twice(
    pipe: Any, text: str, against: str | None, *, guided: bool, **more: Any
) -> tuple[Embeddings, Embeddings | None]:
    """Read a prompt token by token and as a whole (pooled), and what it is guided against, if anything."""
    prompt, negative, pooled, negative_pooled = pipe.encode_prompt(
        prompt=text, negative_prompt=against, do_classifier_free_guidance=guided, **more
    )
    positive = {"prompt": prompt, "pooled": pooled}
    return positive, {"prompt": negative, "pooled": negative_pooled} if guided else None


def _joined(parts: list[Embeddings]) -> Embeddings:
    """Join parts of a prompt; empty if there are none."""
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
        return _read_twice(self.pipe, job.prompt, job.negative_prompt, guided=guided, **more)

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
    """A UNet, guided against zeros or a negative prompt, with any of its schedulers."""

    def suits(self) -> bool:
        # A distilled model that takes guidance as an input: not taken apart here.
        return self.pipe.unet.config.time_cond_proj_dim is None

    def embed(self, job: ImageJob, *, guided: bool) -> tuple[Embeddings, Embeddings | None]:
        """Read prompts in parts of as many tokens as CLIP takes, and join them; the first part is also pooled.

        The shorter of prompt and negative prompt gets empty parts. With a single part this is what the pipeline does.
        """
        read = [
            _read_twice(self.pipe, prompt, against if job.negative_prompt else None, guided=guided)
            for prompt, against in zip_longest(*self._prompts(job, guided=guided), fillvalue="")
        ]
        return _joined([positive for positive, _ in read]), _joined([away for _, away in read if away]) or None

    def parts(self, job: ImageJob, *, guided: bool) -> int:
        """Return in how many parts the prompts of an image are read."""
        return max(map(len, self._prompts(job, guided=guided)))

    def _prompts(self, job: ImageJob, *, guided: bool) -> tuple[list[str], list[str]]:
        """Return the parts of the prompt, and of what it is guided against."""
        return self._divided(job.prompt), self._divided((guided and job.negative_prompt) or "")

    def _divided(self, text: str) -> list[str]:
        """Divide a text between words, and a word that is too long between characters."""
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
        return parts or [""]  # a text of characters that are white space to us but not to CLIP

    def kind(self, state: Denoising) -> Hashable:
        """Prompts with the same number of parts share a call: padding would change the images."""
        return state.positive["prompt"].shape[1]

    def left_out(self, steps: int, strength: float) -> int:
        return steps - min(int(steps * strength), steps)

    def begins_with_noise(self, start: Start, strength: float) -> bool:
        return start.mask is not None and strength == 1

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
        """The size that the model is told: the whole image, nothing cropped."""
        size, encoder = (edge, edge), self.pipe.text_encoder_2
        width = pooled.shape[-1] if encoder is None else encoder.config.projection_dim
        times = self.pipe._get_add_time_ids(  # noqa: SLF001  # as the pipeline does
            size, (0, 0), size, dtype=pooled.dtype, text_encoder_projection_dim=width
        )
        return times.to(self.device).repeat(len(pooled), 1)

    @property
    def vae(self) -> Any:
        """The VAE, converted once, if it overflows in half precision: to bfloat16, or to 32 bits on old GPUs.

        In 32 bits an image of 1024 x 1024 took 4.8 GiB beside the weights, twice what is planned (H100).
        """
        vae = self.pipe.vae
        if vae.dtype == torch.float16 and vae.config.force_upcast:
            old_gpu = self.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
            vae.to(dtype=torch.float32 if old_gpu else torch.bfloat16)
        return vae

    def scales(self, latents: Any) -> tuple[Any, Any]:
        config = self.pipe.vae.config
        values = (getattr(config, "latents_mean", None), getattr(config, "latents_std", None))
        if None in values:
            return 0.0, config.scaling_factor
        mean, deviation = (torch.tensor(one).view(1, -1, 1, 1).to(latents.device, latents.dtype) for one in values)
        return mean, config.scaling_factor / deviation


class ZImage(Adapter):
    """One call of its transformer takes prompts of different lengths."""

    guided_above = 0.0
    noise_dtype = torch.float32

    def embed(self, job: ImageJob, *, guided: bool) -> tuple[Embeddings, Embeddings | None]:
        positive, negative = self.pipe.encode_prompt(
            job.prompt,
            negative_prompt=job.negative_prompt,
            do_classifier_free_guidance=guided,
            max_sequence_length=self.family.length_for(self.pipe.tokenizer, job.prompt, job.negative_prompt),
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


# Three tokens, which an Ethiopic letter may take, for each of 1,000 characters.
_LONG = 3072


FAMILIES = {
    "Flux2KleinPipeline": Family(
        adapter=Flux2Klein, sequence_length=512, longest=_LONG, chat={"enable_thinking": False}
    ),
    "FluxPipeline": Family(sequence_length=512, longest=512),
    "QwenImagePipeline": Family(adapter=QwenImage, sequence_length=1024, longest=_LONG, negative_prompts_above=1),
    "StableDiffusion3Pipeline": Family(
        adapter=StableDiffusion3, sequence_length=256, longest=256, negative_prompts_above=1
    ),
    "StableDiffusionPipeline": Family(
        negative_prompts_above=1, without={**dict.fromkeys(LEFT_OUT), "requires_safety_checker": False}
    ),
    "StableDiffusionXLPipeline": Family(
        adapter=StableDiffusionXL, negative_prompts_above=1, without={"add_watermarker": False}
    ),
    "ZImagePipeline": Family(
        adapter=ZImage,
        sequence_length=512,
        longest=_LONG,
        chat={"enable_thinking": True},
        negative_prompts_above=0,
    ),
}


def read_long(pipe: Any) -> None:
    """Have a pipeline read prompts up to its family's `longest`, if it has one."""
    kind, longest = type(pipe).__name__, FAMILIES[type(pipe).__name__].longest
    if kind == "QwenImagePipeline":
        pipe.tokenizer_max_length = longest
    if kind == "ZImagePipeline":  # it counts the prompt's tokens and the image on one axis
        rope = pipe.transformer.rope_embedder
        rope.axes_lens = [max(rope.axes_lens[0], 2 * _LONG), *rope.axes_lens[1:]]


def adapter_for(pipe: Any) -> Adapter | None:
    """Return the adapter for a pipeline; None if requests can only be run whole."""
    family = FAMILIES[type(pipe).__name__]
    adapter = None if family.adapter is None else family.adapter(pipe, family)
    return adapter if adapter is not None and adapter.suits() else None
