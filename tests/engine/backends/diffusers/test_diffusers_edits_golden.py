"""Images made of pictures are those of the family's own pipelines for it: at most 1/255 apart in any pixel."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import diffusers
import numpy as np
import pytest
from golden_parts import CLOSE, OURS, Image, apart, by_steps, guidance_of, guided
from msgspec import structs
from PIL import Image as Pictures

from engine.backends.diffusers.denoising import seeded
from engine.types import Edit, Picture

if TYPE_CHECKING:
    from collections.abc import Callable

# Of each family, the pipeline that begins with a picture, and the one that also has a mask.
PIPELINES = {
    "z_image": (diffusers.ZImageImg2ImgPipeline, diffusers.ZImageInpaintPipeline),
    "sdxl": (diffusers.StableDiffusionXLImg2ImgPipeline, diffusers.StableDiffusionXLInpaintPipeline),
    "qwen_image": (diffusers.QwenImageImg2ImgPipeline, diffusers.QwenImageInpaintPipeline),
    "flux2_klein": (diffusers.Flux2KleinPipeline, diffusers.Flux2KleinInpaintPipeline),
}
BEGINNERS = [family for family in PIPELINES if family != "flux2_klein"]


def picture(seed: int, width: int = 64, height: int = 64) -> Picture:
    """Colours that run into each other, of which none is like the next."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    return _of(Pictures.fromarray(small).resize((width, height), Pictures.Resampling.BICUBIC))


def mask(edge: int = 64) -> Picture:
    """The lower right part, but for a hole, may change."""
    plane = np.zeros((edge, edge), np.uint8)
    plane[edge // 3 :, edge // 4 :] = 255
    plane[edge // 2 : edge // 2 + 8, edge // 2 :] = 0
    return _of(Pictures.fromarray(plane))


def _of(image: Pictures.Image) -> Picture:
    return Picture(image.width, image.height, image.tobytes())


def _opened(one: Picture, mode: str = "RGB") -> Pictures.Image:
    return Pictures.frombytes(mode, (one.width, one.height), one.data)


def by_pipeline(pipe: Any, family: str, image: Image) -> np.ndarray:
    """The same image by the pipeline that its authors made for it."""
    edit = image.edit
    assert edit is not None
    kind = PIPELINES[family][edit.mask is not None]
    extra = {"add_watermarker": False} if family == "sdxl" else {}
    own = kind(**pipe.components, **extra)
    own.set_progress_bar_config(disable=True)
    pictures = [_opened(one) for one in edit.pictures]
    more: dict[str, Any] = {"image": pictures if family == "flux2_klein" and edit.mask is None else pictures[0]}
    if edit.mask is not None:
        more["mask_image"] = _opened(edit.mask, "L")
    if edit.strength is not None:
        more["strength"] = edit.strength
    if kind is not diffusers.StableDiffusionXLImg2ImgPipeline:
        more |= {"height": image.edge, "width": image.edge}
    made = own(
        prompt=image.prompt,
        num_inference_steps=image.steps,
        generator=seeded(image.seed),
        output_type="np",
        **more,
        **guided(own, image),
    )
    return made.images[0]


def check(pipe: Any, family: str, images: list[Image]) -> None:
    made = by_steps(pipe, images)
    wanted = [by_pipeline(pipe, family, image) for image in images]
    differences = [apart(one, other) for one, other in zip(made, wanted, strict=True)]
    print(f"\n{family}: {max(differences) * 255:.0f}/255 apart at most")  # noqa: T201  # the measurement
    assert max(differences) <= CLOSE


def of(family: str, seed: int = 5, **more: Any) -> Image:
    return Image(OURS, seed, 6, guidance_of(family), **more)


@pytest.mark.parametrize("strength", [0.35, 1.0])
@pytest.mark.parametrize("family", BEGINNERS)
def test_an_image_that_begins_with_a_picture_is_the_pipelines(
    family: str, strength: float, pipeline: Callable[[str], Any]
):
    check(pipeline(family), family, [of(family, edit=Edit((picture(1),), strength))])


@pytest.mark.parametrize("strength", [0.35, 1.0])
@pytest.mark.parametrize("family", PIPELINES)
def test_an_image_with_a_mask_is_the_pipelines(family: str, strength: float, pipeline: Callable[[str], Any]):
    check(pipeline(family), family, [of(family, edit=Edit((picture(1),), strength, mask()))])


@pytest.mark.parametrize("scheduler", [diffusers.HeunDiscreteScheduler, diffusers.PNDMScheduler])
def test_schedules_with_more_entries_than_steps_begin_where_the_pipeline_does(
    scheduler: Any, pipeline: Callable[[str], Any]
):
    pipe = pipeline("sdxl")
    usual = pipe.scheduler
    pipe.scheduler = scheduler.from_config(usual.config)
    check(pipe, "sdxl", [of("sdxl", edit=Edit((picture(1),), 0.6)), of("sdxl", edit=Edit((picture(1),), 0.6, mask()))])
    pipe.scheduler = usual


def test_flux2_klein_sees_pictures_of_any_shape_as_the_pipeline_does(pipeline: Callable[[str], Any]):
    one, wide = picture(1), picture(2, 150, 70)
    check(pipeline("flux2_klein"), "flux2_klein", [of("flux2_klein", edit=Edit((one,)))])
    check(pipeline("flux2_klein"), "flux2_klein", [of("flux2_klein", edit=Edit((wide, one)))])
    guided_ = replace(of("flux2_klein", edit=Edit((wide,))), guidance=3.0)
    check(pipeline("flux2_klein"), "flux2_klein", [guided_])


@pytest.mark.parametrize("family", PIPELINES)
def test_edits_and_images_of_text_alone_share_their_steps(family: str, pipeline: Callable[[str], Any]):
    pipe = pipeline(family)
    reads = None if family == "flux2_klein" else 0.5
    images = [
        of(family, edit=Edit((picture(1),), 0.8, mask())),
        replace(of(family, 6), prompt="fog", joins=1),
        replace(of(family, 7, edit=Edit((picture(3),), reads)), steps=4, joins=1),
    ]
    together = by_steps(pipe, images)
    for image, made in zip(images, together, strict=True):
        assert apart(made, by_steps(pipe, [replace(image, joins=0)])[0]) <= CLOSE
    assert apart(together[0], by_pipeline(pipe, family, images[0])) <= CLOSE
    assert apart(together[2], by_pipeline(pipe, family, images[2])) <= CLOSE


@pytest.mark.parametrize("family", PIPELINES)
def test_the_tiny_pipelines_see_the_picture_the_mask_and_the_strength(family: str, pipeline: Callable[[str], Any]):
    """Otherwise the comparisons above would prove nothing."""
    pipe = pipeline(family)
    edit = Edit((picture(1),), 0.6, mask())
    plain = by_pipeline(pipe, family, of(family, edit=edit))
    others = [
        structs.replace(edit, pictures=(picture(9),)),
        structs.replace(edit, mask=_of(Pictures.new("L", (64, 64), 255))),
    ]
    others.append(structs.replace(edit, strength=0.9))
    for other in others:
        assert apart(plain, by_pipeline(pipe, family, of(family, edit=other))) > 4 * CLOSE
