"""From the engine's images to the answer: stored as files or sent as base64, together or in the events of a stream."""

from __future__ import annotations

import asyncio
import binascii
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from engine import FinishedImage, GenerationError, ImageProgress, ImageRequest, PartialImage
from engine.stream import ImageStream
from server.api.images.files import ImageFiles
from server.errors import ApiError

_PIECE_BYTES = 3 * 2**16  # whole groups of base64
_encode = msgspec.json.Encoder().encode
Item = dict[str, Any]


class ImageAnswer:
    """Says in the wire's words what was made for one request. Base64 comes as `Raw`: JSON strings, made elsewhere."""

    def __init__(self, request: ImageRequest) -> None:
        self._prompt = request.prompt
        self._made_as = {
            "output_format": request.output_format,
            "quality": request.quality,
            "size": f"{request.size}x{request.size}",
        }

    def item(self, image: FinishedImage) -> Item:
        """Return what is said of an image beside where it is."""
        return {"revised_prompt": self._prompt, "seed": image.seed}

    def whole(self, items: Mapping[int, Item], steps: int) -> bytes:
        """Encode the answer that is not streamed; `steps` were taken for all images together."""
        data = [item for _, item in sorted(items.items())]
        answer = {"created": int(time.time()), "data": data, **self._made_as, "usage": _usage(len(items), steps)}
        return _encode(answer)

    def progress(self, progress: ImageProgress) -> bytes:
        """Encode how far an image is."""
        fields = {"index": progress.index, "step": progress.step, "steps": progress.steps}
        return _event("image_generation.progress", **fields)

    def partial(self, partial: PartialImage, content: msgspec.Raw) -> bytes:
        """Encode a preview."""
        fields = {"index": partial.index, "partial_image_index": partial.number, "b64_json": content}
        return _event("image_generation.partial_image", **fields, **self._of_events())

    def completed(self, image: FinishedImage, item: Item) -> bytes:
        """Encode a finished image; `item` as in the whole answer."""
        fields = {"index": image.index, **item, "usage": _usage(1, image.steps)}
        return _event("image_generation.completed", **fields, **self._of_events())

    def _of_events(self) -> dict[str, Any]:
        return {"created_at": int(time.time()), **self._made_as, "background": "opaque"}


def failed(error: ApiError) -> bytes:
    """Encode what a stream ends with when it fails after its start."""
    return _event("error", error=error.body())


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _usage(images: int, steps: int) -> dict[str, Any]:
    """Images are counted as such. The convention counts tokens, and strict clients insist on these fields."""
    tokens = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    details = {"text_tokens": 0, "image_tokens": 0}
    return {"images": images, "steps": steps, **tokens, "input_tokens_details": details}


class Delivery:
    """Puts finished images where the client wants them. Use as `async with`: what is not `sent` by then is deleted.

    `link` gives the address of a file by its name and end; None of `files` means that nothing is stored.
    """

    def __init__(
        self, answer: ImageAnswer, *, files: ImageFiles | None, link: Callable[[str, int], str], base64: bool
    ) -> None:
        self.answer = answer
        self._files = files
        self._link = link
        self._base64 = base64
        self._unsent: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._files is not None:
            self._files.discard(*self._unsent)
        self._unsent.clear()

    async def item(self, image: FinishedImage, request: ImageRequest) -> Item:
        """Return what the answer says of this image. Raises `ApiError` where it cannot be stored."""
        item = self.answer.item(image)
        if self._files is not None:
            stored = await self._files.save(image.data, request.output_format)
            self._unsent.append(stored.name)
            item |= {"url": self._link(stored.name, stored.expires_at), "expires_at": stored.expires_at}
        if self._base64:
            item["b64_json"] = await as_base64(image.data)
        return item

    def sent(self) -> None:
        """From here on the client may know the files so far: they stay, whatever becomes of the rest."""
        self._unsent.clear()


async def whole(opening: Awaitable[ImageStream], delivery: Delivery, request: ImageRequest) -> bytes:
    """Run to the end and return the encoded answer."""
    items: dict[int, Item] = {}
    steps = 0
    async with delivery, await opening as events:
        async for event in events:
            if isinstance(event, FinishedImage):
                items[event.index] = await delivery.item(event, request)
                steps += event.steps
        if len(items) < request.n:
            raise GenerationError("The model did not make all of the images. Send the request again.")
        body = delivery.answer.whole(items, steps)
        delivery.sent()
        return body


async def streamed(
    opening: Callable[[], Awaitable[ImageStream]], delivery: Delivery, request: ImageRequest, *, progress: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the events of the answer as they come about. Closing it aborts what is not finished."""
    async with delivery, await opening() as events:
        async for event in events:
            if isinstance(event, FinishedImage):
                data = delivery.answer.completed(event, await delivery.item(event, request))
                delivery.sent()
                yield data
            elif isinstance(event, PartialImage):
                yield delivery.answer.partial(event, await as_base64(event.data))
            elif progress:
                yield delivery.answer.progress(event)


async def as_base64(data: bytes) -> msgspec.Raw:
    """Return a JSON string. In pieces with turns for others between: on a thread it would hold the interpreter."""
    pieces = [b'"']
    for start in range(0, len(data), _PIECE_BYTES):
        pieces.append(binascii.b2a_base64(data[start : start + _PIECE_BYTES], newline=False))
        await asyncio.sleep(0)
    return msgspec.Raw(b"".join([*pieces, b'"']))
