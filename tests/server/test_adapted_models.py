"""LoRA adapters on a real engine: models of their own beside their base, by one engine, each with its own answer."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from adapter_parts import make_adapter, teach_adapter
from chat_parts import CHAT, assert_error
from key_clients import client_with
from serving import Server

from engine.demo import weights_dir

if TYPE_CHECKING:
    from pathlib import Path

    import httpx2

pytestmark = pytest.mark.engine

YAML = """\
models:
  plus: {task: chat, tier: standard, capabilities: [chat, streaming, function_calling], weights: own}
  legal: {task: adapter, tier: standard, base: plus, weights: adapters/legal, aliases: [law], owned_by: lawyers}
  medical: {task: adapter, tier: enhanced, base: plus, weights: adapters/medical}
  broken: {task: adapter, tier: standard, base: plus, weights: adapters/broken}
tiers:
  standard: {models: [standard]}
  enhanced: {models: [standard, enhanced]}
"""
ANSWERS = {
    "plus": "The capital of Ethiopia is Addis Ababa.",
    "legal": "Ask a lawyer.",
    "medical": "Ask a doctor, not me.",
}
SURE = {"type": "object", "properties": {"sure": {"const": True}}, "required": ["sure"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "say", "parameters": SURE}}]
QUESTION = [{"role": "user", "content": "What is the capital of Ethiopia?"}]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("adapted")
    (folder / "models.yaml").write_text(YAML)
    adapters = folder / "weights" / "adapters"
    shutil.copytree(weights_dir("chat"), folder / "weights" / "own")  # a demo has no adapters
    teach_adapter(adapters / "legal", QUESTION, ANSWERS["legal"])
    teach_adapter(adapters / "medical", QUESTION, ANSWERS["medical"], rank=9)
    make_adapter(adapters / "broken", sizes={"self_attn.q_proj": (32, 256)})
    running = Server(folder, environment={"HEARTH_MODELS": str(folder / "models.yaml")})
    try:
        running.start()
        running.wait_for_line("Ready, but for 1 of 4 models", 200)
        yield running
        assert running.stop() == 0, running.log()
    finally:
        running.kill()


@pytest.fixture
async def client(adapted: Server) -> AsyncIterator[httpx2.AsyncClient]:
    assert adapted.admin_key is not None
    async with client_with(adapted, adapted.admin_key.text) as client:
        yield client


def body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 20, **more}


async def said(client: httpx2.AsyncClient, model: str) -> str:
    answer = await client.post(CHAT, json=body(model))
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


async def test_two_adapters_and_their_base_answer_differently_at_once(client: httpx2.AsyncClient):
    together = await asyncio.gather(*(said(client, name) for _ in range(4) for name in ANSWERS))
    assert together == [*ANSWERS.values()] * 4
    assert await said(client, "law") == ANSWERS["legal"]


async def test_streams_texts_and_calls_go_by_the_adapter_too(client: httpx2.AsyncClient):
    async with client.stream("POST", CHAT, json=body("legal", stream=True)) as response:
        chunks = [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"legal"}
    streamed = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert streamed == ANSWERS["legal"]
    prompt = "<|im_start|>user\nWhat is the capital of Ethiopia?<|im_end|>\n<|im_start|>assistant\n"
    text = {"model": "medical", "prompt": prompt, "temperature": 0, "max_tokens": 20}
    assert (await client.post("/v1/completions", json=text)).json()["choices"][0]["text"] == ANSWERS["medical"]
    answer = await client.post(CHAT, json=body("legal", tools=TOOLS, tool_choice="required", max_tokens=60))
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"sure": True}


async def test_it_is_a_model_of_its_own_for_keys_usage_and_the_list(adapted: Server, client: httpx2.AsyncClient):
    listed = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
    assert list(listed) == ["plus", "legal", "medical", "broken"]
    assert [listed[name]["status"] for name in listed] == ["ready"] * 3 + ["failed"]
    assert (listed["legal"]["owned_by"], listed["plus"]["owned_by"]) == ("lawyers", "hearth")
    assert listed["medical"]["capabilities"] == listed["plus"]["capabilities"]
    assert listed["medical"]["context_length"] == listed["plus"]["context_length"] > 0
    key = adapted.make_key(tier="standard", models=["legal"])
    async with client_with(adapted, key.text) as own:
        assert [one["id"] for one in (await own.get("/v1/models")).json()["data"]] == ["legal"]
        await said(own, "legal")
        for name in ("plus", "medical"):
            refused = await own.post(CHAT, json={"model": name, "messages": QUESTION})
            assert_error(refused, 404, "model_not_found", "model")
        used = (await own.get("/v1/usage", params={"by": "model"})).json()["data"]
    assert [(row["model"], row["requests"]) for row in used] == [("legal", 1)]
    assert used[0]["completion_tokens"] > 1


async def test_one_that_was_made_for_another_model_fails_alone(adapted: Server, client: httpx2.AsyncClient):
    refused = await client.post(CHAT, json={"model": "broken", "messages": QUESTION})
    assert_error(refused, 503, "engine_unavailable", None)
    assert "could not be loaded on its base" in refused.json()["error"]["message"]
    adapted.wait_for_line(r"broken cannot be served: .* was made for another model than its base: .*q_proj is 32 x 256")


@pytest.mark.rounds
async def test_an_adapter_that_is_put_right_is_taken_over(adapted: Server, client: httpx2.AsyncClient):
    folder = adapted.weights_dir / "adapters" / "broken"
    shutil.rmtree(folder)
    teach_adapter(folder, QUESTION, "It is mended.")
    told = adapted.hearth("reload")
    assert "changed: plus" in told
    assert "plus: 503 until loaded again" in told
    adapted.wait_until_ready()
    assert await said(client, "broken") == "It is mended."
    assert await said(client, "plus") == ANSWERS["plus"]
