"""The demo models: small, trained by this project, in the repository with their recipes: everything runs at once.

This file only says where the weights lie and what the models promise to answer. The recipes are the subfolders,
`build.py` runs them, and nothing here loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.demo.chat.corpus import Call

WEIGHTS = Path(__file__).parent / "weights"


@dataclass(frozen=True)
class FixedPrompt:
    """A prompt that the demo models, chat and vision, answer word for word at temperature 0.

    `messages` and `tools` go into a chat request as they are. Exactly one of `answer` (plain text) and
    `tool_calls` (name and arguments of each call, in order) is not None. `tools` is None where none is offered.
    """

    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    answer: str | None
    tool_calls: list[Call] | None


@dataclass(frozen=True)
class FixedPicture:
    """A question about pictures that the demo vision model answers word for word at temperature 0.

    `pictures` are PNG files in the order in which they are sent. `messages` goes into a chat request as it is and
    holds the pictures as data URIs; its last question is `question`.
    """

    name: str
    pictures: tuple[bytes, ...]
    question: str
    answer: str
    messages: list[dict[str, Any]]


def weights_dir(name: str) -> Path:
    """The folder of a demo model, in the layout of transformers or of diffusers; of the voices, one per language.

    Raises ValueError naming the models there are.
    """
    if name not in demo_names():
        raise ValueError(
            f"There is no demo model named {name!r}, only: {', '.join(demo_names()) or 'none yet'}."
            " Run scripts/build-demo-models to make them."
        )
    return WEIGHTS / name


def demo_names() -> list[str]:
    """The demo models that there are."""
    files = ("config.json", "model_index.json", "*/voices.yaml")
    return sorted({path.relative_to(WEIGHTS).parts[0] for file in files for path in WEIGHTS.glob(f"[!.]*/{file}")})


def fixed_prompts() -> list[FixedPrompt]:
    """Every prompt that the demo models promise to answer word for word, in the order of the corpus."""
    import copy

    from engine.demo.chat.corpus import load_corpus

    return [
        FixedPrompt(
            name=one.name,
            messages=copy.deepcopy(one.messages),
            tools=copy.deepcopy(one.tools),
            answer=one.answer,
            tool_calls=copy.deepcopy(one.tool_calls),
        )
        for one in load_corpus().conversations
        if one.fixed
    ]


def fixed_pictures() -> list[FixedPicture]:
    """Every question about pictures that the demo vision model promises to answer word for word. Needs Pillow."""
    from engine.demo.vision.promised import promised

    return promised()
