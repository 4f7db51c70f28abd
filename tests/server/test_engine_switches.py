"""Switches of vLLM in models.yaml on a real engine: guessed tokens change no text, more arguments arrive or are named."""

import shutil
from pathlib import Path

import httpx2
import pytest
from demo_models.promised import fixed_prompts
from serving import Server

from engine.demo import weights_dir

pytestmark = [pytest.mark.engine, pytest.mark.rounds]

YAML = """\
models:
  plain: {task: chat, tier: t, capabilities: [chat, function_calling], weights: own}
  guessing:
    task: chat
    tier: t
    capabilities: [chat, function_calling]
    weights: own
    engine:
      speculative: {method: ngram, tokens: 4, longest_match: 3, shortest_match: 1}
      engine_args: {max_num_batched_tokens: 1024}
tiers:
  t: {models: [t]}
  standard: {models: [t]}
"""


def test_guessed_tokens_change_no_text_and_save_steps(tmp_path: Path):
    (tmp_path / "models.yaml").write_text(YAML)
    shutil.copytree(weights_dir("chat"), tmp_path / "weights" / "own")  # a demo is served without switches
    with Server(tmp_path, environment={"HEARTH_MODELS": str(tmp_path / "models.yaml")}) as server:
        assert server.admin_key is not None
        headers = {"Authorization": f"Bearer {server.admin_key.text}"}
        with httpx2.Client(base_url=server.base_url, headers=headers, timeout=120) as client:
            for one in fixed_prompts()[::4]:
                body = {"messages": one.messages, "tools": one.tools, "temperature": 0}
                body = {key: value for key, value in body.items() if value is not None}
                plain, guessed = (
                    client.post("/chat/completions", json={"model": name, **body}).json()
                    for name in ("plain", "guessing")
                )
                assert texts(plain) == texts(guessed), one.name
                assert plain["usage"]["completion_tokens"] == guessed["usage"]["completion_tokens"]
            for field, value in (("min_p", 0.1), ("logit_bias", {"5": 1})):
                body = {"messages": [{"role": "user", "content": "Hi"}], field: value}
                refused = client.post("/chat/completions", json={"model": "guessing", **body})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
                assert client.post("/chat/completions", json={"model": "plain", **body}).status_code == 200
            metrics = httpx2.get(f"{server.root_url}/metrics", headers=headers, timeout=60).text
    accepted = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
    assert len(accepted) == 1
    assert float(accepted[0].split()[-1]) > 0


def texts(answer: dict) -> tuple:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return message["content"], calls, choice["finish_reason"]
