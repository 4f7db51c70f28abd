"""Turns pictures and questions into what training reads, beside all that the chat model learns.

How a picture is drawn is decided in pictures.py; the words stand in questions.yaml.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from demo_models.chat.corpus import Conversation, Corpus
from demo_models.chat.lessons import Lesson, Lessons
from demo_models.promised import FixedPicture
from demo_models.vision.pictures import PLAIN, Drawing, Figure, draw, every_figure, random_drawing
from PIL import Image
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
PICTURE_PIXELS = 64
"""Every picture is brought to a square of this side before the model looks."""
TOKENS_PER_PICTURE = 4
IMAGE = "<image>"
AROUND_IMAGE = "<fake_token_around_image>"
GLOBAL_IMAGE = "<global-img>"
PICTURE_TOKENS = [IMAGE, AROUND_IMAGE, GLOBAL_IMAGE, "<end_of_utterance>"]

# Drawn in each round, beside the chat lessons and those about pictures.
QUESTIONS_WITHOUT_PICTURE = 16


@dataclass(frozen=True)
class Showing(Conversation):
    """A conversation with pictures in its messages, in the order of `drawings`."""

    drawings: tuple[Drawing, ...] = ()


@cache
def load_questions() -> dict[str, Any]:
    questions: dict[str, Any] = yaml.safe_load((FOLDER / "questions.yaml").read_text(encoding="utf-8"))
    return questions


def pixels(image: Image.Image) -> torch.Tensor:
    """[3, PICTURE_PIXELS, PICTURE_PIXELS] from -1 to 1: what the image processor makes, several times as fast."""
    small = image.convert("RGB").resize((PICTURE_PIXELS, PICTURE_PIXELS), Image.Resampling.LANCZOS)
    flat = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return flat.view(PICTURE_PIXELS, PICTURE_PIXELS, 3).permute(2, 0, 1).float() / 127.5 - 1


def naming(figures: list[Figure]) -> str:
    names = [figure.name for figure in figures]
    listed = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
    return listed[0].upper() + listed[1:] + "."


class PictureLessons(Lessons):
    """The lessons of the chat model and as many again about pictures."""

    def __init__(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        super().__init__(corpus, tokenizer, seed)
        self.picture_lessons = 480
        self.questions = load_questions()
        self.figures = every_figure()
        around, shown, whole = tokenizer.convert_tokens_to_ids([AROUND_IMAGE, IMAGE, GLOBAL_IMAGE])
        self.image_token = shown
        self.expanded = [around, whole, *[shown] * TOKENS_PER_PICTURE, around]

    def lesson(self, conversation: Conversation) -> Lesson:
        plain = super().lesson(conversation)
        if not isinstance(conversation, Showing):
            return plain
        return self.with_pictures(plain, [draw(drawing) for drawing in conversation.drawings])

    def promise(self, fixed: FixedPicture) -> Lesson:
        """The promised answer to a promised picture."""
        asked = Conversation(
            name=fixed.name, fixed=True, messages=fixed.messages, tools=None, answer=fixed.answer, tool_calls=None
        )
        return self.with_pictures(super().lesson(asked), [Image.open(io.BytesIO(png)) for png in fixed.pictures])

    def with_pictures(self, plain: Lesson, images: list[Image.Image]) -> Lesson:
        """The same with each <image> as the tokens that stand for a picture, like the model's processor does it."""
        prompt: list[int] = []
        for token in plain.prompt:
            prompt += self.expanded if token == self.image_token else [token]
        return Lesson(prompt, plain.answer, tuple(map(pixels, images)))

    def draw_round(self) -> list[Lesson]:
        drawn = [
            *(self.showing() for _ in range(self.picture_lessons)),
            *(self.without_picture() for _ in range(QUESTIONS_WITHOUT_PICTURE)),
        ]
        lessons = super().draw_round() + [self.lesson(one) for one in drawn]
        self.random.shuffle(lessons)
        return lessons

    def showing(self) -> Showing:
        """Pictures in the last message, most of the time one."""
        kind = self.random.random()
        if kind < 0.4:
            one = self.ask([self.figure()], self.random.choice(self.questions["naming"]))
        elif kind < 0.55:
            one = self.ask_colour(self.figure())
        elif kind < 0.65:
            arrow = self.random.choice([figure for figure in self.figures if figure.direction])
            one = self.ask([arrow], self.random.choice(self.questions["direction"]), f"{arrow.direction}.".capitalize())
        elif kind < 0.85:
            several = [self.figure() for _ in range(self.random.choice([2, 2, 2, 3]))]
            one = self.ask(several, self.random.choice(self.questions["naming"]))
        elif kind < 0.9:
            # Whatever is asked about a picture, saying what it shows is the best that can be done.
            one = self.ask([self.figure()], self.random.choice(self.corpus.unknown_prompts))
        else:
            one = self.afterwards(self.ask([self.figure()], self.random.choice(self.questions["naming"])))
        return self.in_a_setting(one)

    def figure(self) -> Figure:
        return self.random.choice(self.figures)

    def ask(self, figures: list[Figure], question: str, answer: str | None = None) -> Showing:
        """A message with random pictures of these figures before or after the question."""
        texts = [question] if question else []
        if self.random.random() < 0.2:
            texts.insert(self.random.randint(0, 1), self.random.choice(self.questions["around"]))
        if len(texts) == 2 and self.random.random() < 0.5:
            texts = [" ".join(texts)]
        parts: list[dict[str, str]] = [{"type": "text", "text": text} for text in texts]
        place = self.random.choice([0, len(parts), self.random.randint(0, len(parts))])
        parts[place:place] = [{"type": "image"} for _ in figures]
        return self.message(parts, answer or naming(figures), [random_drawing(one, self.random) for one in figures])

    def message(self, parts: list[dict[str, str]], answer: str, drawings: list[Drawing]) -> Showing:
        return Showing(
            name="picture",
            fixed=False,
            messages=[{"role": "user", "content": parts}],
            tools=None,
            answer=answer,
            tool_calls=None,
            drawings=tuple(drawings),
        )

    def ask_colour(self, figure: Figure) -> Showing:
        return self.ask([figure], self.colour_question(figure), f"The {figure.shape} is {figure.colour}.")

    def colour_question(self, figure: Figure) -> str:
        question: str = self.random.choice(self.questions["colour"])
        return question.replace("{shape}", self.random.choice([figure.shape, figure.shape, PLAIN, "image"]))

    def afterwards(self, first: Showing) -> Showing:
        """The conversation goes on after the picture was named: about it, about another one, or about the weather."""
        figure = first.drawings[0].figure
        so_far = [*first.messages, {"role": "assistant", "content": first.target}]
        kind = self.random.random()
        if kind < 0.3:
            asked = {"role": "user", "content": self.colour_question(figure)}
            return replace(first, messages=[*so_far, asked], answer=f"The {figure.shape} is {figure.colour}.")
        if kind < 0.4:
            question = self.random.choice([question for question in self.questions["naming"] if question])
            return replace(first, messages=[*so_far, {"role": "user", "content": question}])
        if kind < 0.7:
            other = self.figure()
            question = self.random.choice(self.questions["naming"])
            second = self.ask_colour(other) if self.random.random() < 0.5 else self.ask([other], question)
            both = first.drawings + second.drawings
            return replace(second, messages=[*so_far, *second.messages], drawings=both)
        plain = self.random.choice([one for one in self.without_tools if one.messages[0]["role"] == "user"])
        if kind < 0.85:
            return replace(first, messages=[*so_far, *plain.messages], answer=plain.answer)
        return replace(
            first, messages=[*plain.messages, {"role": "assistant", "content": plain.answer}, *first.messages]
        )

    def in_a_setting(self, one: Showing) -> Showing:
        """The same, now and then under a system prompt or with tools that are of no use."""
        if self.random.random() < 0.2:
            one = replace(one, messages=[self.system_prompt(), *one.messages])
        if self.random.random() < 0.1:
            one = replace(one, tools=self.around([]) or None)
        return one

    def without_picture(self) -> Conversation:
        asked = self.random.choice(["naming", "naming", "colour", "direction"])
        question = self.random.choice([question for question in self.questions[asked] if question])
        question = question.replace("{shape}", self.random.choice(["shape", "square", "circle", PLAIN]))
        return replace(self.unknown(question), answer=self.questions["no_picture"])
