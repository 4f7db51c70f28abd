"""Which of vLLM's tool and reasoning parsers fits a model: by its family, unless models.yaml says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import ChatModelSpec

# `model_type` of config.json -> (tool parser, reasoning parser)
FAMILIES: dict[str, tuple[str | None, str | None]] = {
    "apertus": ("apertus", None),
    "deepseek_v3": ("deepseek_v3", "deepseek_r1"),
    "deepseek_v32": ("deepseek_v32", "deepseek_v3"),
    "ernie4_5_moe": ("ernie45", "ernie45"),
    "gemma4": ("gemma4", "gemma4"),
    "glm4_moe": ("glm45", "glm45"),
    "glm4_moe_lite": ("glm47", "glm45"),
    "glm4v_moe": ("glm45", "glm45"),
    "glm_moe_dsa": ("glm47", "glm45"),
    "gpt_oss": ("openai", "openai_gptoss"),
    "granite": ("granite", None),
    "granitemoehybrid": ("granite4", None),
    "hunyuan_v1_moe": ("hunyuan_a13b", "hunyuan_a13b"),
    "idefics3": ("hermes", None),  # has no calls of its own: this is how our demo model writes them
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "lfm2": ("lfm2", None),
    "lfm2_moe": ("lfm2", None),
    "llama": ("llama3_json", None),
    "llama4": ("llama4_pythonic", None),
    "longcat_flash": ("longcat", None),
    "minimax_m2": ("minimax_m2", "minimax_m2"),
    "mistral": ("mistral", None),
    "mistral3": ("mistral", None),
    "olmo3": ("olmo3", "olmo3"),
    "qwen2": ("hermes", None),
    "qwen2_5_vl": ("hermes", None),
    "qwen2_moe": ("hermes", None),
    "qwen2_vl": ("hermes", None),
    "qwen3": ("hermes", "qwen3"),
    "qwen3_5": ("qwen3_coder", "qwen3"),
    "qwen3_5_moe": ("qwen3_coder", "qwen3"),
    "qwen3_moe": ("hermes", "qwen3"),
    "qwen3_next": ("hermes", "qwen3"),
    "qwen3_vl": ("hermes", "qwen3"),
    "qwen3_vl_moe": ("hermes", "qwen3"),
    "seed_oss": ("seed_oss", "seed_oss"),
    "step3_vl": ("step3", "step3"),
    "step3p5": ("step3p5", "step3p5"),
}
# Members of a family that call tools in another way than it does say so in their chat template (Qwen3-Coder).
_IN_TEMPLATE = {("hermes", "<function="): "qwen3_coder"}


def parsers_for(model_type: str, chat_template: str | None, spec: ChatModelSpec) -> tuple[str | None, str | None]:
    """Return (tool parser, reasoning parser); None means that none is used.

    A tool parser is only chosen for a model that claims `function_calling`. A family's reasoning parser is
    only chosen when the chat template knows of thinking: the same family has members that do not think, and
    their whole answer would be taken for reasoning. `none` in models.yaml switches a parser off.
    """
    family_tool, family_reasoning = FAMILIES.get(model_type, (None, None))
    if model_type != "gpt_oss" and "think" not in (chat_template or ""):
        family_reasoning = None
    for (parser, phrase), better in _IN_TEMPLATE.items():
        if parser == family_tool and phrase in (chat_template or ""):
            family_tool = better
    tool = spec.engine.tool_parser or family_tool
    reasoning = spec.engine.reasoning_parser or family_reasoning
    if "function_calling" not in spec.capabilities:
        tool = None
    return (None if tool == "none" else tool), (None if reasoning == "none" else reasoning)
