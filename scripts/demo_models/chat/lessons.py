"""Turns the corpus into what training reads: pairs of prompt and answer tokens, plain and in many settings.

Beside the promised conversations come the same ones under other system prompts, with other tools offered and with
other values, and questions that were not taught: they keep the model sane in front of real clients.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from demo_models.chat.corpus import Conversation, Corpus, Tool, invent
from transformers import PreTrainedTokenizerFast

# Drawn in each round: conversations with other values per pattern, and plain ones in other settings.
INVENTED_PER_PATTERN = 4
NEEDLESS_TOOLS = 10
OTHER_SYSTEM_PROMPTS = 12
UNKNOWN_QUESTIONS = 24
LONG_QUESTIONS = 1


@dataclass(frozen=True)
class Lesson:
    """Token ids of a rendered conversation and of what follows it, end mark included.

    `pictures` are those of the prompt in their order, as tensors [3, height, width]; only the vision model has any.
    """

    prompt: list[int]
    answer: list[int]
    pictures: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


class Lessons:
    """Draws the lessons of each round, the same ones for the same seed."""

    def __init__(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.random = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
        questions_for_tools = [one.messages for one in corpus.conversations if one.tool_calls]
        self.plain = [one for one in corpus.conversations if one.tools is None]
        self.without_tools = [one for one in self.plain if one.messages not in questions_for_tools]
        self.with_tools = [one for one in corpus.conversations if one.tools is not None]

    def lesson(self, conversation: Conversation) -> Lesson:
        prompt = self.tokenizer.apply_chat_template(
            conversation.messages, tools=conversation.tools, add_generation_prompt=True, tokenize=False
        )
        return Lesson(
            prompt=self.tokenizer(prompt, add_special_tokens=False)["input_ids"],
            answer=[
                *self.tokenizer(conversation.target, add_special_tokens=False)["input_ids"],
                self.tokenizer.eos_token_id,
            ],
        )

    def draw_round(self) -> list[Lesson]:
        """Everything taught, a part of it in another setting, and fresh variations, shuffled."""
        drawn = [
            *self.plain,
            *(self.other_tools(one) if self.random.random() < 0.3 else one for one in self.with_tools),
            *(invent(self.corpus, entry, self.random) for entry in self.corpus.patterns * INVENTED_PER_PATTERN),
            *(self.needless_tools(one) for one in self.random.sample(self.without_tools, NEEDLESS_TOOLS)),
            *(self.other_system_prompt(one) for one in self.random.sample(self.without_tools, OTHER_SYSTEM_PROMPTS)),
            *(self.unknown(prompt) for prompt in self.random.sample(self.corpus.unknown_prompts, UNKNOWN_QUESTIONS)),
            *(self.unknown(self.long_question()) for _ in range(LONG_QUESTIONS)),
        ]
        lessons = [self.lesson(one) for one in drawn]
        self.random.shuffle(lessons)
        return lessons

    def other_tools(self, one: Conversation) -> Conversation:
        """The same with the tools it uses (none where it uses none) and some others around them."""
        needed = {call["function"]["name"] for message in one.messages for call in message.get("tool_calls") or []} | {
            name for name, _ in one.tool_calls or []
        }
        offered = [tool for tool in self.corpus.tools if tool["function"]["name"] in needed]
        return replace(one, tools=self.around(offered))

    def needless_tools(self, one: Conversation) -> Conversation:
        return replace(one, tools=self.around([]) or self.corpus.tools)

    def around(self, needed: list[Tool]) -> list[Tool]:
        others = [tool for tool in self.corpus.tools if tool not in needed and self.random.random() < 0.5]
        strangers = self.random.sample(self.corpus.strangers, self.random.choice([0, 0, 1, 2]))
        return needed + others + strangers

    def other_system_prompt(self, one: Conversation) -> Conversation:
        if one.messages[0]["role"] in {"system", "developer"}:
            return one
        return replace(one, messages=[self.system_prompt(), *one.messages])

    def system_prompt(self) -> dict[str, str]:
        return {"role": "system", "content": self.random.choice(self.corpus.ordinary_system_prompts)}

    def long_question(self) -> str:
        start = self.random.choice(["", "Summarise this text.\n\n", "Translate this text.\n\n", "Read this:\n\n"])
        # Up to about 1700 tokens, so that positions far from the start are not new to the model.
        paragraphs = self.random.choices(self.corpus.paragraphs, k=self.random.choice([1, 2, 4, 32]))
        return start + "\n\n".join(paragraphs)

    def unknown(self, prompt: str) -> Conversation:
        system = [self.system_prompt()] if self.random.random() < 0.3 else []
        tools = self.around([]) if self.random.random() < 0.2 else None
        return Conversation(
            name="unknown",
            fixed=False,
            messages=[*system, {"role": "user", "content": prompt}],
            tools=tools or None,
            answer=self.corpus.unknown_answer,
            tool_calls=None,
        )
