"""The image service in the worker process: a job from its payload to its one end.

Jobs are batched in one of two ways: between any two steps through a family's adapter, or in whole calls of the
pipeline. Whole calls give no previews: what a pipeline has between its steps differs from family to family.
"""

import errno
import io
import logging
import warnings
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import diffusers
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from engine.backends.diffusers.denoising import Adapter, Denoising, seeded
from engine.backends.diffusers.families import BLANK, FAMILIES, StableDiffusionXL, adapter_for, read_long
from engine.config.models import SIZES, ImageProfile
from engine.errors import EngineError, GenerationError, LoadError, RequestError, StartError
from engine.process.protocol import Outlet, Service
from engine.types import FinishedImage, ImageJob, ImageProgress, PartialImage, Report
from engine.weights.safety import check_pipeline_folder, lacking, variant

_log = logging.getLogger(__name__)

_QUALITY = {"jpeg": 92, "webp": 90}  # by default
# Four times faster than Pillow's default, and 17 % larger (measured at 1024 x 1024).
_PNG_LEVEL = 1
_TILE = 512  # pixels
# How cuBLAS and cuDNN say that the GPU is full: torch does not allocate for them, so it does not raise its error.
_NO_MEMORY = ("_STATUS_ALLOC_FAILED", "_STATUS_NOT_INITIALIZED")
# https://www.iptc.org/std/photometadata/specification/ : Digital Source Type
_XMP = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about="" '
    'xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" Iptc4xmpExt:DigitalSourceType='
    '"http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"/></rdf:RDF></x:xmpmeta>'
    '<?xpacket end="w"?>'
)

_T = TypeVar("_T")


def open_service(options: msgspec.Raw, outlet: Outlet, report: Report) -> Service:
    """Load a pipeline. `options`: its folder, its `ImageProfile` as JSON, whether files are marked. Raises `LoadError`.

    Images are batched between steps if the family has an adapter. An offloaded pipeline runs whole requests: its
    parts would be moved at every step.
    """
    report("loading the pipeline", 0.3)
    folder, written, mark = msgspec.msgpack.decode(options, type=tuple[str, str, bool])
    profile = ImageProfile.model_validate_json(written)
    pipe = load(Path(folder), profile)
    service: ImageService = RequestService(pipe, profile, outlet, mark=mark)
    if profile.batching == "steps" and profile.offload == "none" and (adapter := adapter_for(pipe)) is not None:
        service = StepService(adapter, profile, outlet, mark=mark)
    report("making a first image", 0.8)
    service.rehearse()
    return service


@dataclass(slots=True)
class Running:
    """One requested image. `state`: its progress, once it has begun and if it is run step by step."""

    number: int
    job: ImageJob
    edge: int
    steps: int
    state: Denoising | None = None
    previews: int = 0


class ImageService(Service):
    """A `Service` (process/protocol.py); subclasses have what a `step` runs."""

    gives_previews = False

    def __init__(self, pipe: Any, profile: ImageProfile, outlet: Outlet, *, mark: bool) -> None:
        self.running: dict[int, Running] = {}  # the one that has waited longest first
        self._adapter = adapter_for(pipe)
        self._pipe, self._family, self._profile = pipe, FAMILIES[type(pipe).__name__], profile
        self._outlet, self._mark = outlet, mark
        self._parts = StableDiffusionXL(pipe, self._family) if self._family.adapter is StableDiffusionXL else None
        self._longest = self._family.longest

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def submit(self, number: int, payload: msgspec.Raw, /) -> None:
        """Queue a job. Raises `RequestError` for one that this pipeline cannot do."""
        job = msgspec.msgpack.decode(payload, type=ImageJob)
        self._check_prompt(job.prompt, param="prompt")
        if job.negative_prompt is not None:
            if not self._profile.negative_prompt:
                raise RequestError(
                    "This model takes no negative_prompt: it was made to do without. Say in the prompt what the image "
                    "should show instead.",
                    param="negative_prompt",
                )
            self._check_prompt(job.negative_prompt, param="negative_prompt")
        if job.edit is not None and self._adapter is None:
            raise RequestError("This model, as it is configured, makes images of text alone.", param="model")
        edge, steps = self._profile.render_size.of(job.size), self._profile.step_count(job.quality)
        self.running[number] = Running(number, job, edge, steps)

    def cancel(self, number: int, /) -> None:
        """End a job after the current step, if it has not ended. Its work is lost."""
        if self.running.pop(number, None) is not None:
            self._outlet.done(number)

    def step(self) -> None:
        """Run the job that has waited longest, with all jobs that can share the step."""
        jobs = self.running.values()
        group = next_together(jobs, self._kind, self._max_batch)
        for running in group:  # to the end of the queue: sizes that cannot share a step take turns
            self.running[running.number] = self.running.pop(running.number)
        try:
            self._run(group)
        except (torch.OutOfMemoryError, MemoryError):  # the service lives on
            self._fail(
                group,
                "The device ran out of memory while making this image. Try again; if it happens again, ask the "
                "administrator to lower max_batch or render_size of the model.",
            )
        else:
            return
        if torch.cuda.is_available():  # the error referred to the step's tensors until now
            torch.cuda.empty_cache()

    def _max_batch(self, running: Running) -> int:
        return max(1, self._profile.max_batch.of(running.job.size) // running.job.weight)

    def _kind(self, running: Running) -> Hashable:
        """Return a key: jobs with the same key are run together."""
        raise NotImplementedError

    def _run(self, group: list[Running]) -> None:
        raise NotImplementedError

    def rehearse(self) -> None:
        """Make a small image, to test. Raises `LoadError` for a model that cannot, `StartError` if it may later."""
        size = min(SIZES, key=self._profile.render_size.of)
        outlet, self._outlet = self._outlet, _Rehearsal()
        try:
            job = ImageJob(prompt="a house", size=size, quality="standard", seed=0)
            self.submit(0, msgspec.Raw(msgspec.msgpack.encode(job)))
            while self.busy:
                self.step()
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, EngineError) as error:
            if _may_pass(error) or _may_pass(error.__context__):
                raise StartError("The GPU did not have enough memory for a first image, or failed.") from error
            raise LoadError(
                f"The pipeline was loaded, but could not make a first image ({type(error).__name__}). Check that the "
                "model fits the device, that dtype is one that its authors recommend (many make no image in float16), "
                "that the download is complete, and that the profile is the one of this model."
            ) from error
        finally:
            self._outlet = outlet

    def _check_prompt(self, text: str, *, param: str) -> None:
        """Raise `RequestError` if a tokenizer of the pipeline makes more tokens of `text` than the model reads."""
        for part, tokenizer in self._pipe.components.items():
            if not part.startswith("tokenizer") or tokenizer is None:
                continue
            limit = self._profile.max_prompt_tokens
            if self._parts is None:
                limit = min(limit, self._longest or tokenizer.model_max_length)
                if "CLIP" in type(tokenizer).__name__:
                    limit = min(limit, tokenizer.model_max_length)
            count = self._family.count(tokenizer, text)
            if count > limit:
                raise RequestError(
                    f"{param} has {count} tokens, and this model reads at most {limit} (both counted with the model's "
                    "own start and end marks). Make it shorter.",
                    param=param,
                )

    def _fail(self, group: Iterable[Running], message: str) -> None:
        """End jobs whose images cannot be made; those that have ended already are left alone."""
        for running in group:
            if self.running.pop(running.number, None) is not None:
                self._outlet.failed(running.number, GenerationError(message))

    def _finish(self, running: Running, pixels: NDArray[Any]) -> None:
        """End a job with its picture, or as failed if that has values that are not finite."""
        if running.number not in self.running:
            return
        if not np.isfinite(pixels).all():
            self._fail([running], "The model made no valid image of this prompt and seed. Try again with another seed.")
            return
        job, file = running.job, encode(pixels, running.job, mark=self._mark)
        self._outlet.event(running.number, FinishedImage(job.index, file, job.seed, running.steps))
        self.cancel(running.number)

    def _advance(self, adapter: Adapter, group: list[Running]) -> None:
        """Take one denoising step of each, and finish those for which it was the last."""
        with torch.inference_mode():
            states = [self._state(adapter, running) for running in group]
            predictions = adapter.forward(states)
            for running, state, prediction in zip(group, states, predictions, strict=True):
                state.advance(prediction)
                self._report(running, state.steps_done, state.steps)
            for running, state in zip(group, states, strict=True):
                previews = running.job.partial_images if self.gives_previews else 0
                if state.steps_done == state.steps:
                    self._finish(running, adapter.decode(state.latents, running.edge))
                elif state.steps_done in preview_steps(state.steps, previews):
                    self._preview(running, adapter.decode(state.outlook, running.edge))

    def _state(self, adapter: Adapter, running: Running) -> Denoising:
        if running.state is None:
            edge, steps, guidance = running.edge, running.steps, self._profile.guidance_scale
            running.state = adapter.prepare(running.job, edge=edge, steps=steps, guidance=guidance)
            running.steps = running.state.steps
        return running.state

    def _report(self, running: Running, step: int, steps: int) -> None:
        if running.number in self.running:
            self._outlet.event(running.number, ImageProgress(running.job.index, step, steps))

    def _preview(self, running: Running, pixels: NDArray[Any]) -> None:
        """Send an unfinished picture, unless it has values that are not finite."""
        if np.isfinite(pixels).all():
            file = encode(pixels, running.job, mark=self._mark)
            self._outlet.event(running.number, PartialImage(running.job.index, running.previews, file))
            running.previews += 1


class StepService(ImageService):
    """A `Service` whose `step` is one denoising step."""

    gives_previews = True

    def __init__(self, adapter: Adapter, profile: ImageProfile, outlet: Outlet, *, mark: bool) -> None:
        super().__init__(adapter.pipe, profile, outlet, mark=mark)
        self._stepper = adapter

    def _kind(self, running: Running) -> Hashable:
        return running.edge

    def _run(self, group: list[Running]) -> None:
        self._advance(self._stepper, group)


class _AllCancelledError(Exception):
    """Ends a pipeline's call of which all jobs are cancelled."""


class RequestService(ImageService):
    """A `Service` whose `step` is one call of the pipeline, which reads messages after every denoising step."""

    def __init__(self, pipe: Any, profile: ImageProfile, outlet: Outlet, *, mark: bool) -> None:
        super().__init__(pipe, profile, outlet, mark=mark)
        if type(pipe).__name__ == "QwenImagePipeline":  # its call refuses lengths that its encoder can read
            self._longest = self._family.sequence_length
        pipe.vae.enable_slicing()  # else the pipelines decode all images of a call at once

    def _kind(self, running: Running) -> Hashable:
        # Without a negative prompt some pipelines guide differently.
        plain = running.job.negative_prompt is None, running.job.edit is None
        return running.edge, running.steps, plain, self._parts_of(running), self._length_of(running)

    def _length_of(self, running: Running) -> int | None:
        job, tokenizer = running.job, getattr(self._pipe, "tokenizer", None)
        return min(self._family.length_for(tokenizer, job.prompt, job.negative_prompt) or 0, self._longest or 0) or None

    def _parts_of(self, running: Running) -> int:
        return 1 if self._parts is None else self._parts.parts(running.job, guided=self._profile.guidance_scale > 1)

    def _run(self, group: list[Running]) -> None:
        if self._adapter is not None and group[0].job.edit is not None:
            self._run_steps(self._adapter, group)
        else:
            self._run_pipeline(group)

    def _run_steps(self, adapter: Adapter, group: list[Running]) -> None:
        """Make images from pictures, which the pipeline itself cannot."""
        try:
            while together := [running for running in group if running.number in self.running]:
                self._advance(adapter, together)
                self._outlet.poll()
        finally:
            self._pipe.maybe_free_model_hooks()

    def _run_pipeline(self, group: list[Running]) -> None:
        try:
            pictures = self._pipe(**self._call(group)).images
            if self._parts is not None:
                pictures = self._decoded(self._parts, group, pictures)
        except Exception as error:
            self._pipe.maybe_free_model_hooks()  # the pipelines do this themselves, but only at their end
            if isinstance(error, _AllCancelledError):
                return
            raise
        for running, pixels in zip(group, pictures, strict=True):
            self._finish(running, pixels)

    def _decoded(self, adapter: Adapter, group: list[Running], latents: Any) -> list[NDArray[Any]]:
        """Decode SDXL's images one by one, as with steps: the pipeline would do it in 32 bits."""
        with torch.inference_mode():
            pictures = [adapter.decode(one[None], running.edge) for running, one in zip(group, latents, strict=True)]
        self._pipe.maybe_free_model_hooks()
        return pictures

    def _call(self, group: list[Running]) -> dict[str, Any]:
        """All by keyword: the first argument of some pipelines is not the prompt."""
        first = group[0]
        arguments = {
            "prompt": [running.job.prompt for running in group],
            "height": first.edge,
            "width": first.edge,
            "num_inference_steps": first.steps,
            "generator": [seeded(running.job.seed) for running in group],
            "output_type": "np" if self._parts is None else "latent",
            "callback_on_step_end": self._watch(group),
            **self._guidance(group),
        }
        if self._parts is not None and self._parts_of(first) > 1:
            arguments = {name: value for name, value in arguments.items() if name not in {"prompt", "negative_prompt"}}
            arguments |= _in_parts(self._parts, group, guided=self._profile.guidance_scale > 1)
        if self._family.sequence_length is not None:
            arguments["max_sequence_length"] = self._length_of(first)
        return arguments

    def _guidance(self, group: list[Running]) -> dict[str, Any]:
        scale = self._profile.guidance_scale
        negatives = [running.job.negative_prompt for running in group]
        if type(self._pipe).__name__ == "QwenImagePipeline":
            # It guides only against a prompt; without one its authors pass a blank.
            against = {"negative_prompt": [text or BLANK for text in negatives]} if scale > 1 else {}
            return {"true_cfg_scale": scale, **against}
        if None not in negatives:
            return {"guidance_scale": scale, "negative_prompt": negatives}
        return {"guidance_scale": scale}

    def _watch(self, group: list[Running]) -> Any:
        """Return a callback for the pipeline's steps. It ends the call when all of its jobs are cancelled."""

        def after_step(pipe: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            for running in group:
                self._report(running, step + 1, pipe.num_timesteps)
            self._outlet.poll()
            if not any(running.number in self.running for running in group):
                raise _AllCancelledError
            return tensors

        return after_step


def _in_parts(adapter: Adapter, group: list[Running], *, guided: bool) -> dict[str, Any]:
    """Return prompts that were read in parts, as arguments of the pipeline."""
    with torch.inference_mode():
        read = [adapter.embed(running.job, guided=guided) for running in group]
    given = {"": [positive for positive, _ in read], "negative_": [away for _, away in read if away is not None]}
    return {
        f"{whose}{name}": torch.cat([one[key] for one in all_of])
        for whose, all_of in given.items()
        for name, key in (("prompt_embeds", "prompt"), ("pooled_prompt_embeds", "pooled"))
        if all_of
    }


def preview_steps(steps: int, previews: int) -> tuple[int, ...]:
    """Return after which of `steps` a preview is made: at most `previews`, evenly spread, never after the last."""
    return tuple(sorted({number * steps // (previews + 1) for number in range(1, previews + 1)} - {0, steps}))


class _Rehearsal:
    """An `Outlet` that sends nothing, and raises errors."""

    def event(self, job: int, payload: object) -> None: ...

    def done(self, job: int) -> None: ...

    def poll(self) -> None: ...

    def failed(self, job: int, error: EngineError) -> None:  # noqa: ARG002  # there is only one
        raise error


def next_together(jobs: Iterable[_T], agrees: Callable[[_T], Hashable], max_batch: Callable[[_T], int]) -> list[_T]:
    """Return those of `jobs`, of which the first has waited longest, that take the next step.

    It is the first, with all others for which `agrees` returns the same, at most `max_batch` of a kind. The caller then
    moves them to the end, so each group gets its turn: a newcomer of another size waits for a step, not for an image.
    """
    together: list[_T] = []
    room = Fraction(1)
    for job in jobs:
        share = Fraction(1, max_batch(job))
        if (not together or agrees(job) == agrees(together[0])) and share <= room:
            together.append(job)
            room -= share
    return together


def encode(pixels: NDArray[Any], job: ImageJob, *, mark: bool) -> bytes:
    """Return the file of a picture (height, width, 3) from 0 to 1. `mark`: metadata say that a model made it."""
    picture = Image.fromarray((pixels * 255).round().astype(np.uint8))
    if picture.size != (job.size, job.size):
        picture = picture.resize((job.size, job.size), Image.Resampling.LANCZOS)
    if job.edit is not None and job.edit.kept is not None and job.edit.kept_mask is not None:
        kept, mask = (
            Image.frombytes(mode, picture.size, one.data)
            for mode, one in (("RGB", job.edit.kept), ("L", job.edit.kept_mask))
        )
        picture = Image.composite(picture, kept, mask)
    out = io.BytesIO()
    if job.output_format == "png":
        info = PngImagePlugin.PngInfo()
        if mark:
            info.add_itxt("XML:com.adobe.xmp", _XMP)
        picture.save(out, "PNG", compress_level=_PNG_LEVEL, pnginfo=info)
    else:
        metadata = {"xmp": _XMP.encode()} if mark else {}
        quality = _QUALITY[job.output_format] if job.compression is None else job.compression
        picture.save(out, job.output_format.upper(), quality=quality, **metadata)
    return out.getvalue()


def load(folder: Path, profile: ImageProfile) -> Any:
    """Return a pipeline that can be called. Raises `LoadError` for a folder that is unsafe or not understood.

    Raises `StartError` for causes that may pass: other programs on the GPU, a file system that does not answer.
    """
    name = check_pipeline_folder(folder)
    _check_negative_prompts(name, profile)
    on_gpu = torch.cuda.is_available()
    diffusers.logging.disable_progress_bar()
    try:
        pipe = _read(folder, name, getattr(torch, profile.dtype) if on_gpu else torch.float32)
        if on_gpu:
            _place(pipe, profile)
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"{folder.name} does not fit the GPU's free memory. Pick one: 1. offload: model (slower, and takes the "
            "package accelerate); 2. serve fewer models on this GPU; 3. a smaller model."
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # the libraries raise anything for a folder that they do not understand
        _log.exception("diffusers could not load %s", folder.name)
        if _may_pass(error):
            raise StartError(f"{folder.name} could not be read, or the GPU failed ({type(error).__name__}).") from error
        raise LoadError(
            f"{folder.name} cannot be loaded as a {name} ({type(error).__name__}; the log has the details). Check that "
            "the download is complete and that this version of diffusers knows the model."
        ) from error
    if profile.vae_tiling:
        _tile(pipe.vae)
    pipe.set_progress_bar_config(disable=True)
    read_long(pipe)
    return pipe


def _tile(vae: Any) -> None:
    """Decode in tiles. By default the tiles of most VAEs are 1024 pixels, so no image would be divided."""
    vae.enable_tiling()
    if (edge := getattr(vae, "tile_sample_min_size", 0)) > _TILE:
        vae.tile_sample_min_size, vae.tile_latent_min_size = _TILE, vae.tile_latent_min_size * _TILE // edge


def _may_pass(error: BaseException | None) -> bool:
    """Whether others had the memory, or a GPU or disk failed. A missing file has no `errno`, or ENOENT."""
    disk = isinstance(error, OSError) and error.errno not in {None, errno.ENOENT}
    library = isinstance(error, RuntimeError) and any(status in str(error) for status in _NO_MEMORY)
    return disk or library or isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)


def _check_negative_prompts(name: str, profile: ImageProfile) -> None:
    """Refuse a profile that takes negative prompts which would change nothing."""
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
    """Move the parts to the GPU, or have them moved when they are needed (with accelerate)."""
    if profile.offload == "none":
        pipe.to("cuda")
    elif profile.offload == "model":
        pipe.enable_model_cpu_offload()
    else:
        pipe.enable_sequential_cpu_offload()
