"""OpenAI's Codex, configured as docs/clients.md says."""

from pathlib import Path

import coding_agents
from checks import BASE_URL

CONFIG = """\
model = "{model}"
model_provider = "hearth"
model_context_window = 65536

[model_providers.hearth]
name = "Hearth"
base_url = "{base_url}"
env_key = "HEARTH_KEY"
wire_api = "responses"
"""


def set_up(home: Path, key: str, model: str) -> dict[str, str]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(CONFIG.format(model=model, base_url=BASE_URL), encoding="utf-8")
    return {"HEARTH_KEY": key}


# Its sandbox is not what is checked, and does not exist everywhere.
coding_agents.run("codex", set_up, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access")
