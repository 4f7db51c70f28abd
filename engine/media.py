"""Pictures that clients send: from `data:` URIs or files to pixels, within limits that are checked first.

Decoding has its own threads. Nothing is fetched here: a server that allows addresses passes in a `fetch`.
"""

import asyncio
import base64
import binascii
import hashlib
import io
import os
import re
import warnings
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from PIL import Image, ImageOps

from engine.errors import RequestError
from engine.types import ChatRequest

_T = TypeVar("_T")
Decode = Callable[[bytes, "ImageLimits"], Image.Image]

FORMATS = ("PNG", "JPEG", "WEBP")
# More than any camera makes. Some models resize pictures that are nearly lines to nothing, or to giants.
LONGEST_TO_SHORTEST = 200
_DATA_URI = re.compile(r"data:image/[a-z.+-]{1,20};base64,", re.IGNORECASE)
_DECODER_THREADS = 2
_NICE = 10
_BAND_ROWS = 256
# In real files, progressive JPEGs have about ten scans, and rich metadata makes some dozen marks or chunks.
_MOST_SCANS = 64
_MOST_MARKS = 2000
_JPEG_MARKS = [bytes([0xFF, kind]) for kind in (*range(0xE0, 0xF0), 0xFE, 0xC4, 0xDB)]

# Our own limit is checked before a pixel is decoded; Pillow's warning would only go to the log.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", module=r"PIL\.")  # one line per odd tag: a file may hold 65,535


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of pictures.

    `fetch` returns the bytes behind an address, or raises `RequestError` without a `param`. None: `data:` URIs only.
    """

    max_bytes: int = 10 * 2**20
    max_megapixels: float = 36
    fetch: Callable[[str], Awaitable[bytes]] | None = None


@dataclass(frozen=True, slots=True)
class PixelLoad:
    """Pixels of pictures in memory, the most that there may be, and requests that wait for some to be freed."""

    used: int
    limit: int
    waiting: int


class PixelBudget:
    """Limits the pixels of all requests together; owners take turns. Belongs to one event loop.

    Pixels live from their decoding until the model's own processor has made features of them. Three bytes each, and as
    many again while they are decoded and processed.
    """

    def __init__(self, pixels: int) -> None:
        self._most = self._free = pixels
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}  # the owner whose turn it is comes first

    @property
    def load(self) -> PixelLoad:
        return PixelLoad(self._most - self._free, self._most, sum(map(len, self._waiting.values())))

    @asynccontextmanager
    async def taken(self, owner: str, pixels: int) -> AsyncIterator[None]:
        """Wait until so many pixels are free; they are given back at the end of the block."""
        pixels = min(pixels, self._most)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((pixels, turn))
        self._dispatch()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():  # else it got none, and may have held up others
                self._free += pixels
            self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting:
            owner, queue = next(iter(self._waiting.items()))
            pixels, turn = queue[0]
            if pixels > self._free and not turn.cancelled():
                return
            queue.popleft()
            del self._waiting[owner]
            if queue:
                self._waiting[owner] = queue  # behind the other owners
            if not turn.cancelled():
                self._free -= pixels
                turn.set_result(None)


class Pictures:
    """Turns the pictures of requests into pixels. One for all models, made in an event loop."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._most_pixels = int(2 * limits.max_megapixels * 1e6)
        self._budget = PixelBudget(self._most_pixels)
        # On Linux each thread has its own niceness: decoding a picture takes half a second, and must not delay tokens
        self._threads = ThreadPoolExecutor(_DECODER_THREADS, "pictures", initializer=os.nice, initargs=(_NICE,))

    @asynccontextmanager
    async def decoded(self, request: ChatRequest, *, most: int) -> AsyncIterator[ChatRequest]:
        """Yield the request with `image_pil` parts in the place of `image_url` parts, as vLLM's renderer takes them.

        Leave the block as soon as they are rendered: other requests wait for the pixels. The model takes `most`
        pictures. Raises `RequestError` naming the part.
        """
        places = image_places(request)
        if not places:
            yield request
            return
        paths = [path for _, _, path in places]
        if len(places) > most:
            raise RequestError(
                f"This model takes at most {most} pictures per request, and these messages hold {len(places)}. Leave "
                "some out, or ask about them one after the other.",
                param=paths[most],
            )
        urls = [request.messages[position]["content"][index]["image_url"]["url"] for position, index, _ in places]
        # Before its turn: a slow server must not keep other requests waiting.
        files = await asyncio.gather(*map(self._file, urls, paths))
        pixels = await self._count(files, paths)
        images: list[Image.Image] = []
        async with self._budget.taken(request.owner, pixels):
            try:
                messages = [dict(message) for message in request.messages]
                for (position, index, path), file in zip(places, files, strict=True):
                    with _naming(path):
                        image, name = await self._in_thread(self._read, file, request.cache_salt or "")
                    images.append(image)
                    content = messages[position]["content"] = list(messages[position]["content"])
                    content[index] = {"type": "image_pil", "image_pil": image, "uuid": name}
                yield replace(request, messages=messages)
            finally:
                for image in images:
                    image.close()  # frees its pixels, whatever still refers to it

    async def made_of(
        self, owner: str, files: Sequence[tuple[str, bytes, Decode]], make: Callable[[Sequence[Image.Image]], _T]
    ) -> _T:
        """Decode `files` (name in errors, bytes, decoder) and return `make(images)`, which runs on the same threads.

        Raises `RequestError` naming the file.
        """
        pixels = await self._count([data for _, data, _ in files], [name for name, _, _ in files])
        images: list[Image.Image] = []
        async with self._budget.taken(owner, pixels):
            try:
                for name, data, decode in files:
                    with _naming(name):
                        images.append(await self._in_thread(decode, data, self._limits))
                return await self._in_thread(make, images)
            finally:
                for image in images:
                    image.close()

    @property
    def load(self) -> PixelLoad:
        return self._budget.load

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _file(self, url: str, path: str) -> bytes:
        """Return the bytes of a `data:` URI, or those behind an address."""
        if url[:5].lower() == "data:":
            with _naming(path):
                return await self._in_thread(_from_data_uri, url, self._limits.max_bytes)
        if self._limits.fetch is None:
            raise RequestError(
                "Pictures are not fetched from addresses here. Send the picture itself, as a URI that starts with "
                "`data:image/png;base64,` (or jpeg, or webp).",
                param=path,
            )
        with _naming(path):
            return await self._limits.fetch(url)

    def _read(self, data: bytes, salt: str) -> tuple[Image.Image, str]:
        """Return the pixels, and the name of their features in vLLM's caches.

        The name depends on the request's cache salt: else the time of an answer would show which pictures others have
        sent.
        """
        return decode_image(data, self._limits), hashlib.sha256(salt.encode() + b"\0" + data).hexdigest()

    async def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _count(self, files: Sequence[bytes], paths: Sequence[str]) -> int:
        """Return how many pixels they have together. Raises `RequestError` for more than one request may have."""
        pixels = 0
        for file, path in zip(files, paths, strict=True):
            with _naming(path):
                pixels += await self._in_thread(count_pixels, file, self._limits)
            if pixels > self._most_pixels:
                raise RequestError(
                    f"The pictures of one request may have {2 * self._limits.max_megapixels:g} megapixels together."
                    " Make them smaller, or send fewer.",
                    param=path,
                )
        return pixels


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Set `param` of a `RequestError` raised in the block to the path of its part."""
    try:
        yield
    except RequestError as error:
        raise RequestError(error.message, param=path) from error.__cause__


def image_places(request: ChatRequest) -> list[tuple[int, int, str]]:
    """Return (message, part, name in errors) of each picture in the order of the conversation."""
    found = [
        (position, index)
        for position, message in enumerate(request.messages)
        if isinstance(message.get("content"), list)
        for index, part in enumerate(message["content"])
        if part.get("type") == "image_url"
    ]
    names = request.image_paths or [f"messages[{position}].content[{index}]" for position, index in found]
    return [(*place, name) for place, name in zip(found, names, strict=True)]


def count_pixels(data: bytes, limits: ImageLimits) -> int:
    """Return how many pixels a picture has; only its header is decoded. Raises like `decode_image`."""
    with _opened(data, limits) as image:
        return image.width * image.height


def decode_image(data: bytes, limits: ImageLimits) -> Image.Image:
    """Decode the first frame, upright (EXIF orientation) and in RGB, transparent parts white. Blocking.

    Raises `RequestError` without a `param` for what is not a picture, is cut off, or is too large.
    """
    with _opened(data, limits) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        rgb = _plain_rgb(image)
        image.close()
        return rgb


def decode_mask(data: bytes, limits: ImageLimits) -> Image.Image:
    """Decode a mask like `decode_image`: 255 where it is more transparent than not, else 0.

    Raises `RequestError` for one in which nothing can be transparent.
    """
    with _opened(data, limits) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        if not image.has_transparency_data:
            raise RequestError(
                "The mask has no transparency. Send a PNG or WebP that is transparent where the picture is to change."
            )
        mask = Image.new("L", image.size)
        for box in _bands(image):
            opacity = image.crop(box).convert("RGBA").getchannel("A")
            mask.paste(opacity.point(lambda value: 255 if value < 128 else 0), box)
        image.close()
        return mask


@contextmanager
def _opened(data: bytes, limits: ImageLimits) -> Iterator[Image.Image]:
    """Open a picture whose header is within the limits; errors within the block become `RequestError`s."""
    if len(data) > limits.max_bytes:
        raise _too_many_bytes(limits.max_bytes)
    try:
        _check_structure(data)
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image, limits)
            yield image
    except RequestError:
        raise
    except Image.DecompressionBombError as error:  # Pillow checks before we can
        raise RequestError(
            f"A picture may have at most {limits.max_megapixels:g} megapixels, and this one has far more. Make it"
            " smaller."
        ) from error
    except Exception as error:  # a decoder may fail in any way on hostile bytes
        raise RequestError(
            "This is not a complete PNG, JPEG or WebP picture. Open it in a picture viewer to see whether it is "
            "damaged, or save it again in one of these formats."
        ) from error


def _from_data_uri(uri: str, max_bytes: int) -> bytes:
    found = _DATA_URI.match(uri)
    if found is None:
        raise RequestError("A picture's URI must start with `data:image/png;base64,` (or jpeg, or webp).")
    text = uri[found.end() :]
    if len(text) > max_bytes * 4 // 3 + 4:
        raise _too_many_bytes(max_bytes)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError("The picture is not valid base64.") from error


def _check_structure(data: bytes) -> None:
    """Refuse small files that take minutes to decode: scans of a JPEG, and chunks of a PNG, cost time without size."""
    slow = False
    if data.startswith(b"\xff\xd8"):
        # Within the data of a scan 0xFF is followed by zero or a restart mark, so these are nearly always marks.
        slow = data.count(b"\xff\xda") > _MOST_SCANS or sum(map(data.count, _JPEG_MARKS)) > _MOST_MARKS
    elif data.startswith(b"\x89PNG"):
        slow = _png_chunks(data) > _MOST_MARKS or data.count(b"iCCP") > 1
    if slow:
        raise RequestError("This picture's file has far too many parts. Save it again, as a plain PNG or JPEG.")


def _png_chunks(data: bytes) -> int:
    """Count the chunks of a PNG without pixels or under 1 KiB, and stop counting above the limit."""
    place, found = 8, 0
    while place + 8 <= len(data) and found <= _MOST_MARKS:
        found += data[place + 4 : place + 8] != b"IDAT" or data[place : place + 4] < b"\0\0\4\0"
        place += 12 + int.from_bytes(data[place : place + 4], "big")
    return found


def _check_size(image: Image.Image, limits: ImageLimits) -> None:
    width, height = image.size
    if width * height > limits.max_megapixels * 1e6:
        raise RequestError(
            f"A picture may have at most {limits.max_megapixels:g} megapixels, and this one has "
            f"{width * height / 1e6:.1f}. Make it smaller."
        )
    if max(width, height) > LONGEST_TO_SHORTEST * min(width, height):
        raise RequestError(
            f"A picture's longer side may be at most {LONGEST_TO_SHORTEST} times its shorter side, and this one is "
            f"{width} x {height}. Cut it into pieces."
        )


def _plain_rgb(image: Image.Image) -> Image.Image:
    """Convert band by band: whole copies on the way would take five times the memory of the result."""
    rgb = Image.new("RGB", image.size)
    for box in _bands(image):
        rgb.paste(_band_in_rgb(image.crop(box)), box)
    return rgb


def _bands(image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    for top in range(0, image.height, _BAND_ROWS):
        yield 0, top, image.width, min(top + _BAND_ROWS, image.height)


def _band_in_rgb(band: Image.Image) -> Image.Image:
    if band.mode.startswith("I"):  # 16 bits of grey: Pillow's own conversion would cut them off at 255
        return band.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if not band.has_transparency_data:
        return band.convert("RGB")
    layer = band.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _too_many_bytes(max_bytes: int) -> RequestError:
    return RequestError(f"A picture may have at most {max_bytes} bytes. Save it smaller, or as JPEG or WebP.")
