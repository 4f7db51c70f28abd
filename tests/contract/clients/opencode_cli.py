"""OpenCode, configured as docs/clients.md says."""

import json
from pathlib import Path

import coding_agents
from checks import BASE_URL


def set_up(home: Path, key: str, model: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Hearth",
        "options": {"baseURL": BASE_URL, "apiKey": "{env:HEARTH_KEY}"},
        "models": {model: {"name": "Hearth", "limit": {"context": 65536, "output": 4096}}},
    }
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True)
    # `opencode run` takes the model from its file, as its window does from the person.
    config = {"provider": {"hearth": provider}, "model": f"hearth/{model}"}
    (folder / "opencode.json").write_text(json.dumps(config), encoding="utf-8")
    return {"HEARTH_KEY": key}


coding_agents.run("opencode", set_up, "run")
