"""Pictures edited over HTTP by the real server: as the prompt says, exact outside a mask, and safe from bad files."""

from __future__ import annotations

import asyncio
import base64
import io
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest
from chat_parts import assert_error
from image_parts import IMAGE_MODEL, generate, image_events, opened, picture
from PIL import Image, ImageDraw
from shape_judge import judge

if TYPE_CHECKING:
    import httpx2
    from serving import Server

pytestmark = pytest.mark.engine

EDIT, VARY = "/v1/images/edits", "/v1/images/variations"
FIELDS = {"model": IMAGE_MODEL, "prompt": "a blue circle", "size": "256x256", "seed": "7"}


def drawn(edge: int = 256, colour: str = "red") -> Image.Image:
    image = Image.new("RGB", (edge, edge), "white")
    ImageDraw.Draw(image).ellipse((edge // 4, edge // 4, edge * 3 // 4, edge * 3 // 4), colour)
    return image


def noisy(width: int = 256, height: int = 256) -> Image.Image:
    """No two pixels alike: what is not kept exactly shows."""
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8))


def masked(box: tuple[int, int, int, int], size: tuple[int, int] = (256, 256)) -> Image.Image:
    """Transparent in a box."""
    mask = Image.new("RGBA", size, "black")
    mask.paste((0, 0, 0, 0), box)
    return mask


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


async def send(http: httpx2.AsyncClient, *files: tuple[str, bytes], path: str = EDIT, **fields: Any) -> httpx2.Response:
    data = {name: str(value) for name, value in ((FIELDS if path == EDIT else VARIED) | fields).items()}
    data = {name: value for name, value in data.items() if value != "None"}
    parts = [(name, (f"{name}.png", content, "image/png")) for name, content in (*files, ("user", b"somebody"))]
    return await http.post(path, data=data, files=parts)


VARIED = {name: value for name, value in FIELDS.items() if name != "prompt"}
RED = file_of(drawn())


async def edited(http: httpx2.AsyncClient, *files: tuple[str, bytes], **fields: Any) -> dict[str, Any]:
    response = await send(http, *(files or (("image", RED),)), **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_the_demo_gives_a_shape_another_colour_where_it_stands(http: httpx2.AsyncClient):
    answer = await edited(http)
    image = picture(answer["data"][0])
    assert judge(image) == ("blue", "circle")
    assert image.getpixel((5, 5)) == pytest.approx((255, 255, 255), abs=12)
    assert set(answer["data"][0]) == {"url", "b64_json", "revised_prompt", "seed", "expires_at"}
    assert answer["usage"]["images"] == 1
    assert 0 < answer["usage"]["steps"] < (await generate(http))["usage"]["steps"], "it begins with the picture"
    green = picture(
        (await edited(http, ("image", file_of(drawn(colour="green"), "WEBP")), prompt="a red circle"))["data"][0]
    )
    assert judge(green) == ("red", "circle")


async def test_little_strength_keeps_the_picture_and_all_of_it_does_not(http: httpx2.AsyncClient):
    def change(answer: dict[str, Any]) -> float:
        before, after = (np.asarray(one, np.float32) for one in (drawn(), picture(answer["data"][0])))
        return float(np.abs(before - after).mean())

    little, much = [await edited(http, prompt="a red circle", strength=strength) for strength in (0.15, 1)]
    assert change(little) < 8 < change(much)


@pytest.mark.parametrize("size", [256, 512])
async def test_outside_the_mask_every_pixel_is_the_pictures_own(http: httpx2.AsyncClient, size: int):
    before, box = noisy(size, size), (size // 4, size // 8, size // 2, size - 3)
    mask = masked(box, (size, size))
    answer = await edited(http, ("image", file_of(before)), ("mask", file_of(mask)), size=f"{size}x{size}")
    old, new = np.asarray(before), np.asarray(picture(answer["data"][0]))
    outside = np.asarray(mask)[:, :, 3] == 255
    assert np.array_equal(old[outside], new[outside])
    assert (old[~outside] != new[~outside]).mean() > 0.9


async def test_another_size_and_shape_are_cut_to_the_middle_and_resized_with_the_mask(http: httpx2.AsyncClient):
    before, mask = noisy(800, 512), masked((0, 0, 400, 512), (800, 512))
    answer = await edited(http, ("image", file_of(before)), ("mask", file_of(mask)), size="512x512")
    new = np.asarray(picture(answer["data"][0]))
    old = np.asarray(before.crop((144, 0, 656, 512)))
    assert np.array_equal(old[:, 256:], new[:, 256:])
    assert not np.array_equal(old[:, :256], new[:, :256])
    small = picture((await edited(http, ("image", file_of(before)), ("mask", file_of(mask))))["data"][0])
    expected = before.resize((256, 256), Image.Resampling.LANCZOS, box=(144, 0, 656, 512))
    assert np.array_equal(np.asarray(small)[:, 128:], np.asarray(expected)[:, 128:])


async def test_the_same_seed_makes_the_same_picture_alone_and_beside_others(http: httpx2.AsyncClient):
    alone = picture((await edited(http, n=2))["data"][1])
    together = await asyncio.gather(
        edited(http, seed=8), generate(http), edited(http, seed=30, strength=0.9), edited(http, seed=8)
    )
    for answer in (together[0], together[3]):
        assert answer["data"][0]["seed"] == 8
        apart = np.abs(np.asarray(alone, np.int16) - np.asarray(picture(answer["data"][0]), np.int16))
        assert apart.max() <= 1
    assert alone.tobytes() != picture(together[2]["data"][0]).tobytes()


async def test_a_variation_is_like_its_picture(http: httpx2.AsyncClient):
    response = await send(http, ("image", RED), path=VARY, strength=0.2, n=2)
    assert response.status_code == 200, response.text
    one, other = (picture(item) for item in response.json()["data"])
    assert judge(one)[1] == judge(other)[1] == "circle"
    assert one.tobytes() != other.tobytes() != drawn().tobytes()
    assert (await send(http, ("image", RED), path=VARY)).status_code == 200


async def test_a_stream_has_previews_and_the_picture(http: httpx2.AsyncClient):
    response = await send(http, ("image", RED), stream="true", partial_images=1, response_format="b64_json")
    events = image_events(response.content)
    assert [one["type"] for one in events] == ["image_edit.partial_image", "image_edit.completed"]
    whole = await edited(http)
    assert picture(events[1]).tobytes() == picture(whole["data"][0]).tobytes()


async def test_a_stream_has_the_progress_of_each_step_for_who_asks(http: httpx2.AsyncClient):
    asked = {"stream_options[include_progress]": "true"}
    events = image_events((await send(http, ("image", RED), stream="true", **asked)).content)
    steps = [(one["step"], one["steps"]) for one in events[:-1]]
    assert {one["type"] for one in events[:-1]} == {"image_edit.progress"}
    assert steps == [(step, len(steps)) for step in range(1, len(steps) + 1)]
    assert_error(await send(http, ("image", RED), **asked), 400, "invalid_value", "stream_options")


@pytest.mark.parametrize(
    ("files", "fields", "param", "code"),
    [
        ([], {}, "image", "missing_field"),
        ([("image", b"")], {}, "image", "invalid_value"),
        ([("image", RED), ("mask", RED)], {}, "mask", "invalid_value"),
        ([("image", RED), ("mask", file_of(masked((0, 0, 9, 9), (255, 256))))], {}, "mask", "invalid_value"),
        ([("image[]", RED), ("image[]", RED)], {}, "image[1]", "invalid_value"),
        ([("image", RED)], {"prompt": None}, "prompt", "missing_field"),
        ([("image", RED)], {"prompt": ""}, "prompt", "invalid_value"),
        ([("image", RED)], {"prompt": "a" * 1001}, "prompt", "invalid_value"),
        ([("image", RED)], {"prompt": "a" * 20_000}, "prompt", "invalid_value"),
        ([("image", RED)], {"n": "5"}, "n", "invalid_value"),
        ([("image", RED)], {"n": "two"}, "n", "invalid_value"),
        ([("image", RED)], {"strength": "0"}, "strength", "invalid_value"),
        ([("image", RED)], {"strength": "1.1"}, "strength", "invalid_value"),
        ([("image", RED)], {"strength": "nan"}, "strength", "invalid_value"),
        ([("image", RED)], {"size": "300x300"}, "size", "invalid_value"),
        ([("image", RED)], {"seed": "-1"}, "seed", "invalid_value"),
        ([("image", RED)], {"guided_json": "{}"}, "guided_json", "invalid_value"),
        ([("image", RED)], {"partial_images": "1"}, "partial_images", "invalid_value"),
        ([("image", RED)], {"negative_prompt": "rain"}, "negative_prompt", "invalid_value"),
        ([("image", file_of(drawn().resize((2000, 8))))], {}, "image", "invalid_value"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx2.AsyncClient, files: list[tuple[str, bytes]], fields: dict[str, Any], param: str, code: str
):
    assert_error(await send(http, *files, **fields), 400, code, param=param)


async def test_other_models_and_bodies_are_refused(http: httpx2.AsyncClient):
    assert_error(await send(http, ("image", RED), model="service-voice"), 400, "unsupported_capability", param="model")
    assert_error(await send(http, ("image", RED), model="nothing"), 404, "model_not_found", param="model")
    assert_error(await http.post(EDIT, json=FIELDS), 415, "unsupported_media_type")
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    assert_error(await http.post(EDIT, content=b"--x\r\nno", headers=form), 400, "invalid_value")
    compressed = {**form, "Content-Encoding": "gzip"}
    assert_error(await http.post(EDIT, content=b"--x", headers=compressed), 415, "unsupported_media_type")


def test_the_openai_package_edits_and_varies(sync_client: openai.OpenAI):
    mask = file_of(masked((128, 0, 256, 256)))
    common: dict[str, Any] = {"model": IMAGE_MODEL, "image": RED, "size": "256x256"}
    answer = sync_client.images.edit(**common, prompt="a blue circle", n=2, quality="high", extra_body={"seed": 7})
    assert answer.data is not None
    assert len(answer.data) == 2
    assert answer.data[0].url is not None
    assert judge(opened(base64.b64decode(answer.data[0].b64_json or ""))) == ("blue", "circle")
    within = sync_client.images.edit(**common, prompt="a blue circle", mask=mask, extra_body={"strength": 0.9})
    assert within.data is not None
    image = np.asarray(opened(base64.b64decode(within.data[0].b64_json or "")))
    assert np.array_equal(image[:, :128], np.asarray(drawn())[:, :128])
    with sync_client.images.edit(**common, prompt="a blue circle", stream=True, partial_images=1) as stream:
        assert [one.type for one in stream] == ["image_edit.partial_image", "image_edit.completed"]
    with pytest.warns(DeprecationWarning, match="deprecated"):  # OpenAI has no model for it any more
        varied = sync_client.images.create_variation(**common, n=1, response_format="b64_json")
    assert varied.data is not None
    assert opened(base64.b64decode(varied.data[0].b64_json or "")).size == (256, 256)
    with pytest.raises(openai.BadRequestError) as caught:
        sync_client.images.edit(**{**common, "image": [RED, RED]}, prompt="a blue circle")
    assert caught.value.param == "image[1]"


async def test_the_list_of_models_says_that_it_edits(http: httpx2.AsyncClient):
    models = {one["id"]: one for one in (await http.get("/v1/models")).json()["data"]}
    assert "image_editing" in models[IMAGE_MODEL]["capabilities"]


def hostile(count: int) -> list[bytes]:
    """Pictures that are cut off, changed in places, or lie about themselves."""
    rng = random.Random(23)  # noqa: S311  # the same each time
    sources = [file_of(drawn(), kind) for kind in ("PNG", "JPEG", "WEBP")]
    sources += [file_of(masked((0, 0, 99, 99))), file_of(drawn().convert("P")), file_of(noisy(9, 9), "BMP")]
    made = []
    for number in range(count):
        data = bytearray(sources[number % len(sources)])
        for _ in range(rng.randint(1, 12)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        made.append(bytes(data[: rng.randrange(8, len(data)) if number % 4 == 0 else len(data)]))
    return made


async def test_a_hundred_hostile_pictures_bring_no_failure(server: Server, http: httpx2.AsyncClient):
    files = hostile(100)

    async def status(number: int, data: bytes) -> int:
        parts = [("image", data)] if number % 2 else [("image", RED), ("mask", data)]
        return (await send(http, *parts, strength=0.1, response_format="b64_json")).status_code

    statuses = []
    for at in range(0, len(files), 10):
        statuses += await asyncio.gather(*(status(at + place, one) for place, one in enumerate(files[at : at + 10])))
    assert set(statuses) <= {200, 400}
    assert statuses.count(400) > 30
    assert judge(picture((await edited(http))["data"][0])) == ("blue", "circle")
    assert "Traceback" not in server.log()
