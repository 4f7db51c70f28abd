"""From the engine's images to the answer: stored as files or sent as base64, together or in the events of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine import FinishedImage, GenerationError, ImageRequest, PartialImage
from engine.stream import ImageStream
from server.api.caller import event
from server.api.images.files import ImageFiles


@dataclass(frozen=True, slots=True)
class ImageAnswer:
    """The answer to one request, whole or as events; an image that was not sent is deleted.

    `link` gives the address of a file by its name and end; None of `files` means that nothing is stored.
    """

    request: ImageRequest
    opening: Callable[[], Awaitable[ImageStream]]
    files: ImageFiles | None
    link: Callable[[str, int], str]
    base64: bool
    _unsent: list[str] = field(default_factory=list)

    @property
    def _made_as(self) -> dict[str, str]:
        asked = self.request
        return {"output_format": asked.output_format, "quality": asked.quality, "size": f"{asked.size}x{asked.size}"}

    async def whole(self) -> bytes:
        """Run to the end and return the encoded answer."""
        items: dict[int, dict[str, Any]] = {}
        steps = 0
        with self._without_leftovers():
            async with await self.opening() as images:
                async for image in images:
                    if isinstance(image, FinishedImage):
                        items[image.index] = await self._item(image)
                        steps += image.steps
            if len(items) < self.request.n:
                raise GenerationError("The model did not make all of the images. Send the request again.")
            data = [item for _, item in sorted(items.items())]
            answer = {"created": int(time.time()), "data": data, **self._made_as, "usage": _usage(len(items), steps)}
            encoded = msgspec.json.encode(answer)
            self._unsent.clear()
            return encoded

    async def events(self, *, progress: bool) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer as they come about. Closing it aborts what is not finished."""
        with self._without_leftovers():
            async with await self.opening() as images:
                async for image in images:
                    if isinstance(image, FinishedImage):
                        data = self._event(
                            "completed", index=image.index, **await self._item(image), usage=_usage(1, image.steps)
                        )
                        self._unsent.clear()  # the client may know the file: it stays, whatever becomes of the rest
                        yield data
                    elif isinstance(image, PartialImage):
                        yield self._event(
                            "partial_image", index=image.index, partial_image_index=image.number, b64_json=image.data
                        )
                    elif progress:
                        yield event("image_generation.progress", index=image.index, step=image.step, steps=image.steps)

    def _event(self, kind: str, **fields: Any) -> bytes:
        made = {"created_at": int(time.time()), **self._made_as, "background": "opaque"}
        return event(f"image_generation.{kind}", **fields, **made)

    async def _item(self, image: FinishedImage) -> dict[str, Any]:
        """Return what the answer says of this image. Raises `ApiError` where it cannot be stored."""
        item: dict[str, Any] = {"revised_prompt": self.request.prompt, "seed": image.seed}
        if self.files is not None:
            stored = await self.files.save(image.data, self.request.output_format)
            self._unsent.append(stored.name)
            item |= {"url": self.link(stored.name, stored.expires_at), "expires_at": stored.expires_at}
        if self.base64:
            item["b64_json"] = image.data  # msgspec writes bytes as base64
        return item

    @contextmanager
    def _without_leftovers(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self.files is not None:
                self.files.discard(*self._unsent)


def _usage(images: int, steps: int) -> dict[str, Any]:
    """Images are counted as such. The convention counts tokens, and strict clients insist on these fields."""
    tokens = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    details = {"text_tokens": 0, "image_tokens": 0}
    return {"images": images, "steps": steps, **tokens, "input_tokens_details": details}
