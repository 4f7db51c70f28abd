"""Measures images on this machine: one by one and batched, at 512 and 1024, with peaks of memory.

Pipelines that were never trained make them, with the shapes of the shipped variants, or small ones with the same
parts. Needs no vLLM and no server: torch, diffusers, transformers, accelerate, pydantic, msgspec and PyYAML, and no
download:

    python3 scripts/proof/images.py --profiles sdxl --out proof
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from proof.random_chat import MARKS, VISION_MARKS  # noqa: E402  # both folders come first
from proof.report import Proof, Skipped  # noqa: E402

GIB = 1 << 30
SIZES = (512, 1024)
JOINED = (1, 2, 4)
# What is written to the disk.
_DISK_GIB = {"sdxl": 7, "flux2-klein-4b": 16, "z-image-turbo": 21, "qwen-image-2512": 56}
_LIMIT_SECONDS = 1200.0
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LETTERS = sorted(ByteLevel.alphabet())


class _Recorder:
    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}

    def event(self, job: int, payload: Any) -> None:
        if hasattr(payload, "data"):
            self.files[job] = payload.data

    def done(self, job: int) -> None: ...

    def poll(self) -> None: ...

    def failed(self, job: int, error: Exception) -> None:  # noqa: ARG002  # one failure ends the step
        raise error


async def prove_images(proof: Proof, profiles: Sequence[str], *, small: bool) -> None:
    """Make, load and measure a pipeline that was never trained for each profile, and remove it."""
    for profile in profiles:
        with tempfile.TemporaryDirectory(prefix="hearth-proof-") as place:
            folder, services = Path(place) / profile, list[Any]()
            made = partial(asyncio.to_thread, write_random, profile, folder, small=small)
            if not await proof.try_step(f"{profile}: random weights", made, _LIMIT_SECONDS):
                continue
            load = partial(asyncio.to_thread, _load, folder, profile, services, small=small)
            if not await proof.try_step(f"{profile}: load", load, _LIMIT_SECONDS):
                continue
            service, recorder = services.pop()
            for size in SIZES:
                for count in JOINED:
                    job = partial(asyncio.to_thread, _measure, service, recorder, size, count)
                    await proof.try_step(f"{profile}: {count} x {size} at once", job, _LIMIT_SECONDS)
            del service, recorder
            await asyncio.to_thread(_free)


def write_random(profile: str, folder: Path, *, small: bool) -> dict[str, Any]:
    """Write a pipeline that was never trained; return its size. Raises `Skipped` if the disk has no room."""
    free = shutil.disk_usage(folder.parent).free
    if not small and free < _DISK_GIB[profile] * GIB:
        needed = f"{_DISK_GIB[profile]} GiB are needed in {folder.parent}"
        raise Skipped(f"{needed}, and {free / GIB:.0f} are free: set TMPDIR")
    # In a process of its own: else its memory on the GPU would count for the loaded model.
    command = [sys.executable, __file__, "--profiles", profile, "--write", str(folder)]
    subprocess.run([*command, *(["--small"] if small else [])], check=True)
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"gib": round(written / GIB, 2)}


def _load(folder: Path, profile: str, services: list[Any], *, small: bool) -> dict[str, Any]:
    from engine.backends.diffusers.service import open_service
    from engine.config.models import profile_named

    joined = dict.fromkeys(("256x256", "512x512", "1024x1024"), max(JOINED))
    changes: dict[str, Any] = {"max_batch": joined}
    if small:
        changes["steps"] = {"standard": 2, "hd": 2}
        changes["render_size"] = {"256x256": 128, "512x512": 128, "1024x1024": 256}
    settings = profile_named(profile, changes).model_dump_json(by_alias=True)
    recorder = _Recorder()
    options: Any = msgspec.Raw(msgspec.msgpack.encode((str(folder), settings, False)))
    services.append((open_service(options, recorder, lambda _phase, _done: None), recorder))
    return {"gpu_gib": round(torch.cuda.memory_allocated() / GIB, 2)} if torch.cuda.is_available() else {}


def _measure(service: Any, recorder: _Recorder, size: int, count: int) -> dict[str, Any]:
    from engine.types import ImageJob

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    recorder.files.clear()
    begun = time.monotonic()
    for number in range(count):
        job = ImageJob(f"a red square, {number}", size, "standard", number)
        service.submit(number, msgspec.Raw(msgspec.msgpack.encode(job)))
    while service.busy:
        service.step()
    seconds = time.monotonic() - begun
    if len(recorder.files) != count:
        raise RuntimeError(f"{len(recorder.files)} of {count} images came")
    found: dict[str, Any] = {"seconds_per_image": round(seconds / count, 2)}
    if on_gpu:
        found["peak_gpu_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    return found


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write(profile: str, folder: Path, *, small: bool) -> None:
    """Write the pipeline that a profile of Hearth is for, in its 16 bits. Raises `KeyError` for another name."""
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float32 if small else torch.float16 if profile == "sdxl" else torch.bfloat16)
    # Random numbers are made where that is fast
    with torch.device("cuda" if torch.cuda.is_available() and not small else "cpu"):
        pipe = _PIPELINES[profile](small=small)
    pipe.save_pretrained(folder)


def _vae(channels: int, *, small: bool, shift: float | None = None) -> Any:
    return diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8,) * 4 if small else (128, 256, 512, 512),
        norm_num_groups=4 if small else 32,
        layers_per_block=1 if small else 2,
        sample_size=1024,
        scaling_factor=0.13025 if shift is None else 0.3611,
        shift_factor=shift,
        use_quant_conv=shift is None,
        use_post_quant_conv=shift is None,
    )


def _z_image(*, small: bool) -> Any:
    narrow: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
    narrow |= {"cap_feat_dim": 32, "axes_dims": [8, 4, 4]}
    transformer = diffusers.ZImageTransformer2DModel(**(narrow if small else {}))  # by default as published
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token)
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=small),
        vae=_vae(16, small=small, shift=0.1159),
        text_encoder=_qwen3(transformers.Qwen3Model, small=small, layers=3),
        tokenizer=_qwen_tokenizer(small=small),
        transformer=transformer,
    )


def _flux2_klein(*, small: bool) -> Any:
    shape: dict[str, Any] = {"num_layers": 5, "num_single_layers": 20}
    shape |= {"num_attention_heads": 24, "joint_attention_dim": 7680}
    vae: dict[str, Any] = {}
    if small:
        shape = {"patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1}
        shape |= {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 96}
        shape |= {"axes_dims_rope": (4, 4, 4, 4)}
        vae = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4}
        vae |= {"use_quant_conv": False, "use_post_quant_conv": False}
        vae |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLFlux2(**vae),
        text_encoder=_qwen3(transformers.Qwen3ForCausalLM, small=small, layers=28),
        tokenizer=_qwen_tokenizer(small=small),
        transformer=diffusers.Flux2Transformer2DModel(guidance_embeds=False, **shape),
    )


def _qwen_image(*, small: bool) -> Any:
    tokenizer = _qwen_tokenizer(small=small)
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in VISION_MARKS.items()}
    wide: dict[str, Any] = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    wide |= {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064}
    vision: dict[str, Any] = {"out_hidden_size": 3584}
    transformer: dict[str, Any] = {}
    vae: dict[str, Any] = {}
    sections = [16, 24, 24]
    if small:
        wide = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
        wide |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
        transformer = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3, "joint_attention_dim": 16}
        transformer |= {"in_channels": 16, "out_channels": 4, "axes_dims_rope": (8, 4, 4)}
        vae = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
        vae |= {"latents_mean": [0.1, -0.1, 0.2, 0.0], "latents_std": [1.0, 1.5, 0.8, 1.1]}
        sections = [1, 1, 2]
    rope = {"mrope_section": sections, "rope_type": "default", "type": "default"}
    text = wide | {"rope_scaling": rope, "rope_theta": 1e6}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLQwenImage(**vae),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer,
        transformer=diffusers.QwenImageTransformer2DModel(guidance_embeds=False, **transformer),
    )


def _sdxl(*, small: bool) -> Any:
    shape: dict[str, Any] = {
        "layers_per_block": 2,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": [5, 10, 20],
        "transformer_layers_per_block": [1, 2, 10],
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
        "cross_attention_dim": 2048,
    }
    if small:
        shape = {"layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 4}
        shape |= {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
        shape |= {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": (2, 4)}
        shape |= {"transformer_layers_per_block": (1, 2), "addition_time_embed_dim": 8}
        shape |= {"projection_class_embeddings_input_dim": 6 * 8 + 32, "cross_attention_dim": 64}
    unet = diffusers.UNet2DConditionModel(
        sample_size=128, use_linear_projection=True, addition_embed_type="text_time", **shape
    )
    return diffusers.StableDiffusionXLPipeline(
        vae=_vae(4, small=small),
        text_encoder=_clip(32 if small else 768, 2 if small else 12, small=small),
        text_encoder_2=_clip(32 if small else 1280, 2 if small else 32, small=small, projects=True),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            steps_offset=1,
            timestep_spacing="leading",
        ),
        add_watermarker=False,
    )


def _clip_words() -> dict[str, int]:
    words = [*_LETTERS, *(letter + "</w>" for letter in _LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return {word: place for place, word in enumerate(words)}


def _clip_tokenizer() -> Any:
    return transformers.CLIPTokenizer(vocab=_clip_words(), merges=[], model_max_length=77)


def _clip(width: int, layers: int, *, small: bool, projects: bool = False) -> Any:
    words = _clip_words()
    config = transformers.CLIPTextConfig(
        vocab_size=len(words) if small else 49_408,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4 if small else width // 64,
        max_position_embeddings=77,
        bos_token_id=words["<|startoftext|>"],
        eos_token_id=words["<|endoftext|>"],
        pad_token_id=words["<|endoftext|>"],
        projection_dim=width,
    )
    return (transformers.CLIPTextModelWithProjection if projects else transformers.CLIPTextModel)(config)


def _qwen_tokenizer(*, small: bool) -> Any:
    words, longest = {word: place for place, word in enumerate([*_LETTERS, *MARKS])}, 1024 if small else 131_072
    tokenizer = transformers.Qwen2Tokenizer(vocab=words, merges=[], model_max_length=longest)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS[1:])})
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _qwen3(kind: Any, *, small: bool, layers: int) -> Any:
    shape = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    if small:
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
        shape |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 320}
    return kind(transformers.Qwen3Config(max_position_embeddings=1024 if small else 40_960, **shape))


_PIPELINES: dict[str, Callable[..., Any]] = {
    "sdxl": _sdxl,
    "flux2-klein-4b": _flux2_klein,
    "z-image-turbo": _z_image,
    "qwen-image-2512": _qwen_image,
}
"""By the name of the profile in models.yaml."""


def main(arguments: list[str]) -> int:
    """Return the exit code: 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="scripts/proof/images.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("proof-images"), help="folder of the report")
    parser.add_argument("--profiles", default=",".join(_DISK_GIB), help="of models.yaml, separated by commas")
    parser.add_argument("--small", action="store_true", help="few narrow layers; on a CPU always")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)  # one pipeline, and no more
    given = parser.parse_args(arguments)
    profiles = given.profiles.split(",")
    if unknown := set(profiles) - _DISK_GIB.keys():
        parser.error(f"there is no profile {min(unknown)}, only {', '.join(_DISK_GIB)}")
    if given.write is not None:
        _write(given.profiles, given.write, small=given.small)
        return 0
    on_gpu = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if on_gpu else "A CPU"
    began = datetime.now(UTC).isoformat(timespec="seconds")
    proof = Proof(machine, f"for CUDA {torch.version.cuda}", began, not on_gpu, given.out, "random")
    asyncio.run(prove_images(proof, profiles, small=given.small or not on_gpu))
    print(f"The report: {given.out / 'proof.md'}", file=sys.stderr)
    return 1 if proof.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
