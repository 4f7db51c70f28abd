"""What a request to edit pictures becomes: pixels in the sizes that a worker needs. Which families can, stands here."""

import math
from collections.abc import Sequence

from PIL import Image, ImageOps

from engine.errors import RequestError, UnsupportedCapabilityError
from engine.types import Edit, EditRequest, Picture

# Pictures that a family takes at once. One that takes several looks at them; the others begin an image with theirs.
MOST_PICTURES = {"Flux2KleinPipeline": 4, "QwenImagePipeline": 1, "StableDiffusionXLPipeline": 1, "ZImagePipeline": 1}
_STRENGTH = 0.7  # without a mask; within one all is made anew
# What FLUX.2-klein is given to look at (its own bounds).
_LEAST_SIDE = 64
_LONGEST_TO_SHORTEST = 8
_MOST_PIXELS = 1024 * 1024
_SEEN = 2  # all together have as many pixels as so many images at most


def check_edit(edit: EditRequest, family: str) -> None:
    """Raise `UnsupportedCapabilityError` or `RequestError` for what a family cannot do, by its class's name."""
    most = MOST_PICTURES.get(family)
    if most is None:
        raise UnsupportedCapabilityError(
            f"This model cannot edit pictures: it is a {family.removesuffix('Pipeline')}, which makes images of text"
            " alone. Pick a model with the capability `image_editing`.",
            param="model",
        )
    if len(edit.pictures) > most:
        raise RequestError(f"This model takes at most {most} pictures in one request.", param=edit.names[most])
    if len(edit.pictures) > 1 and (edit.mask is not None or edit.strength is not None):
        name = "strength" if edit.mask is None else "mask"
        raise RequestError(f"`{name}` needs a single picture.", param=name)


def weight_of(edit: EditRequest, family: str) -> int:
    """Return how many images' memory a step takes: what a model looks at, it reads beside the image in every step."""
    return 1 + min(len(edit.pictures), _SEEN) if MOST_PICTURES[family] > 1 else 1


def prepared(images: Sequence[Image.Image], edit: EditRequest, family: str, *, edge: int, size: int) -> Edit:
    """Return an edit as the worker gets it, of its pictures and, last, its mask. Blocking. Raises `RequestError`."""
    picture = images[0]
    if edit.mask is None and edit.strength is None and MOST_PICTURES[family] > 1:
        most_pixels = min(edge * edge, _MOST_PIXELS) * _SEEN // max(_SEEN, len(images))
        seen = [_seen(image, most_pixels, name) for image, name in zip(images, edit.names, strict=True)]
        return Edit(tuple(map(_picture, seen)))
    start = _picture(_square(picture, edge))
    if edit.mask is None:
        return Edit((start,), edit.strength or _STRENGTH)
    mask = images[-1]
    if mask.size != picture.size:
        raise RequestError(
            f"The mask must be as large as the picture: it is {mask.width} x {mask.height}, and the picture"
            f" {picture.width} x {picture.height}.",
            param="mask",
        )
    return Edit(
        (start,),
        edit.strength or 1.0,
        _picture(_square(mask, edge)),
        _picture(_square(picture, size)),
        _picture(_square(mask, size)),
    )


def _square(image: Image.Image, edge: int) -> Image.Image:
    """Return the largest square in the middle, in another size. Its own size leaves every pixel as it is."""
    method = Image.Resampling.NEAREST if image.mode == "L" else Image.Resampling.LANCZOS
    return ImageOps.fit(image, (edge, edge), method)


def _seen(image: Image.Image, most_pixels: int, name: str) -> Image.Image:
    """Return a whole picture, made smaller if it has more pixels."""
    width, height = image.size
    if min(width, height) < _LEAST_SIDE or max(width, height) > _LONGEST_TO_SHORTEST * min(width, height):
        raise RequestError(
            f"This model takes pictures of at least {_LEAST_SIDE} pixels on each side, of which the longer is at most "
            f"{_LONGEST_TO_SHORTEST} times the shorter; this one is {width} x {height}.",
            param=name,
        )
    scale = math.sqrt(most_pixels / (width * height))
    if scale >= 1:
        return image
    smaller = (max(16, int(width * scale)), max(16, int(height * scale)))
    return image.resize(smaller, Image.Resampling.LANCZOS)


def _picture(image: Image.Image) -> Picture:
    return Picture(image.width, image.height, image.tobytes())
