"""What the demo models promise to answer: prompts for chat, pictures for vision, words for images. Loads no torch."""

from __future__ import annotations

import base64
import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from demo_models.chat.corpus import Conversation, load_corpus
from demo_models.image.pictures import COLOURS
from demo_models.vision.pictures import DIRECTIONS, PLAIN, SHAPES, Drawing, Figure, draw, png, simple

ASKED = "What is in this picture?"

FixedPrompt = Conversation
"""A prompt that the demo models, chat and vision, answer word for word at temperature 0.

`messages` and `tools` go into a chat request as they are."""


@dataclass(frozen=True)
class FixedImage:
    """What the demo image model paints for a prompt, with nearly every seed. `paper` is the colour behind the shape."""

    prompt: str
    colour: str
    shape: str
    paper: str | None = None


def fixed_prompts() -> list[FixedPrompt]:
    """Every prompt that the demo models promise to answer word for word, in the order of the corpus."""
    return [copy.deepcopy(one) for one in load_corpus().conversations if one.fixed]


@cache
def fixed_images() -> tuple[FixedImage, ...]:
    """Every colour with every shape in plain words, then the freer prompts of image/promised.yaml."""
    plain = [FixedImage(Figure(shape, colour).name, colour, shape) for colour in COLOURS for shape in SHAPES]
    free = yaml.safe_load((Path(__file__).parent / "image" / "promised.yaml").read_text("utf-8"))
    return (*plain, *(FixedImage(**one) for one in free))


def fixed_pictures() -> list[FixedPrompt]:
    """Every question about pictures that the demo vision model promises to answer word for word."""
    square, circle, green_star = simple("square", "red"), simple("circle", "blue"), simple("star", "green")
    corner = replace(circle, size_pixels=(640, 360), centre=(0.2, 0.35), diameter=0.5)
    star = replace(simple("star", "yellow", None, 512), paper=(20, 24, 60), turn=10, diameter=0.7)
    these, towards = "What is in these pictures?", "Which way does the arrow point?"
    alone = [
        ("red-square", [square], ASKED, "A red square."),
        ("red-square-small", [replace(square, size_pixels=(64, 64))], "What do you see?", "A red square."),
        ("red-square-large", [replace(square, size_pixels=(1600, 1200))], "Describe the image.", "A red square."),
        ("red-square-colour", [square], "What colour is the shape?", "The square is red."),
        ("red-square-color", [square], "What color is it?", "The square is red."),
        ("blue-circle", [circle], ASKED, "A blue circle."),
        ("blue-circle-in-a-corner", [corner], "What is this?", "A blue circle."),
        ("blue-circle-jpeg", [replace(circle, quality=("JPEG", 60))], ASKED, "A blue circle."),
        ("green-triangle", [simple("triangle", "green")], ASKED, "A green triangle."),
        ("yellow-star", [star], "What shape is this?", "A yellow star."),
        ("orange-cross", [simple("cross", "orange")], ASKED, "An orange cross."),
        ("purple-circle", [simple("circle", "purple")], ASKED, "A purple circle."),
        ("black-triangle", [simple("triangle", "black")], "Look!", "A black triangle."),
        ("white-square", [simple("square", "white")], ASKED, "A white square."),
        ("plain-red", [simple(PLAIN, "red", None, 64)], ASKED, "A plain red picture."),
        *((f"arrow-{way}", [simple("arrow", "black", way)], towards, f"{way.capitalize()}.") for way in DIRECTIONS),
        ("two-pictures", [square, circle], these, "A red square and a blue circle."),
        ("two-pictures-swapped", [circle, square], these, "A blue circle and a red square."),
        ("three-pictures", [square, circle, green_star], these, "A red square, a blue circle and a green star."),
    ]
    said = [
        Conversation(name, [_asking(seen, text)], answer, drawings=tuple(seen)) for name, seen, text, answer in alone
    ]
    return said + _in_a_conversation()


def _in_a_conversation() -> list[Conversation]:
    square, triangle = simple("square", "red"), simple("triangle", "green")
    asked, later = _asking([square], ASKED), _asking([triangle], "What is this?")
    so_far = [asked, {"role": "assistant", "content": "A red square."}]
    picture_last = {**asked, "content": asked["content"][::-1]}
    colour = {"role": "user", "content": "What colour is it?"}
    system = {"role": "system", "content": "You are a helpful assistant."}
    return [
        Conversation("picture-after-the-question", [picture_last], "A red square.", drawings=(square,)),
        Conversation("picture-in-an-earlier-turn", [*so_far, colour], "The square is red.", drawings=(square,)),
        Conversation("another-picture-later", [*so_far, later], "A green triangle.", drawings=(square, triangle)),
        Conversation("under-a-system-prompt", [system, later], "A green triangle.", drawings=(triangle,)),
    ]


def _asking(drawings: list[Drawing], question: str) -> dict[str, Any]:
    """A message with pictures, as PNG files in data URIs, and then the question."""
    pictures = [base64.b64encode(png(draw(drawing))).decode() for drawing in drawings]
    content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{one}"}} for one in pictures]
    return {"role": "user", "content": [*content, {"type": "text", "text": question}]}
