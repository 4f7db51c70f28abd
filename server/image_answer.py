"""From the engine's images to the answer: where each one goes, as a file or as base64, whole or streamed.

What the answer looks like is schemas/images_answer.py's.
"""

from __future__ import annotations

import asyncio
import binascii
from typing import TYPE_CHECKING, Self

import msgspec

from engine import FinishedImage, GenerationError, PartialImage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from types import TracebackType

    from engine import ImageRequest
    from engine.stream import ImageStream
    from server.image_files import ImageFiles
    from server.schemas.images_answer import ImageAnswer, Item

_PIECE_BYTES = 3 * 2**16  # whole groups of base64


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
