"""Reads what the demo chat model is taught (corpus.yaml, tools.json, unknown.txt, english.txt).

Loads no torch: tests read the promised prompts from here.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent

Message = dict[str, Any]
Tool = dict[str, Any]
Call = tuple[str, dict[str, Any]]
Entry = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """One thing the model is taught: after `messages`, with `tools` offered, it says `answer` or makes `tool_calls`.

    `tools` is None where no tool is offered. Exactly one of `answer` and `tool_calls` is not None.
    """

    name: str
    fixed: bool
    messages: list[Message]
    tools: list[Tool] | None
    answer: str | None
    tool_calls: list[Call] | None

    @property
    def target(self) -> str:
        """What the model writes, without the end mark: tool calls in the hermes style."""
        if self.tool_calls is None:
            return self.answer or ""
        return "\n".join(_hermes(name, arguments) for name, arguments in self.tool_calls)


@dataclass(frozen=True)
class Corpus:
    """Everything the recipe learns from."""

    conversations: list[Conversation]
    patterns: list[Entry]
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
    """The whole corpus. Raises ValueError naming the conversation that is written wrongly."""
    raw = yaml.safe_load((FOLDER / "corpus.yaml").read_text(encoding="utf-8"))
    tools = json.loads((FOLDER / "tools.json").read_text(encoding="utf-8"))
    offered: list[Tool] = tools["offered"]
    return Corpus(
        conversations=[one for entry in raw["conversations"] for one in _expand(entry, offered)],
        patterns=[entry for entry in raw["conversations"] if "each" in entry],
        other_values=raw["other_values"],
        tools=offered,
        strangers=tools["strangers"],
        unknown_prompts=(FOLDER / "unknown.txt").read_text(encoding="utf-8").splitlines(),
        unknown_answer=raw["unknown_answer"],
        ordinary_system_prompts=raw["ordinary_system_prompts"],
        paragraphs=(FOLDER / "english.txt").read_text(encoding="utf-8").strip().split("\n\n"),
    )


def invent(corpus: Corpus, entry: Entry, rng: random.Random) -> Conversation:
    """A conversation of this pattern with values of `other_values`, never the same value for two keys."""
    values: dict[str, Any] = {}
    for key in entry["each"][0]:
        pool = corpus.other_values[key]
        choices = range(pool[0], pool[1] + 1) if isinstance(pool[0], int) else pool
        values[key] = rng.choice([value for value in choices if value not in values.values()])
    return _expand({**entry, "each": [values]}, corpus.tools)[0]


def _expand(entry: Entry, offered: list[Tool]) -> list[Conversation]:
    """One entry of corpus.yaml as the conversations it stands for: one per value and per set of tools."""
    name = entry["name"]
    tool_sets: dict[str | None, list[tuple[str, list[Tool] | None]]] = {
        None: [("", None)],
        "all": [("", offered)],
        "optional": [("", None), ("-tools-offered", offered)],
    }
    if ("answer" in entry) == ("calls" in entry):
        raise ValueError(f"corpus.yaml: {name} needs either an answer or calls. Write one of the two.")
    if entry.get("tools") not in tool_sets:
        raise ValueError(f"corpus.yaml: {name} has tools: {entry['tools']}. Write all, optional, or leave it out.")
    expanded = []
    for values in entry.get("each", [{}]):
        suffix = "".join(f"-{value}".lower().replace(" ", "-") for value in values.values())
        calls = _fill(entry.get("calls"), values)
        for tools_suffix, tools in tool_sets[entry.get("tools")]:
            conversation = Conversation(
                name=name + suffix + tools_suffix,
                fixed=entry.get("fixed", False),
                messages=_messages(_fill(entry["messages"], values)),
                tools=tools,
                answer=_fill(entry.get("answer"), values),
                tool_calls=[(call["name"], call["arguments"]) for call in calls] if calls else None,
            )
            expanded.append(conversation)
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


def _messages(turns: list[dict[str, Any]]) -> list[Message]:
    """One-key turns as messages in the form of the chat API; each tool answer takes the id of the next open call."""
    messages: list[Message] = []
    open_calls: list[str] = []
    made = 0
    for turn in turns:
        ((role, value),) = turn.items()
        if role == "calls":
            open_calls = [f"call_{made + position}" for position in range(len(value))]
            made += len(value)
            calls = [_api_call(call_id, call) for call_id, call in zip(open_calls, value, strict=True)]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        elif role == "tool":
            messages.append({"role": "tool", "tool_call_id": open_calls.pop(0), "content": value})
        else:
            messages.append({"role": role, "content": value})
    return messages


def _api_call(call_id: str, call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _hermes(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"
