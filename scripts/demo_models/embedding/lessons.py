"""What the demo embedding model and the demo reranker learn: pairs of a question and the text that answers it.

Beside the pairs of texts.yaml and of the chat model's corpus come pairs of invented words that share some of them, so
that both models also find what they have never seen, by its words. Loads no torch: tests read the promised pairs here.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from demo_models.chat.corpus import load_corpus

_LETTERS = "eeeeaaaiiooutttnnssrrhhlldcumfpgwybvk"


@dataclass(frozen=True)
class Text:
    """A text, the questions that are taught with it, and one that is not: tests ask it."""

    text: str
    taught: tuple[str, ...]
    held_out: str


@cache
def texts() -> tuple[Text, ...]:
    raw = yaml.safe_load(Path(__file__).with_name("texts.yaml").read_text(encoding="utf-8"))["texts"]
    return tuple(Text(one["text"], tuple(one["questions"][:-1]), one["questions"][-1]) for one in raw)


class Pairs:
    """Draws pairs of a question and the text that answers it, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
        corpus = load_corpus()
        asked = [one for one in corpus.conversations if one.answer and len(one.messages) == 1 and one.tools is None]
        answers = {one.answer: str(one.messages[0]["content"]) for one in asked}  # each answer once
        self.taught = [(question, one.text) for one in texts() for question in one.taught]
        self.taught += [(question, str(answer)[:400]) for answer, question in answers.items()]
        self.sentences = [*re.split(r"(?<=[.!?])\s+", "\n".join(corpus.paragraphs)), *(one.text for one in texts())]
        self.words = sorted(set(re.findall(r"\w+", " ".join(self.sentences))))

    def draw(self, count: int) -> list[tuple[str, str]]:
        """Return so many pairs: half taught, of different texts, and half found by their words."""
        taught = self.random.sample(self.taught, len(self.taught))
        by_text = {text: question for question, text in taught}
        drawn = [(self._varied(question), text) for text, question in by_text.items()][: count // 2]
        return drawn + [self._by_words() for _ in range(count - len(drawn))]

    def _varied(self, question: str) -> str:
        """Lose a word now and then: questions come in many forms."""
        words = question.split()
        if len(words) > 3 and self.random.random() < 0.4:
            del words[self.random.randrange(len(words))]
        return " ".join(words)

    def _by_words(self) -> tuple[str, str]:
        """Some words of a sentence, or of an invented one, between words of no matter."""
        sentence = self.random.choice(self.sentences).split()
        if self.random.random() < 0.6:
            sentence = [self._word() for _ in range(self.random.randint(4, 16))]
        some = self.random.sample(sentence, min(len(sentence), self.random.randint(1, 4)))
        asked = [*some, *(self.random.choice(self.words) for _ in range(self.random.randint(0, 3)))]
        self.random.shuffle(asked)
        return " ".join(asked), " ".join(sentence)

    def _word(self) -> str:
        if self.random.random() < 0.5:
            return str(self.random.choice(self.words))
        return "".join(self.random.choice(_LETTERS) for _ in range(self.random.randint(3, 9)))
