"""Claude Code, set up as docs/messages.md says."""

from pathlib import Path

import coding_agents
from checks import BASE_URL


def set_up(home: Path, key: str, model: str) -> dict[str, str]:
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    return dict.fromkeys(models, model) | {
        "ANTHROPIC_BASE_URL": BASE_URL.removesuffix("/v1"),
        "ANTHROPIC_AUTH_TOKEN": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


unknown = "There's an issue with the selected model (nobody)"
coding_agents.run("claude", set_up, "--allowedTools=Bash", "-p", unknown_model_message=unknown)
