"""Loads an image pipeline from a folder: checked first, then by diffusers, onto the GPU if there is one."""

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors import SafetensorError

from engine.backends.diffusers.protocol import ImageOptions
from engine.config.models import ImageProfile
from engine.errors import LoadError
from engine.weights.safety import LEFT_OUT, check_pipeline_folder, lacking, variant

# The guidance_scale above which a pipeline reads its negative prompt.
_NEGATIVE_PROMPTS_ABOVE = {
    "QwenImagePipeline": 1,
    "StableDiffusion3Pipeline": 1,
    "StableDiffusionPipeline": 1,
    "StableDiffusionXLPipeline": 1,
    "ZImagePipeline": 0,
}

# What the libraries raise over a folder that they do not understand; assert statements check sizes in some of them.
_REFUSALS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    RuntimeError,
    AssertionError,
    ArithmeticError,
    SafetensorError,
)

_log = logging.getLogger(__name__)

# Left out of a pipeline by its own constructor's arguments.
_WITHOUT: dict[str, dict[str, Any]] = {
    "StableDiffusionPipeline": {**dict.fromkeys(LEFT_OUT), "requires_safety_checker": False},
    "StableDiffusionXLPipeline": {"add_watermarker": False},
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A pipeline that can be called. `device` is how people name it."""

    pipe: Any
    name: str
    device: str


def load(options: ImageOptions) -> Loaded:
    """Raises `LoadError` for a folder that is unsafe, incomplete or not understood."""
    profile = options.read_profile()
    folder = Path(options.folder)
    name = check_pipeline_folder(folder)
    _check_negative_prompts(name, profile)
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(options.threads)
    quieten()
    try:
        pipe = _read(folder, name, getattr(torch, profile.dtype) if on_gpu else torch.float32)
        if on_gpu:
            _place(pipe, profile)
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"{folder.name} does not fit the GPU's free memory. Pick one: 1. offload: model (slower, and takes the "
            "package accelerate); 2. serve fewer models on this GPU; 3. a smaller model."
        ) from error
    except _REFUSALS as error:
        _log.exception("diffusers could not load %s", folder.name)
        raise LoadError(
            f"{folder.name} cannot be loaded as a {name} ({type(error).__name__}; the log has the details). Check that "
            "the download is complete and that this version of diffusers knows the model."
        ) from error
    if profile.vae_tiling:
        pipe.vae.enable_tiling()
    pipe.set_progress_bar_config(disable=True)
    return Loaded(pipe, name, torch.cuda.get_device_name() if on_gpu else "cpu")


def _check_negative_prompts(name: str, profile: ImageProfile) -> None:
    """A negative prompt that changes nothing must not be taken."""
    if not profile.negative_prompt:
        return
    above = _NEGATIVE_PROMPTS_ABOVE.get(name)
    if above is None:
        raise LoadError(f"negative_prompt cannot be true for this model: a {name} takes none. Set it to false.")
    if profile.guidance_scale <= above:
        raise LoadError(
            f"negative_prompt is true, but with guidance_scale {profile.guidance_scale:g} it changes nothing. Raise "
            f"guidance_scale above {above}, or set negative_prompt to false."
        )


def quieten() -> None:
    """Keep progress bars and remarks of the libraries out of the log; ours say what matters."""
    for library in (diffusers.logging, transformers.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


def _read(folder: Path, name: str, dtype: torch.dtype) -> Any:
    with warnings.catch_warnings():
        # Deprecations inside the two libraries, of calls that they make themselves.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(diffusers|transformers)\b")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(diffusers|transformers)\b")
        return diffusers.DiffusionPipeline.from_pretrained(
            folder,
            torch_dtype=dtype,
            variant=variant(folder),
            use_safetensors=True,
            local_files_only=True,
            **_WITHOUT.get(name, {}),
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
