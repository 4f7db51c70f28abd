"""Loads an image pipeline from a folder: checked first, then by diffusers, onto the GPU if there is one."""

import logging
import warnings
from pathlib import Path
from typing import Any

import diffusers
import torch

from engine.backends.diffusers.families import FAMILIES
from engine.config.models import ImageProfile
from engine.errors import LoadError
from engine.weights.safety import check_pipeline_folder, lacking, variant

_log = logging.getLogger(__name__)


def load(folder: Path, profile: ImageProfile) -> Any:
    """Return a pipeline that can be called. Raises `LoadError` for a folder that is unsafe or not understood."""
    name = check_pipeline_folder(folder)
    _check_negative_prompts(name, profile)
    on_gpu = torch.cuda.is_available()
    diffusers.logging.disable_progress_bar()
    try:
        pipe = _read(folder, name, getattr(torch, profile.dtype) if on_gpu else torch.float32)
        if on_gpu:
            _place(pipe, profile)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"{folder.name} does not fit the GPU's free memory. Pick one: 1. offload: model (slower, and takes the "
            "package accelerate); 2. serve fewer models on this GPU; 3. a smaller model."
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # over a folder that they do not understand the libraries raise anything
        _log.exception("diffusers could not load %s", folder.name)
        raise LoadError(
            f"{folder.name} cannot be loaded as a {name} ({type(error).__name__}; the log has the details). Check that "
            "the download is complete and that this version of diffusers knows the model."
        ) from error
    if profile.vae_tiling:
        pipe.vae.enable_tiling()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _check_negative_prompts(name: str, profile: ImageProfile) -> None:
    """A negative prompt that changes nothing must not be taken."""
    if not profile.negative_prompt:
        return
    above = FAMILIES[name].negative_prompts_above
    if above is None:
        raise LoadError(f"negative_prompt cannot be true for this model: a {name} takes none. Set it to false.")
    if profile.guidance_scale <= above:
        raise LoadError(
            f"negative_prompt is true, but with guidance_scale {profile.guidance_scale:g} it changes nothing. Raise "
            f"guidance_scale above {above:g}, or set negative_prompt to false."
        )


def _read(folder: Path, name: str, dtype: torch.dtype) -> Any:
    with warnings.catch_warnings():
        # Deprecations inside the two libraries, of calls that they make themselves.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(diffusers|transformers)\b")
        return diffusers.DiffusionPipeline.from_pretrained(
            folder,
            torch_dtype=dtype,
            variant=variant(folder),
            use_safetensors=True,
            local_files_only=True,
            **FAMILIES[name].without,
            **dict.fromkeys(lacking(folder)),
        )


def _place(pipe: Any, profile: ImageProfile) -> None:
    """Move the parts to the GPU, or have them moved when they are needed (which takes accelerate)."""
    if profile.offload == "none":
        pipe.to("cuda")
    elif profile.offload == "model":
        pipe.enable_model_cpu_offload()
    else:
        pipe.enable_sequential_cpu_offload()
