"""Continue's `cn`, configured as docs/clients.md says."""

import json
from pathlib import Path

import coding_agents
from checks import BASE_URL


def set_up(home: Path, key: str, model: str) -> dict[str, str]:
    entry = {"name": "Hearth", "provider": "openai", "model": model, "apiBase": BASE_URL, "apiKey": key}
    config = {"name": "Hearth", "version": "0.0.1", "schema": "v1", "models": [entry]}
    (home / ".continue").mkdir()
    (home / ".continue" / "config.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return {}


coding_agents.run("cn", set_up, "--auto", "-p")
