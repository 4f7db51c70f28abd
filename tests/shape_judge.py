"""Says which shape in which colour a picture shows, by measuring pixels: no model judges a model here.

Pillow and numpy only. It knows pictures of one upright shape on a plain background; anything else is "unclear".
"""

from functools import cache

import numpy as np
from demo_models.image.pictures import COLOURS, GREY, Circle, Scene, draw
from demo_models.vision.pictures import SHAPES
from numpy.typing import NDArray
from PIL import Image

UNCLEAR = "unclear"
SIDE_PIXELS = 128
BORDER_PIXELS = 2
# Distances in RGB space: what is no longer background, and what is no longer called by the name of a colour.
NOT_PAPER, NOT_THE_COLOUR = 60.0, 60.0
SMALLEST_PART, LARGEST_PART = 0.03, 0.8
"""Of the picture that a shape may cover."""
LARGEST_SCATTER = 0.06
"""Of the shape's own area that may be left lying about elsewhere."""
FITTED_PIXELS = 64
SMALLEST_OVERLAP, SMALLEST_LEAD = 0.75, 0.05
"""Of shape and ideal, as intersection over union, and before the next best ideal."""


def judge(image: Image.Image) -> tuple[str, str]:
    """The colour and the shape of what stands on the background, each "unclear" where it cannot be said."""
    seen = _small(image)
    paper = _border(seen)
    foreign = np.linalg.norm(seen - paper, axis=2) > NOT_PAPER
    parts = _parts(foreign)
    if not parts:
        return UNCLEAR, UNCLEAR
    largest = max(parts, key=lambda part: int(part.sum()))
    area = int(largest.sum())
    scattered = int(foreign.sum()) - area
    if not SMALLEST_PART <= area / foreign.size <= LARGEST_PART or scattered > LARGEST_SCATTER * area:
        return UNCLEAR, UNCLEAR
    return _colour_name(np.median(seen[_inside(largest)], axis=0), COLOURS), _shape_name(largest)


def background(image: Image.Image) -> str:
    """The colour along the border, "grey" among them."""
    return _colour_name(_border(_small(image)), {**COLOURS, "grey": GREY})


def _small(image: Image.Image) -> NDArray[np.float32]:
    small = image.convert("RGB").resize((SIDE_PIXELS, SIDE_PIXELS), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32)


def _border(seen: NDArray[np.float32]) -> NDArray[np.float32]:
    ring = np.ones(seen.shape[:2], dtype=bool)
    ring[BORDER_PIXELS:-BORDER_PIXELS, BORDER_PIXELS:-BORDER_PIXELS] = False
    middle: NDArray[np.float32] = np.median(seen[ring], axis=0)
    return middle


def _parts(mask: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """The connected parts of a mask."""
    left, found = mask.copy(), []
    while left.any():
        part = np.zeros_like(left)
        part[np.unravel_index(int(left.argmax()), left.shape)] = True
        size = 0
        while size != (size := int(part.sum())):
            # Runs grow along whole rows and columns at once; a convex part needs two rounds.
            for _ in range(8):
                part = _grown(part) & left
        found.append(part)
        left &= ~part
    return found


def _grown(part: NDArray[np.bool_]) -> NDArray[np.bool_]:
    grown = part.copy()
    grown[1:] |= part[:-1]
    grown[:-1] |= part[1:]
    grown[:, 1:] |= part[:, :-1]
    grown[:, :-1] |= part[:, 1:]
    return grown


def _inside(part: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The part without its edge, where colours are mixed."""
    inner = ~_grown(_grown(~part))
    return inner if inner.any() else part


def _colour_name(rgb: NDArray[np.float32], known: dict[str, tuple[int, int, int]]) -> str:
    distances = {name: float(np.linalg.norm(rgb - np.array(value))) for name, value in known.items()}
    nearest = min(distances, key=distances.__getitem__)
    return nearest if distances[nearest] < NOT_THE_COLOUR else UNCLEAR


def _shape_name(part: NDArray[np.bool_]) -> str:
    fitted = _fitted(part)
    overlaps = {}
    for shape in SHAPES:
        ideal = _ideal(shape)
        overlaps[shape] = float((fitted & ideal).sum() / (fitted | ideal).sum())
    best, second = sorted(overlaps, key=overlaps.__getitem__, reverse=True)[:2]
    clear = overlaps[best] >= SMALLEST_OVERLAP and overlaps[best] - overlaps[second] >= SMALLEST_LEAD
    return best if clear else UNCLEAR


def _fitted(part: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The part with its centre of mass in the middle, covering a quarter of a picture of its own."""
    rows, columns = np.nonzero(part)
    step = 2 * float(np.sqrt(len(rows))) / FITTED_PIXELS
    left, top = (float(places.mean()) + 0.5 - step * FITTED_PIXELS / 2 for places in (columns, rows))
    mask = Image.fromarray(part.astype(np.uint8) * 255)
    moved = mask.transform(
        (FITTED_PIXELS, FITTED_PIXELS),
        Image.Transform.AFFINE,
        (step, 0, left, 0, step, top),
        resample=Image.Resampling.BILINEAR,
    )
    return np.asarray(moved) > 127


@cache
def _ideal(shape: str) -> NDArray[np.bool_]:
    image = draw(Scene(shape, "black", Circle(0.5, 0.5, 0.4)), SIDE_PIXELS * 2)
    return _fitted(np.asarray(image.convert("L")) < 128)
