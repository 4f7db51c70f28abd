"""What an image request is answered with: the whole answer, and the events of a stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine import FinishedImage, ImageProgress, ImageRequest, PartialImage
    from server.errors import ApiError

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
