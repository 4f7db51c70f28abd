"""Which of vLLM's tool and reasoning parsers fits a model: by its family, unless models.yaml says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import ModelSpec

# `model_type` of config.json -> (tool parser, reasoning parser)
FAMILIES: dict[str, tuple[str | None, str | None]] = {
    "qwen2": ("hermes", None),
    "qwen2_moe": ("hermes", None),
    "qwen3": ("hermes", "qwen3"),
    "qwen3_moe": ("hermes", "qwen3"),
    "llama": ("llama3_json", None),
    "mistral": ("mistral", None),
    "mistral3": ("mistral", None),
    "gpt_oss": ("openai", "openai_gptoss"),
    "granite": ("granite", None),
    "glm4_moe": ("glm45", "glm45"),
    "deepseek_v3": ("deepseek_v3", "deepseek_r1"),
}


def parsers_for(model_type: str, chat_template: str | None, spec: ModelSpec) -> tuple[str | None, str | None]:
    """Return (tool parser, reasoning parser); None means that none is used.

    A tool parser is only chosen for a model that claims `function_calling`. A family's reasoning parser is
    only chosen when the chat template knows of thinking: the same family has members that do not think, and
    their whole answer would be taken for reasoning. `none` in models.yaml switches a parser off.
    """
    family_tool, family_reasoning = FAMILIES.get(model_type, (None, None))
    if model_type != "gpt_oss" and "think" not in (chat_template or ""):
        family_reasoning = None
    tool = spec.engine.tool_parser or family_tool
    reasoning = spec.engine.reasoning_parser or family_reasoning
    if "function_calling" not in spec.capabilities:
        tool = None
    return (None if tool == "none" else tool), (None if reasoning == "none" else reasoning)
