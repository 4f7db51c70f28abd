"""A model of one's own, put into the weights directory, on a real server: what it can do, and what is changed there."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serving import Server

from engine import demo

pytestmark = [pytest.mark.engine, pytest.mark.rounds]

YAML = """\
models:
  mine:
    task: chat
    tier: standard
    capabilities: [chat, streaming, function_calling, vision]
    weights: mine
tiers:
  standard: {models: [standard]}
"""
PLAIN = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"


def test_a_folder_is_served_with_what_it_can_do_and_read_again_when_it_changes(tmp_path: Path) -> None:
    folder = tmp_path / "weights" / "mine"
    shutil.copytree(demo.weights_dir("chat"), folder)
    (tmp_path / "models.yaml").write_text(YAML)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 2.0}')
    with Server(tmp_path, environment={"HEARTH_MODELS": str(tmp_path / "models.yaml")}) as server:
        assert server.admin_key is not None
        headers = {"Authorization": f"Bearer {server.admin_key.text}"}
        with httpx2.Client(base_url=server.base_url, headers=headers, timeout=60) as client:
            before = prompt_tokens(client)
            assert capabilities(client) == ["chat", "streaming", "function_calling"]
            assert "models.yaml claims `vision`, but the model takes no pictures" in server.log()

            assert texts(client) == texts(client, temperature=2) != texts(client, temperature=1)

            write_template(folder, PLAIN * 3)
            assert "changed: mine" in server.hearth("reload")
            server.wait_until_ready()
            assert prompt_tokens(client) > before
            assert capabilities(client) == ["chat", "streaming"]
            assert "nothing has changed" in server.hearth("reload")

            write_template(folder, None)
            assert "changed: mine" in server.hearth("reload")
            server.wait_until_ready()
            assert capabilities(client) == ["streaming"]
            text = client.post("/completions", json={"model": "mine", "prompt": "Once", "max_tokens": 4})
            assert text.json()["usage"]["completion_tokens"] == 4
            refused = client.post("/chat/completions", json=question())
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_capability")

            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"head_dim": 17}))
            os.kill(server.pid, signal.SIGHUP)  # the command ends with 0 or 1, by how soon the model fails
            server.wait_for_line(r"mine cannot be loaded\. mine: \w+Error: .*`head_dim`=17")
            assert "3 times in a row" not in server.log()


def write_template(folder: Path, template: str | None) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def question() -> dict[str, Any]:
    return {"model": "mine", "messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 1}


def prompt_tokens(client: httpx2.Client) -> int:
    answer = client.post("/chat/completions", json=question())
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["prompt_tokens"]
    return tokens


def texts(client: httpx2.Client, **sampling: float) -> list[str]:
    """What several seeds make of a text that the model does not know."""
    body = {"model": "mine", "prompt": "Zebras hum", "max_tokens": 12} | sampling
    answers = [client.post("/completions", json=body | {"seed": seed}).json() for seed in range(5)]
    return [answer["choices"][0]["text"] for answer in answers]


def capabilities(client: httpx2.Client) -> list[str]:
    (model,) = client.get("/models").json()["data"]
    found: list[str] = model["capabilities"]
    return found
