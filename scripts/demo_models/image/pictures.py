"""Draws what the demo image model learns to paint: one shape in one colour on a plain background.

Pillow and numpy only, no torch: tests draw with it, too. Colours and shapes are those that the demo vision model knows,
so that the one can look at what the other has painted.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from demo_models.vision.pictures import CROSS, STAR, Point, Rgb, turned
from numpy.typing import NDArray
from PIL import Image, ImageDraw

COLOURS: dict[str, Rgb] = {
    "red": (225, 20, 30),
    "green": (0, 150, 50),
    "blue": (25, 60, 225),
    "yellow": (250, 220, 0),
    "orange": (255, 135, 0),
    "purple": (135, 35, 165),
    "black": (10, 10, 10),
    "white": (255, 255, 255),
}
GREY: Rgb = (128, 128, 128)
"""Behind a white shape when the prompt names no background."""


@dataclass(frozen=True)
class Circle:
    """The circle around a shape, in parts of the picture."""

    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Scene:
    """What a picture shows. `paper` is the colour behind the shape, None where nothing says which."""

    shape: str
    colour: str
    around: Circle
    paper: str | None = None

    def paper_rgb(self) -> Rgb:
        if self.paper is None:
            return GREY if self.colour == "white" else COLOURS["white"]
        return COLOURS[self.paper]


def random_circle(rng: random.Random) -> Circle:
    """Of any size that a shape is recognised in, and wholly inside the picture."""
    radius = rng.uniform(0.2, 0.4)
    return Circle(rng.uniform(radius, 1 - radius), rng.uniform(radius, 1 - radius), radius)


def draw(scene: Scene, side_pixels: int, window: tuple[int, int, int] | None = None) -> Image.Image:
    """The picture in RGB, or of it only the square window (left, top, side) in pixels. Edges are smooth."""
    left, top, side = window or (0, 0, side_pixels)
    scale, around = 4, scene.around
    corners = [
        (
            ((around.x + px * around.radius) * side_pixels - left) * scale,
            ((around.y + py * around.radius) * side_pixels - top) * scale,
        )
        for px, py in _outline(scene.shape)
    ]
    mask = Image.new("L", (side * scale, side * scale))
    ImageDraw.Draw(mask).polygon(corners, fill=255)
    image = Image.new("RGB", (side, side), scene.paper_rgb())
    image.paste(COLOURS[scene.colour], mask=mask.reduce(scale))
    return image


def pixels(image: Image.Image) -> NDArray[np.float32]:
    """The picture as the autoencoder takes it: [3, height, width] from -1 to 1."""
    return (np.asarray(image, dtype=np.float32) / 127.5 - 1).transpose(2, 0, 1)


def _outline(shape: str) -> list[Point]:
    """The corners within the unit circle, y pointing down."""
    if shape == "square":
        half = math.sqrt(0.5)
        return [(-half, -half), (half, -half), (half, half), (-half, half)]
    if shape == "triangle":
        return [turned((0.0, -1.0), turn) for turn in (0, 120, 240)]
    if shape == "cross":
        return CROSS
    if shape == "star":
        return STAR
    return [(math.cos(math.radians(angle)), math.sin(math.radians(angle))) for angle in range(0, 360, 4)]
