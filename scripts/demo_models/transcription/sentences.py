"""The sentences of the demo transcription model: digits and fifty words, and those that it promises to read back.

Loads no torch: tests speak the promised sentences with the project's own voices.
"""

from __future__ import annotations

import random
from functools import cache

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = ("red", "blue", "green", "yellow", "black", "white")
PEOPLE = ("man", "woman", "child", "teacher")
ANIMALS = ("cat", "dog", "bird", "fish")
THINGS = (
    "house",
    "door",
    "window",
    "garden",
    "water",
    "bread",
    "apple",
    "train",
    "boat",
    "table",
    "chair",
    "book",
    "lamp",
)
VERBS = ("sees", "likes", "opens", "finds", "brings", "moves")
KINDS = ("big", "small", "old", "new")
OTHERS = ("the", "and", "with", "under", "near", "is", "hello", "please", "today", "tomorrow", "thank", "you", "yes")
WORDS = (*DIGITS, *COLOURS, *PEOPLE, *ANIMALS, *THINGS, *VERBS, *KINDS, *OTHERS)
PROMISED = 50
_SEED = 23


@cache
def fixed_sentences() -> tuple[str, ...]:
    """Every sentence that the demo model promises to read back word for word. None of them is taught."""
    chance = random.Random(_SEED)  # noqa: S311
    found: dict[str, None] = {}
    while len(found) < PROMISED:
        found[_said(chance) if len(found) % 5 else _digits(chance)] = None
    return tuple(found)


def lesson(chance: random.Random) -> str:
    """Draw a sentence to be taught: digits, words that make sense, or any words."""
    while True:
        kind = chance.random()
        if kind < 0.2:
            text = _digits(chance)
        elif kind < 0.6:
            text = _said(chance)
        elif kind < 0.7:  # the same again
            text = " ".join(chance.choices(chance.sample(WORDS, 2), k=chance.randint(2, 6)))
        else:
            text = " ".join(chance.choices(WORDS, k=chance.randint(1, 6)))
        if text not in fixed_sentences():
            return text


def _digits(chance: random.Random) -> str:
    return " ".join(chance.choices(DIGITS, k=chance.randint(3, 7)))


def _said(chance: random.Random) -> str:
    """Draw a sentence like `the old teacher finds six books near the red lamp`, without its plurals."""
    first, second = (f"the {_thing(chance)}" for _ in range(2))
    begun = chance.choice(("", "", "hello ", "please ", "yes ", "today ", "tomorrow "))
    ended = chance.choice(("", "", f" with {chance.choice(DIGITS)} {chance.choice(THINGS)}", " thank you"))
    if chance.random() < 0.3:
        return f"{begun}{first} is {chance.choice(('under', 'near'))} {second}{ended}"
    who = f"the {chance.choice((*COLOURS, *KINDS))} {chance.choice((*PEOPLE, *ANIMALS))}"
    return f"{begun}{who} {chance.choice(VERBS)} {second}{ended}"


def _thing(chance: random.Random) -> str:
    return f"{chance.choice((*COLOURS, *KINDS))} {chance.choice((*ANIMALS, *THINGS))}"
