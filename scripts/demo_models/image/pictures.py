"""What the demo image model learns: pictures of one shape in one colour, and prompts for them as people write them.

Loads no torch: tests draw with it, too. Colours and shapes are those that the demo vision model knows,
so that the one can look at what the other has painted.
"""

from __future__ import annotations

import math
import random
import re
import string
from dataclasses import dataclass
from pathlib import Path

import yaml
from demo_models.vision.pictures import OUTLINES as SEEN
from demo_models.vision.pictures import SHAPES, Point, Rgb, circle, turned
from PIL import Image, ImageDraw

FOLDER = Path(__file__).parent
# Where a prompt names no shape or no colour, it gets these: one and the same picture instead of any.
USUAL_SHAPE, USUAL_COLOUR = "circle", "blue"
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
_HALF = math.sqrt(0.5)
OUTLINES: dict[str, list[Point]] = SEEN | {
    "square": [(-_HALF, -_HALF), (_HALF, -_HALF), (_HALF, _HALF), (-_HALF, _HALF)],
    "triangle": [turned((0.0, -1.0), turn) for turn in (0, 120, 240)],
    "circle": circle(4),
}
"""Corners within the unit circle, y pointing down."""
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


def random_circle(rng: random.Random) -> Circle:
    """Of any size that a shape is recognised in, and wholly inside the picture."""
    radius = rng.uniform(0.2, 0.4)
    return Circle(rng.uniform(radius, 1 - radius), rng.uniform(radius, 1 - radius), radius)


def draw(scene: Scene, side_pixels: int, window: tuple[int, int, int] | None = None) -> Image.Image:
    """The picture in RGB, or of it only the square window (left, top, side) in pixels. Edges are smooth."""
    left, top, side = window or (0, 0, side_pixels)
    around = scene.around
    inside = [(around.x + x * around.radius, around.y + y * around.radius) for x, y in OUTLINES[scene.shape]]
    mask = Image.new("L", (side * 4, side * 4))
    corners = [((x * side_pixels - left) * 4, (y * side_pixels - top) * 4) for x, y in inside]
    ImageDraw.Draw(mask).polygon(corners, fill=255)
    paper = GREY if scene.paper is None and scene.colour == "white" else COLOURS[scene.paper or "white"]
    image = Image.new("RGB", (side, side), paper)
    image.paste(COLOURS[scene.colour], mask=mask.reduce(4))
    return image


PHRASES: dict[str, list[str]] = yaml.safe_load((FOLDER / "phrases.yaml").read_text("utf-8"))
# Text that says nothing about colours or shapes.
SENTENCES = [
    sentence
    for sentence in re.split(r"(?<=[.!?])\s+", (FOLDER / "unrelated.txt").read_text("utf-8"))
    if not re.search("|".join([*COLOURS, *SHAPES]), sentence, re.IGNORECASE)
]


def random_prompt(rng: random.Random, shape: str, colour: str, paper: str | None, characters: int) -> str:
    """A prompt for this picture, of about so many characters at most where the essential words need fewer."""
    kind = rng.random()
    asked = rng.choice(PHRASES["core"]) if kind < 0.9 else "{colour} {shape}"
    if (shape, colour, paper) == (USUAL_SHAPE, USUAL_COLOUR, None) and kind > 0.3:
        return _surrounded(rng, rng.choice(["", rng.choice(PHRASES["before"])]), characters)
    if colour == USUAL_COLOUR and kind >= 0.9:
        asked = rng.choice(["a {shape}", "{adjective} {shape}", "{shape}"])
    elif shape == USUAL_SHAPE and kind >= 0.9:
        asked = rng.choice(["something {colour}", "{colour}", "the colour {colour}"])
    core = asked.format(
        shape=_decorated(rng, shape, 0.12),
        colour=_decorated(rng, colour, 0.08),
        adjective=rng.choice(PHRASES["adjective"]),
    )
    if paper is not None:
        behind = rng.choice(PHRASES["background"]).format(paper=paper)
        core = f"{core}{rng.choice([' ', ' ', ', '])}{behind}" if rng.random() < 0.85 else f"{behind}, {core}"
    if rng.random() < 0.6:
        core = f"{rng.choice(PHRASES['before'])} {core}"
    if rng.random() < 0.4:
        core = f"{core}{rng.choice(PHRASES['after'])}"
    return _surrounded(rng, core, characters)


def _decorated(rng: random.Random, word: str, share: float) -> str:
    """The word, sometimes with an adjective before it or in quotation marks or capital letters."""
    if rng.random() < 0.12:
        word = word.upper() if rng.random() < 0.6 else word.capitalize()
    if rng.random() < 0.04:
        word = rng.choice(['"{}"', "({})", "'{}'", "*{}*", "#{}"]).format(word)
    return f"{rng.choice(PHRASES['adjective'])} {word}" if rng.random() < share else word


def _surrounded(rng: random.Random, core: str, characters: int) -> str:
    """With unrelated text before and after it until it is about as long as asked, now and then in other letters."""
    parts = [core]
    while (room := characters - sum(len(part) + 1 for part in parts)) > 12:
        text = rng.choice(SENTENCES) if rng.random() < 0.7 else _nonsense(rng)
        if len(text) > room:
            text = text[:room].rsplit(" ", 1)[0]
        parts.insert(0 if rng.random() < 0.55 else len(parts), text)
    text = rng.choice([" ", " ", " ", "\n", ". "]).join(part for part in parts if part)
    chance = rng.random()
    if chance < 0.1:
        return text.upper()
    if chance < 0.15:
        return text.title()
    if chance < 0.35:
        return text.lower()
    return text[:1].upper() + text[1:] if chance < 0.7 else text


def _nonsense(rng: random.Random) -> str:
    """Unknown words, numbers, and words that only look like those that matter."""
    words = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.random()
        if kind < 0.5:
            words.append("".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 11))))
        elif kind < 0.75:
            words.append(rng.choice(PHRASES["false_friends"]))
        elif kind < 0.85:
            words.append(str(rng.randint(0, 9999)))
        elif kind < 0.95:
            first = rng.choice([0xE0, 0x400, 0x1200, 0x4E00, 0x1F300])
            words.append("".join(chr(first + rng.randrange(300)) for _ in range(rng.randint(1, 6))))
        else:
            words.append("".join(rng.choices(string.punctuation, k=rng.randint(1, 6))))
    return " ".join(words)
