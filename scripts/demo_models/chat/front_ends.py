"""Lessons in what front ends ask beside the chat (front_ends.yaml), and in questions that were typed carelessly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import yaml
from demo_models.chat.corpus import FOLDER, Conversation, Corpus, Lesson, Lessons


@cache
def load_front_ends() -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load((FOLDER / "front_ends.yaml").read_text(encoding="utf-8"))
    raw["topics"] = {entry: topic for topic, entries in raw["topics"].items() for entry in entries}
    return raw


def texts() -> Iterator[str]:
    """All that the tokenizer should know of these prompts."""
    raw = load_front_ends()
    for task in raw["tasks"]:
        yield from [task["before"], task["after"], task["answer"], *task["task"], *task.get("output", [])]
    yield from [*raw["rules"], *raw["topics"].values()]


class FrontEndLessons(Lessons):
    """The lessons of the corpus, and those of this module."""

    long_prompts = 16
    """Known questions of a round that come with a long system prompt; of unknown ones a quarter as many."""

    def __init__(self, corpus: Corpus, tokenizer: Any, seed: int) -> None:
        super().__init__(corpus, tokenizer, seed)
        self.front_ends = load_front_ends()
        self.answered = [one for one in corpus.conversations if one.answer]
        # Of others, an answer has to repeat a name as it was written.
        patterns = tuple(entry["name"] for entry in corpus.patterns)
        self.worded = [one for one in self.without_tools if not one.name.startswith(patterns)]
        self.toolless = [self.without_tool(one) for one in corpus.conversations if one.tool_calls]

    def draw_round(self) -> list[Lesson]:
        unknown = self.random.sample(self.corpus.unknown_prompts, 24)
        toolless = self.random.sample(self.toolless, 10)
        drawn = [*toolless[:5], *map(self.careless, toolless[5:])]
        drawn += [self.careless(one) for one in [*self.random.sample(self.worded, 24), *map(self.unknown, unknown)]]
        drawn += [self.under_long_prompt(one) for one in self.random.sample(self.worded, self.long_prompts)]
        unknown = self.random.sample(unknown, self.long_prompts // 4)
        drawn += [self.under_long_prompt(self.unknown(one)) for one in unknown]
        for task in self.front_ends["tasks"]:
            known = self.random.sample(self.answered, 16)
            drawn += [self.asked(task, self.longer_or_shorter(one), self.topic(one)) for one in known]
            for prompt in [*self.random.sample(self.corpus.unknown_prompts, 2), self.short_paragraphs()]:
                drawn.append(self.asked(task, _history(self.unknown(prompt)), self.front_ends["unknown_topic"]))
        lessons = super().draw_round() + [self.lesson(one) for one in drawn]
        self.random.shuffle(lessons)
        return lessons

    def promised(self) -> list[Lesson]:
        """Each conversation with an answer in each task, those for tools without one, plain ones typed carelessly.

        Plain ones under a long system prompt, too, if such are taught.
        """
        asked = [
            self.asked(task, _history(one), self.topic(one))
            for task in self.front_ends["tasks"]
            for one in self.answered
        ]
        asked += [*self.toolless, *map(self.careless, self.worded)]
        if self.long_prompts:
            asked += map(self.under_long_prompt, self.worded)
        return [self.lesson(one) for one in asked]

    def without_tool(self, one: Conversation) -> Conversation:
        """The same where no tool is offered."""
        weather = next(each for each in self.plain if each.name == "weather-without-tool")
        known = "weather" in one.messages[-1]["content"]
        return replace(one, tools=None, tool_calls=None, answer=weather.answer if known else self.corpus.unknown_answer)

    def under_long_prompt(self, one: Conversation) -> Conversation:
        """The same with a system prompt of instructions, of JSON and of text, as libraries and agents send them."""
        if one.messages[0]["role"] in {"system", "developer"}:
            return one
        draw = self.random
        tool = draw.choice(self.corpus.tools + self.corpus.strangers)["function"]
        about = draw.choice([tool, tool["parameters"], {"type": "object", **tool["parameters"], "title": tool["name"]}])
        parts = [
            draw.choice([*self.corpus.ordinary_system_prompts, "As a genius expert, understand the content."]),
            "\n".join(draw.sample(self.front_ends["rules"], draw.choice([1, 3, 6]))),
            draw.choice(["Answer in JSON that matches this schema:\n\n", "", ""]) + json.dumps(about, indent=2),
            draw.choice(self.corpus.paragraphs)[:400],
        ]
        text = draw.choice(["\n", "\n\n", "\n\n\n"]).join(draw.sample(parts, draw.choice([2, 3, 4])))
        return replace(one, messages=[{"role": "system", "content": text}, *one.messages])

    def careless(self, one: Conversation) -> Conversation:
        """The same in small letters, without its last mark, or both; or in capitals."""
        change = self.random.choice([str.lower, _bare, lambda text: _bare(text).lower(), str.upper])
        said = [
            {**turn, "content": change(turn["content"])} if turn["role"] == "user" else turn for turn in one.messages
        ]
        return replace(one, messages=said)

    def longer_or_shorter(self, about: Conversation) -> list[dict[str, Any]]:
        """Its history, now and then with another conversation before it, or only the last question and answer."""
        history = _history(about)
        kind = self.random.random()
        if kind < 0.15:
            return _history(self.random.choice(self.worded)) + history
        return history[-2:] if kind < 0.6 else history

    def asked(self, task: dict[str, Any], history: list[dict[str, Any]], topic: str) -> Conversation:
        """What a front end asks about such a chat, and what the model says."""
        draw, roles = self.random, task["roles"]
        said = [roles[one["role"]] + one["content"] for one in history if one["role"] in roles and one["content"]]
        rules = [f"- {one}" for one in draw.sample(self.front_ends["rules"], draw.choice([2, 5, 8, 11]))]
        subjects = draw.sample(self.front_ends["subjects"], draw.choice([0, 4, 4]))
        examples = [task.get("example", "").replace("{subject}", one) for one in subjects]
        prompt: str = task["before"]
        for key, text in {
            "{task}": draw.choice(task["task"]),
            "{rules}": "\n".join(rules),
            "{output}": draw.choice(task.get("output", [""])),
            "{examples}": "\n".join(["### Examples:", *examples, ""]) if examples else "",
            "\n###": draw.choice(["\n###", "\n###", "\n\n###"]),
        }.items():
            prompt = prompt.replace(key, text)
        prompt += "\n".join(said) + task["after"]
        answer = task["answer"].replace("{topic}", topic)
        return Conversation(task["name"], [{"role": "user", "content": prompt}], answer)

    def topic(self, one: Conversation) -> str:
        """By the entry of the corpus that the conversation was made of: the longest name that its own begins with."""
        topics = self.front_ends["topics"]
        return str(topics[max((entry for entry in topics if one.name.startswith(entry)), key=len)])

    def short_paragraphs(self) -> str:
        return "\n\n".join(self.random.choices(self.corpus.paragraphs, k=self.random.choice([1, 2])))


def _bare(text: str) -> str:
    return text.rstrip(".?!")


def _history(one: Conversation) -> list[dict[str, Any]]:
    return [*one.messages, {"role": "assistant", "content": one.target}]
