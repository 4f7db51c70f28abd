"""Pictures become upright RGB pixels, and nothing that a file says about itself gets it past the caps."""

import base64
import contextlib
import io
import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.errors import RequestError
from engine.media import ImageLimits, Pictures, decode_image
from engine.types import ChatRequest

LIMITS = ImageLimits()
RED, BLUE = (255, 0, 0), (0, 0, 255)


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def asking(*urls: str, salt: str = "somebody") -> ChatRequest:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "What is this?"}, *parts]
    return ChatRequest(request_id="r", model="m", messages=[{"role": "user", "content": content}], cache_salt=salt)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_that_claims(width: int, height: int) -> bytes:
    """A small file of zeros whose header promises a giant picture."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 1_000_000, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        *(("PNG", mode) for mode in ("RGB", "L", "P", "1", "RGBA", "LA", "I;16")),
        *(("JPEG", mode) for mode in ("RGB", "L", "1", "CMYK")),
        *(("WEBP", mode) for mode in ("RGB", "L", "P", "RGBA")),
    ],
)
def test_every_kind_of_pixel_becomes_rgb(form: str, mode: str):
    image = Image.new("RGB", (40, 30), "white").convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.new("I;16", (40, 30), 65535)
    decoded = decode_image(saved(image, form), LIMITS)
    assert (decoded.mode, decoded.size) == ("RGB", (40, 30))
    assert min(decoded.getpixel((20, 15))) >= 250


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_stands_upright_as_its_camera_said(orientation: int):
    upright = Image.new("RGB", (40, 20), BLUE)
    upright.paste(RED, (0, 0, 10, 10))  # red top left
    undo = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode_image(saved(upright if undo is None else upright.transpose(undo), exif=exif), LIMITS)
    assert decoded.size == (40, 20)
    assert (decoded.getpixel((2, 2)), decoded.getpixel((38, 18))) == (RED, BLUE)


def test_what_is_transparent_is_white():
    assert decode_image(saved(Image.new("RGBA", (4, 4), (0, 0, 0, 0))), LIMITS).getpixel((1, 1)) == (255, 255, 255)


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_only_the_first_frame_counts(form: str):
    first, *others = [Image.new("RGB", (8, 8), (200, shade, 0)) for shade in range(20)]
    decoded = decode_image(saved(first, form, save_all=True, append_images=others, lossless=True), LIMITS)
    assert decoded.getpixel((4, 4)) == (200, 0, 0)


@pytest.mark.parametrize(("width", "height"), [(50_000, 50_000), (6001, 6000), (12_000, 8_000), (2**31 - 1, 1)])
def test_a_bomb_is_refused_before_it_is_unpacked(width: int, height: int):
    data = png_that_claims(width, height)
    tracemalloc.start()
    with pytest.raises(RequestError):
        decode_image(data, LIMITS)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * 2**20


NO_PICTURES: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "text": lambda: b"hello",
    "svg": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "gif": lambda: saved(Image.new("P", (4, 4)), "GIF"),
    "tiff": lambda: saved(Image.new("RGB", (4, 4)), "TIFF"),
    "bmp": lambda: saved(Image.new("RGB", (4, 4)), "BMP"),
    "eps": lambda: saved(Image.new("RGB", (4, 4)), "EPS"),
    "half a jpeg": lambda: saved(Image.effect_noise((200, 200), 90).convert("RGB"), "JPEG")[:2000],
    "half a png": lambda: saved(Image.effect_noise((200, 200), 90))[:2000],
    "half a webp": lambda: saved(Image.effect_noise((200, 200), 90).convert("RGB"), "WEBP")[:2000],
    "header only": lambda: saved(Image.new("RGB", (4, 4)))[:40],
    "unpacks to less than it claims": lambda: png_that_claims(5000, 5000),
}


@pytest.mark.parametrize("name", NO_PICTURES)
def test_what_is_no_whole_picture_is_refused_in_our_words(name: str):
    with pytest.raises(RequestError, match="not a complete PNG, JPEG or WebP picture"):
        decode_image(NO_PICTURES[name](), LIMITS)


@given(st.binary(max_size=64), st.integers(0, 400))
@settings(max_examples=200)
def test_damage_anywhere_is_a_picture_or_a_refusal(noise: bytes, place: int):
    data = bytearray(saved(Image.linear_gradient("L").resize((32, 32)).convert("RGB"), "JPEG"))
    data[place : place + len(noise)] = noise
    with contextlib.suppress(RequestError):  # anything else would be a 500
        assert decode_image(bytes(data), LIMITS).mode == "RGB"


def test_a_picture_that_is_nearly_a_line_is_refused():
    with pytest.raises(RequestError, match="3000 x 10"):
        decode_image(saved(Image.new("RGB", (3000, 10))), LIMITS)


async def test_errors_name_the_part_and_never_repeat_it():
    pictures = Pictures(ImageLimits(max_bytes=2000))
    good = uri(saved(Image.new("RGB", (8, 8))))
    for url, words in [
        ("data:image/png;base64,Zwieback!", "not valid base64"),
        ("data:text/plain,Zwieback", "must start with"),
        ("https://zwieback.example/a.png", "not fetched"),
        ("Zwieback", "not fetched"),
        (uri(b"Zwieback"), "not a complete"),
        (uri(b"x" * 2001), "at most 2000 bytes"),
        ("data:image/png;base64," + "A" * 10_000, "at most 2000 bytes"),
    ]:
        with pytest.raises(RequestError, match=words) as caught:
            async with pictures.decoded(asking(good, url), most=8):
                pass
        assert caught.value.param == "messages[0].content[2]"
        assert "wieback" not in caught.value.message
    pictures.close()


async def test_pixels_replace_the_parts_and_the_request_itself_stays_as_it_is():
    pictures = Pictures(LIMITS)
    request = asking(
        uri(saved(Image.new("RGB", (8, 8), RED))), uri(saved(Image.new("RGB", (8, 8), BLUE), "WEBP"), "webp")
    )
    async with pictures.decoded(request, most=2) as seen:
        content = seen.messages[0]["content"]
        assert [part["type"] for part in content] == ["text", "image_pil", "image_pil"]
        assert content[1]["image_pil"].getpixel((4, 4)) == RED
        assert content[1]["uuid"] != content[2]["uuid"]
    assert [part["type"] for part in request.messages[0]["content"]] == ["text", "image_url", "image_url"]
    pictures.close()


async def test_a_picture_has_another_name_for_every_key():
    pictures = Pictures(LIMITS)
    url = uri(saved(Image.new("RGB", (8, 8), RED)))
    names = []
    for salt in ["one", "two", "one"]:
        async with pictures.decoded(asking(url, salt=salt), most=1) as seen:
            names.append(seen.messages[0]["content"][1]["uuid"])
    assert names[0] == names[2] != names[1]
    pictures.close()


async def test_too_many_pictures_and_too_many_pixels_together_are_refused():
    pictures = Pictures(ImageLimits(max_megapixels=0.01))
    url = uri(saved(Image.new("RGB", (100, 100))))
    with pytest.raises(RequestError, match="at most 2 pictures"):
        async with pictures.decoded(asking(url, url, url), most=2):
            pass
    with pytest.raises(RequestError, match=r"0\.02 megapixels together"):
        async with pictures.decoded(asking(url, url, url), most=8):
            pass
    pictures.close()


async def test_decoding_steps_back_for_everything_else():
    pictures = Pictures(LIMITS)
    assert await pictures._in_thread(os.nice, 0) == min(19, os.nice(0) + 10)
    pictures.close()
