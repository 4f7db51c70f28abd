"""Draws the pictures of the demo vision model: one shape in one colour, in many sizes, places and qualities.

Pillow and numpy only, no torch: tests and the image model's recipe draw from here, too.
"""

from __future__ import annotations

import io
import math
import random
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Rgb = tuple[int, int, int]
Point = tuple[float, float]

# The first of each colour is the pure one; others people call the same.
COLOURS: dict[str, list[Rgb]] = {
    "red": [(255, 0, 0), (220, 20, 30), (200, 0, 0), (230, 50, 40), (178, 34, 34)],
    "green": [(0, 128, 0), (0, 255, 0), (0, 160, 60), (50, 170, 60), (34, 139, 34), (0, 200, 0)],
    "blue": [(0, 0, 255), (30, 60, 220), (0, 90, 220), (40, 80, 180), (0, 0, 160), (30, 120, 240)],
    "yellow": [(255, 255, 0), (250, 220, 0), (255, 230, 50), (240, 240, 30), (255, 240, 100)],
    "orange": [(255, 165, 0), (255, 140, 0), (240, 120, 10), (255, 128, 0)],
    "purple": [(128, 0, 128), (160, 32, 240), (140, 40, 170), (110, 30, 160)],
    "black": [(0, 0, 0), (20, 20, 20), (35, 30, 40)],
    "white": [(255, 255, 255), (245, 245, 240), (240, 245, 255)],
}
SHAPES = ["square", "circle", "triangle", "star", "cross"]
DIRECTIONS = ["up", "right", "down", "left"]
PLAIN = "picture"
"""The shape of a picture that is one colour all over."""
SMALLEST_CONTRAST = 110
"""Between a shape and its background, as a distance in RGB space."""

WHITE: Rgb = (255, 255, 255)


@dataclass(frozen=True)
class Figure:
    """What a picture shows: a shape in a colour. `direction` is None unless the shape is an arrow."""

    shape: str
    colour: str
    direction: str | None = None

    @property
    def name(self) -> str:
        """As in "a red square"."""
        if self.shape == PLAIN:
            return f"a plain {self.colour} picture"
        article = "an" if self.colour[0] in "aeiou" else "a"
        pointing = f" pointing {self.direction}" if self.direction else ""
        return f"{article} {self.colour} {self.shape}{pointing}"


@dataclass(frozen=True)
class Drawing:
    """How a figure is drawn: sizes and places in parts of the picture, 0 to 1, angles in degrees."""

    figure: Figure
    size_pixels: tuple[int, int]
    ink: Rgb
    paper: Rgb
    centre: Point = (0.5, 0.5)
    diameter: float = 0.6
    """In parts of the shorter side."""
    turn: float = 0.0
    smooth: bool = True
    quality: tuple[str, int] | None = None
    """File format and quality that the picture went through, like ("JPEG", 60)."""


FORMS = [*((shape, None) for shape in [*SHAPES, PLAIN]), *(("arrow", direction) for direction in DIRECTIONS)]
FIGURES = [Figure(shape, colour, direction) for colour in COLOURS for shape, direction in FORMS]
"""All that the model can name."""


def draw(drawing: Drawing) -> Image.Image:
    """The picture, in RGB."""
    width, height = drawing.size_pixels
    if drawing.figure.shape == PLAIN:
        image = Image.new("RGB", (width, height), drawing.ink)
    else:
        scale = 3 if drawing.smooth and max(width, height) <= 512 else 1
        image = Image.new("RGB", (width * scale, height * scale), drawing.paper)
        x, y = drawing.centre[0] * image.width, drawing.centre[1] * image.height
        corners = _corners(drawing, drawing.diameter * min(image.size) / 2)
        ImageDraw.Draw(image).polygon([(x + dx, y + dy) for dx, dy in corners], fill=drawing.ink)
        image = image.reduce(scale)
    if drawing.quality is None:
        return image
    file = io.BytesIO()
    image.save(file, drawing.quality[0], quality=drawing.quality[1])
    return Image.open(file).convert("RGB")


def simple(shape: str, colour: str, direction: str | None = None, side_pixels: int = 224) -> Drawing:
    """The drawing one would make first: the pure colour in the middle of white (grey for a white or yellow shape)."""
    paper = (128, 128, 128) if colour in {"white", "yellow"} else WHITE
    return Drawing(Figure(shape, colour, direction), (side_pixels, side_pixels), COLOURS[colour][0], paper)


def random_drawing(figure: Figure, rng: random.Random) -> Drawing:
    """A drawing of this figure as a user might send it."""
    ink = _near(rng.choice(COLOURS[figure.colour]), 12, rng)
    paper = _paper(ink, rng)
    shorter = round(32 * 5 ** rng.random())
    stretch = 1.0 if rng.random() < 0.5 else 2.2 ** rng.random()
    size = (shorter, round(shorter * stretch))
    if rng.random() < 0.5:
        size = size[::-1]
    diameter = rng.uniform(0.42 if stretch > 1.3 or shorter < 48 else 0.33, 0.95)
    reach = [diameter * shorter / side / 2 for side in size]
    drawing = Drawing(
        figure=figure,
        size_pixels=size,
        ink=ink,
        paper=paper,
        centre=(rng.uniform(reach[0], 1 - reach[0]), rng.uniform(reach[1], 1 - reach[1])),
        diameter=diameter,
        turn=rng.uniform(-12, 12) if rng.random() < 0.4 else 0.0,
        smooth=rng.random() < 0.7,
        quality=(rng.choice(["JPEG", "WEBP"]), rng.randint(40, 95)) if rng.random() < 0.15 else None,
    )
    return replace(drawing, centre=(0.5, 0.5)) if rng.random() < 0.2 else drawing


def silhouette(drawing: Drawing, side_pixels: int) -> Image.Image:
    """The shape alone, white on black, in a picture already brought to a square: a quick sketch for training."""
    if drawing.figure.shape == PLAIN:
        return Image.new("L", (side_pixels, side_pixels), 255)
    side = side_pixels * 4
    (x, y), (width, height) = drawing.centre, drawing.size_pixels
    corners = _corners(drawing, drawing.diameter * min(width, height) / 2)
    image = Image.new("L", (side, side))
    ImageDraw.Draw(image).polygon([((x + dx / width) * side, (y + dy / height) * side) for dx, dy in corners], fill=255)
    return image.reduce(4)


def pixels(image: Image.Image) -> NDArray[np.float32]:
    """[3, height, width] from -1 to 1."""
    return (np.asarray(image, dtype=np.float32) / 127.5 - 1).transpose(2, 0, 1)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def turned(point: Point, degrees: float) -> Point:
    """Clockwise on the screen."""
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    return point[0] * cosine - point[1] * sine, point[0] * sine + point[1] * cosine


def circle(step_degrees: int) -> list[Point]:
    return [(math.cos(math.radians(angle)), math.sin(math.radians(angle))) for angle in range(0, 360, step_degrees)]


# Corners within the unit circle or square, y pointing down; the arrow points up.
OUTLINES: dict[str, list[Point]] = {
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "circle": circle(5),
    "triangle": [(0.0, -0.95), (0.95, 0.85), (-0.95, 0.85)],
    "star": [turned(point, turn) for turn in range(0, 360, 72) for point in ((0.0, -1.0), turned((0.0, -0.42), 36))],
    "cross": [turned(point, turn) for turn in (0, 90, 180, 270) for point in ((0.3, -0.95), (0.3, -0.3), (0.95, -0.3))],
    "arrow": [(0.0, -0.95), (0.8, -0.05), (0.3, -0.05), (0.3, 0.95), (-0.3, 0.95), (-0.3, -0.05), (-0.8, -0.05)],
}


def _corners(drawing: Drawing, radius: float) -> list[Point]:
    """Of the shape as it is turned, around its centre."""
    points, direction = OUTLINES[drawing.figure.shape], drawing.figure.direction
    if direction:
        points = [turned(point, 90 * DIRECTIONS.index(direction)) for point in points]
    return [(x * radius, y * radius) for x, y in (turned(point, drawing.turn) for point in points)]


def _near(colour: Rgb, most: int, rng: random.Random) -> Rgb:
    red, green, blue = (min(255, max(0, part + rng.randint(-most, most))) for part in colour)
    return red, green, blue


def _paper(ink: Rgb, rng: random.Random) -> Rgb:
    """White, tinted, grey, dark or in another colour, always so that the shape can be seen."""
    while True:
        kind = rng.random()
        if kind < 0.3:
            paper = WHITE
        elif kind < 0.5:
            paper = _near((235, 235, 235), 20, rng)
        elif kind < 0.7:
            paper = _near((rng.randint(60, 200),) * 3, 6, rng)
        elif kind < 0.85:
            paper = _near((25, 25, 25), 25, rng)
        else:
            paper = _near(rng.choice(rng.choice(list(COLOURS.values()))), 12, rng)
        if math.dist(paper, ink) >= SMALLEST_CONTRAST:
            return paper
