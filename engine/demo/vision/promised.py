"""The pictures that the demo vision model promises to answer word for word. Draws them, and loads no torch."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

from engine.demo import FixedPicture
from engine.demo.vision.pictures import DIRECTIONS, PLAIN, Drawing, Figure, draw, plain_drawing, png

ASKED = "What is in this picture?"


def promised() -> list[FixedPicture]:
    """Every promised picture, each with the messages of a chat request."""
    return [*_named(), *_arrows(), *_several(), *_in_a_conversation()]


def _named() -> list[FixedPicture]:
    square, circle = plain_drawing(Figure("square", "red")), plain_drawing(Figure("circle", "blue"))
    corner = replace(circle, size_pixels=(640, 360), centre=(0.2, 0.35), diameter=0.5)
    star = replace(plain_drawing(Figure("star", "yellow"), 512), paper=(20, 24, 60), turn=10, diameter=0.7)
    table = [
        ("red-square", square, ASKED, "A red square."),
        ("red-square-small", replace(square, size_pixels=(64, 64)), "What do you see?", "A red square."),
        ("red-square-large", replace(square, size_pixels=(1600, 1200)), "Describe the image.", "A red square."),
        ("red-square-colour", square, "What colour is the shape?", "The square is red."),
        ("red-square-color", square, "What color is it?", "The square is red."),
        ("blue-circle", circle, ASKED, "A blue circle."),
        ("blue-circle-in-a-corner", corner, "What is this?", "A blue circle."),
        ("blue-circle-jpeg", replace(circle, quality=("JPEG", 60)), ASKED, "A blue circle."),
        ("green-triangle", plain_drawing(Figure("triangle", "green")), ASKED, "A green triangle."),
        ("yellow-star", star, "What shape is this?", "A yellow star."),
        ("orange-cross", plain_drawing(Figure("cross", "orange")), ASKED, "An orange cross."),
        ("purple-circle", plain_drawing(Figure("circle", "purple")), ASKED, "A purple circle."),
        ("black-triangle", plain_drawing(Figure("triangle", "black")), "Look!", "A black triangle."),
        ("white-square", plain_drawing(Figure("square", "white")), ASKED, "A white square."),
        ("plain-red", plain_drawing(Figure(PLAIN, "red"), 64), ASKED, "A plain red picture."),
    ]
    return [_fixed(name, [drawing], question, answer) for name, drawing, question, answer in table]


def _arrows() -> list[FixedPicture]:
    return [
        _fixed(
            f"arrow-{direction}",
            [plain_drawing(Figure("arrow", "black", direction))],
            "Which way does the arrow point?",
            f"{direction.capitalize()}.",
        )
        for direction in DIRECTIONS
    ]


def _several() -> list[FixedPicture]:
    square, circle, star = (
        plain_drawing(Figure(shape, colour))
        for shape, colour in [("square", "red"), ("circle", "blue"), ("star", "green")]
    )
    asked = "What is in these pictures?"
    return [
        _fixed("two-pictures", [square, circle], asked, "A red square and a blue circle."),
        _fixed("two-pictures-swapped", [circle, square], asked, "A blue circle and a red square."),
        _fixed("three-pictures", [square, circle, star], asked, "A red square, a blue circle and a green star."),
    ]


def _in_a_conversation() -> list[FixedPicture]:
    square = plain_drawing(Figure("square", "red"))
    triangle = plain_drawing(Figure("triangle", "green"))
    asked = [*_fixed("", [square], ASKED, "").messages, {"role": "assistant", "content": "A red square."}]
    question = "What colour is it?"
    remembered = [*asked, {"role": "user", "content": question}]
    second = _fixed("", [triangle], "What is this?", "").messages
    system = {"role": "system", "content": "You are a helpful assistant."}
    picture_last = _fixed("picture-after-the-question", [square], ASKED, "A red square.")
    picture_last.messages[0]["content"].reverse()
    return [
        picture_last,
        replace(_fixed("picture-in-an-earlier-turn", [square], question, "The square is red."), messages=remembered),
        replace(
            _fixed("another-picture-later", [square, triangle], "What is this?", "A green triangle."),
            messages=asked + second,
        ),
        replace(
            _fixed("under-a-system-prompt", [triangle], "What is this?", "A green triangle."),
            messages=[system, *second],
        ),
    ]


def _fixed(name: str, drawings: list[Drawing], question: str, answer: str) -> FixedPicture:
    pictures = tuple(png(draw(drawing)) for drawing in drawings)
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(picture).decode()}"}}
        for picture in pictures
    ]
    content.append({"type": "text", "text": question})
    return FixedPicture(name, pictures, question, answer, [{"role": "user", "content": content}])
