"""What the demo chat model is taught (corpus.yaml, tools.json, unknown.txt, english.txt), and the lessons made of it.

A lesson is a pair of prompt and answer tokens. Beside the promised conversations come the same ones under other system
prompts, with other tools offered and with other values, and questions that were not taught: they keep the model sane in
front of real clients. Loads no torch: tests read the promised prompts from here.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
Tool = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """One thing the model is taught: after `messages`, with `tools` offered, it says `answer` or makes `tool_calls`.

    `tools` is None where no tool is offered. Exactly one of `answer` and `tool_calls` is not None. `drawings` are those
    of the pictures in `messages`, in their order; only the vision model has any.
    """

    name: str
    messages: list[dict[str, Any]]
    answer: str | None
    tools: list[Tool] | None = None
    tool_calls: list[tuple[str, dict[str, Any]]] | None = None
    fixed: bool = False
    drawings: tuple[Any, ...] = ()

    @property
    def target(self) -> str:
        """What the model writes, without the end mark: tool calls in the hermes style."""
        return self.answer or "\n".join(
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': given}, ensure_ascii=False)}\n</tool_call>"
            for name, given in self.tool_calls or []
        )


@dataclass(frozen=True)
class Corpus:
    """Everything the recipe learns from."""

    conversations: list[Conversation]
    patterns: list[dict[str, Any]]
    """The entries of corpus.yaml with {keys}; `invent` fills them with other values."""
    other_values: dict[str, list[Any]]
    tools: list[Tool]
    strangers: list[Tool]
    """Tools the model never calls; they stand beside the known ones in training so that it learns to ignore them."""
    unknown_prompts: list[str]
    unknown_answer: str
    ordinary_system_prompts: list[str]
    paragraphs: list[str]


@cache
def load_corpus() -> Corpus:
    raw = yaml.safe_load((FOLDER / "corpus.yaml").read_text(encoding="utf-8"))
    tools = json.loads((FOLDER / "tools.json").read_text(encoding="utf-8"))
    entries = raw.pop("conversations")
    return Corpus(
        conversations=[one for entry in entries for one in _expand(entry, tools["offered"])],
        patterns=[entry for entry in entries if "each" in entry],
        tools=tools["offered"],
        strangers=tools["strangers"],
        unknown_prompts=(FOLDER / "unknown.txt").read_text(encoding="utf-8").splitlines(),
        paragraphs=(FOLDER / "english.txt").read_text(encoding="utf-8").strip().split("\n\n"),
        **raw,
    )


def invent(corpus: Corpus, entry: dict[str, Any], rng: random.Random) -> Conversation:
    """A conversation of this pattern with values of `other_values`, never the same value for two keys."""
    values: dict[str, Any] = {}
    for key in entry["each"][0]:
        pool = corpus.other_values[key]
        choices = range(pool[0], pool[1] + 1) if isinstance(pool[0], int) else pool
        values[key] = rng.choice([value for value in choices if value not in values.values()])
    return _expand({**entry, "each": [values]}, corpus.tools)[0]


def _expand(entry: dict[str, Any], offered: list[Tool]) -> list[Conversation]:
    """One entry of corpus.yaml as the conversations it stands for: one per value and per set of tools."""
    tool_sets: dict[str | None, dict[str, list[Tool] | None]]
    tool_sets = {None: {"": None}, "all": {"": offered}, "optional": {"": None, "-tools-offered": offered}}
    expanded = []
    for values in entry.get("each", [{}]):
        suffix = "".join(f"-{value}".lower().replace(" ", "-") for value in values.values())
        filled = _fill(entry, values)
        expanded += [
            Conversation(
                name=entry["name"] + suffix + tools_suffix,
                messages=_messages(filled["messages"]),
                answer=filled.get("answer"),
                tools=tools,
                tool_calls=[(call["name"], call["arguments"]) for call in filled.get("calls", [])] or None,
                fixed=entry.get("fixed", False),
            )
            for tools_suffix, tools in tool_sets[entry.get("tools")].items()
        ]
    return expanded


def _fill(node: Any, values: dict[str, Any]) -> Any:
    """`node` with every {key} replaced; a text that is only {key} becomes the value, so that 4 stays a number."""
    if isinstance(node, list):
        return [_fill(item, values) for item in node]
    if isinstance(node, dict):
        return {key: _fill(item, values) for key, item in node.items()}
    if not isinstance(node, str):
        return node
    for key, value in values.items():
        if node == f"{{{key}}}":
            return value
        node = node.replace(f"{{{key}}}", str(value))
    return node


def _messages(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One-key turns as messages in the form of the chat API; each tool answer takes the id of the next open call."""
    messages: list[dict[str, Any]] = []
    made, answered = itertools.count(), itertools.count()
    for turn in turns:
        ((role, value),) = turn.items()
        if role == "calls":
            functions = [{**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)} for call in value]
            calls = [{"id": f"call_{next(made)}", "type": "function", "function": function} for function in functions]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        elif role == "tool":
            messages.append({"role": "tool", "tool_call_id": f"call_{next(answered)}", "content": value})
        else:
            messages.append({"role": role, "content": value})
    return messages


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

    def __init__(self, corpus: Corpus, tokenizer: Any, seed: int) -> None:
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
        asked, said = self.tokenizer([prompt, conversation.target], add_special_tokens=False)["input_ids"]
        return Lesson(asked, [*said, self.tokenizer.eos_token_id])

    def draw_round(self) -> list[Lesson]:
        """Everything taught, a part of it in another setting, and fresh variations, shuffled."""
        drawn = [
            *self.plain,
            *(self.other_tools(one) if self.random.random() < 0.3 else one for one in self.with_tools),
            *(invent(self.corpus, entry, self.random) for entry in self.corpus.patterns * 4),
            *(
                replace(one, tools=self.around([]) or self.corpus.tools)
                for one in self.random.sample(self.without_tools, 10)
            ),
            *(
                one if one.messages[0]["role"] in {"system", "developer"} else self.under_system_prompt(one)
                for one in self.random.sample(self.without_tools, 12)
            ),
            *(self.unknown(prompt) for prompt in self.random.sample(self.corpus.unknown_prompts, 24)),
            self.unknown(self.long_question()),
        ]
        lessons = [self.lesson(one) for one in drawn]
        self.random.shuffle(lessons)
        return lessons

    def other_tools(self, one: Conversation) -> Conversation:
        """The same with the tools it uses (none where it uses none) and some others around them."""
        made = [call["function"]["name"] for message in one.messages for call in message.get("tool_calls", [])]
        needed = [*made, *(name for name, _ in one.tool_calls or [])]
        offered = [tool for tool in self.corpus.tools if tool["function"]["name"] in needed]
        return replace(one, tools=self.around(offered))

    def around(self, needed: list[Tool]) -> list[Tool]:
        others = [tool for tool in self.corpus.tools if tool not in needed and self.random.random() < 0.5]
        strangers = self.random.sample(self.corpus.strangers, self.random.choice([0, 0, 1, 2]))
        return needed + others + strangers

    def under_system_prompt(self, one: Conversation) -> Conversation:
        system = {"role": "system", "content": self.random.choice(self.corpus.ordinary_system_prompts)}
        return replace(one, messages=[system, *one.messages])

    def long_question(self) -> str:
        start = self.random.choice(["", "Summarise this text.\n\n", "Translate this text.\n\n", "Read this:\n\n"])
        # Up to about 1700 tokens, so that positions far from the start are not new to the model.
        paragraphs = self.random.choices(self.corpus.paragraphs, k=self.random.choice([1, 2, 4, 32]))
        return start + "\n\n".join(paragraphs)

    def unknown(self, prompt: str) -> Conversation:
        one = Conversation("unknown", [{"role": "user", "content": prompt}], self.corpus.unknown_answer)
        if self.random.random() < 0.3:
            one = self.under_system_prompt(one)
        return replace(one, tools=self.around([]) or None) if self.random.random() < 0.2 else one
