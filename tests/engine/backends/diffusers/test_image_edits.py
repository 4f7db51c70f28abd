"""Edits in the service and in front of it: batched, cancelled and refused like images of text, exact outside a mask."""

from __future__ import annotations

import io
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from image_studio import Studio, apart, opened
from PIL import Image
from test_image_model import images, load, made, request

from engine.backends.diffusers.model import ImageModel, check_edit, prepared, weight_of
from engine.errors import RequestError, UnsupportedCapabilityError
from engine.types import EditRequest, FinishedImage, ImageProgress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from engine.types import Edit

FAMILIES = ("z_image", "sdxl", "qwen_image", "flux2_klein")
CLASSES = dict(
    zip(
        FAMILIES,
        ("ZImagePipeline", "StableDiffusionXLPipeline", "QwenImagePipeline", "Flux2KleinPipeline"),
        strict=True,
    )
)


def noisy(width: int = 256, height: int = 256) -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8))


def mask(width: int = 256, height: int = 256) -> Image.Image:
    """The left half may change."""
    plane = Image.new("L", (width, height))
    plane.paste(255, (0, 0, width // 2, height))
    return plane


def asked(strength: float | None = None, *, masked: bool = False, pictures: int = 1) -> EditRequest:
    names = tuple(f"image[{index}]" for index in range(pictures))
    return EditRequest(pictures=(b"",) * pictures, names=names, mask=b"" if masked else None, strength=strength)


def edit(family: str = "z_image", strength: float | None = None, *, masked: bool = False, pictures: int = 1) -> Edit:
    files = [noisy()] * pictures + [mask()] * masked
    wanted = asked(strength, masked=masked, pictures=pictures)
    return prepared(files, wanted, CLASSES[family], edge=64, size=256)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_is_the_same_step_by_step_and_as_a_whole_request_and_exact_outside_its_mask(
    family: str, folders: Callable[[str], Path]
):
    steps, requests = (Studio(folders(family), {"batching": batching}) for batching in ("steps", "requests"))
    for studio in (steps, requests):
        studio.submit(1, edit=edit(family, masked=True))
        studio.submit(2, edit=edit(family), seed=2)
        studio.submit(3)
        studio.run()
    for number in (1, 2, 3):
        assert apart(steps.file(number), requests.file(number)) <= 1
    new = np.asarray(opened(steps.file(1)))
    assert np.array_equal(new[:, 128:], np.asarray(noisy())[:, 128:])
    assert not np.array_equal(new[:, :128], np.asarray(noisy())[:, :128])


def test_edits_join_and_leave_between_steps_and_leave_out_what_the_picture_stands_for(
    folders: Callable[[str], Path],
):
    studio = Studio(folders("z_image"), {})
    studio.submit(1, edit=edit(strength=0.5), quality="hd")
    studio.submit(2)
    studio.service.step()
    studio.service.cancel(1)
    studio.submit(3, edit=edit(strength=0.5))
    studio.run()
    assert studio.steps(1) == [(1, 3)]
    assert studio.steps(2)[-1] == (4, 4)
    assert studio.steps(3) == [(1, 2), (2, 2)]
    assert studio.recorder.events[3][-1].steps == 2


def test_a_whole_request_for_edits_ends_early_when_nobody_waits_for_it(folders: Callable[[str], Path]):
    studio = Studio(folders("z_image"), {"batching": "requests"})
    studio.recorder.when_polled = lambda: studio.service.cancel(1)
    studio.submit(1, edit=edit(masked=True))
    studio.run()
    assert len(studio.steps(1)) == 1
    studio.recorder.when_polled = lambda: None
    studio.submit(2)
    studio.run()
    assert studio.file(2)


def test_what_a_model_looks_at_takes_room_in_a_batch(folders: Callable[[str], Path]):
    studio = Studio(folders("flux2_klein"), {})
    for number in range(3):  # of text alone there is room for four
        studio.submit(number, edit=edit("flux2_klein"), weight=weight_of(asked(), CLASSES["flux2_klein"]))
    studio.service.step()
    assert [len(studio.steps(number)) for number in range(3)] == [1, 1, 0]


@pytest.mark.parametrize("name", ["StableDiffusion3Pipeline", "FluxPipeline", "StableDiffusionPipeline"])
def test_other_families_are_refused_by_name(name: str):
    with pytest.raises(UnsupportedCapabilityError, match=f"it is a {name.removesuffix('Pipeline')},") as caught:
        check_edit(asked(), name)
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("family", "wanted", "param", "said"),
    [
        ("z_image", asked(pictures=2), "image[1]", "takes one picture in a request. Leave the others out"),
        ("flux2_klein", asked(pictures=5), "image[4]", "takes at most 4 pictures in a request"),
        ("flux2_klein", asked(0.5, pictures=2), "strength", "needs a single picture"),
        ("flux2_klein", asked(masked=True, pictures=2), "mask", "needs a single picture"),
    ],
)
def test_what_a_family_cannot_do_is_named(family: str, wanted: EditRequest, param: str, said: str):
    with pytest.raises(RequestError, match=said) as caught:
        check_edit(wanted, CLASSES[family])
    assert caught.value.param == param


def test_flux2_klein_is_given_whole_pictures_of_bounded_size():
    files = [noisy(900, 300), noisy(100, 64)]
    seen = prepared(files, asked(pictures=2), CLASSES["flux2_klein"], edge=256, size=256).pictures
    assert [(one.width, one.height) for one in seen] == [(443, 147), (100, 64)]
    for size in ((63, 200), (1000, 100)):
        with pytest.raises(RequestError, match=f"this one is {size[0]} x {size[1]}") as caught:
            prepared([noisy(*size)], asked(), CLASSES["flux2_klein"], edge=256, size=256)
        assert caught.value.param == "image[0]"


@pytest.fixture(scope="module")
async def model(folders: Callable[[str], Path]) -> AsyncIterator[ImageModel]:
    it = await load(folders("z_image"))
    yield it
    await it.shutdown()


def file_of(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def of_pictures(**fields: Any) -> Any:
    wanted = EditRequest(pictures=(file_of(noisy()),), names=("image",), strength=fields.pop("strength", None))
    return request(edit=wanted, **fields)


async def test_an_edit_through_the_worker_is_the_same_for_the_same_seed_and_takes_its_turn(model: ImageModel):
    one, other = [await made(model, of_pictures(seed=3, n=2)) for _ in range(2)]
    assert max(apart(one[index].data, other[index].data) for index in range(2)) <= 1
    assert apart(one[0].data, one[1].data) > 1, "the comparison would notice nothing"


async def test_who_leaves_an_edit_frees_its_place_at_once(model: ImageModel):
    async with aclosing(images(model, of_pictures(quality="hd", size=1024, n=4, strength=1))) as events:
        assert isinstance(await anext(events), ImageProgress)
        assert model.admission.running == 1
    assert (model.admission.running, model.admission.waiting) == (0, 0)
    assert model._prepared.load.used == 0
    assert isinstance((await made(model, of_pictures(owner="b")))[0], FinishedImage)


async def test_a_picture_that_is_none_is_named_and_holds_nothing(model: ImageModel):
    broken = EditRequest(pictures=(file_of(noisy())[:5000],), names=("image",))
    with pytest.raises(RequestError, match="not a complete PNG") as caught:
        await made(model, request(edit=broken))
    assert caught.value.param == "image"
    assert model._prepared.load.used == 0
