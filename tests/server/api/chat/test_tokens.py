"""`/tokenize` and `/detokenize`, in the shapes of vLLM's server, with and without /v1."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from chat_parts import CHAT, HELLO, MODEL, PROMPTS, assert_error
from serving import CANARY, Server

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

TOOLS = PROMPTS["call-two-cities-paris-tokyo"].tools


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_text_becomes_tokens_and_a_text_again(http: httpx2.AsyncClient, prefix: str):
    text = "The capital of France is Paris. ሰላም 😀"
    made = (
        await http.post(f"{prefix}/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True})
    ).json()
    assert list(made) == ["count", "max_model_len", "tokens", "token_strs"]
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) > 5
    assert made["max_model_len"] == 32768
    back = await http.post(f"{prefix}/detokenize", json={"model": MODEL, "tokens": made["tokens"]})
    assert back.json() == {"prompt": text}
    long = (await http.post(f"{prefix}/tokenize", json={"model": MODEL, "prompt": "word " * 50_000})).json()
    assert long["count"] > 32768
    assert long["token_strs"] is None


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"tools": []}], ids=["plain", "tools", "none"])
async def test_a_conversation_has_the_tokens_that_chat_counts(http: httpx2.AsyncClient, more: dict[str, Any]):
    body = {"model": MODEL, "messages": HELLO, **more}
    counted = (await http.post("/tokenize", json=body)).json()["count"]
    answer = (await http.post(CHAT, json={**body, "max_tokens": 1})).json()
    assert counted == answer["usage"]["prompt_tokens"]
    shorter = (await http.post("/tokenize", json={**body, "add_generation_prompt": False})).json()["count"]
    assert shorter < counted


@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        ("/tokenize", {}, "missing_field", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "missing_field", "prompt"),
        ("/tokenize", {"prompt": 5}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "x" * 2**20 + "x"}, "invalid_value", "prompt"),
        ("/tokenize", {"messages": [{"role": CANARY}]}, "invalid_value", "messages[0].role"),
        (
            "/tokenize",
            {"messages": HELLO, "chat_template_kwargs": {CANARY: 1}},
            "invalid_value",
            "chat_template_kwargs",
        ),
        ("/tokenize", {"prompt": "a", "chat_template": CANARY}, "invalid_value", "chat_template"),
        ("/detokenize", {}, "missing_field", "tokens"),
        ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens[0]"),
        ("/detokenize", {"tokens": [5, 2**31 - 1]}, "invalid_value", "tokens"),
    ],
)
async def test_a_wrong_value_is_refused_by_name(
    http: httpx2.AsyncClient, path: str, fields: dict[str, Any], code: str, param: str
):
    response = await http.post(path, json={"model": MODEL, **fields})
    assert_error(response, 400, code, param)
    assert CANARY not in response.text


async def test_only_models_that_chat_for_keys_that_may(http: httpx2.AsyncClient, server: Server):
    unknown = await http.post("/tokenize", json={"model": "nobody", "prompt": "a"})
    assert_error(unknown, 404, "model_not_found", "model")
    image = await http.post("/v1/detokenize", json={"model": "service-image", "tokens": [1]})
    assert_error(image, 400, "unsupported_capability", "model")
    key = await asyncio.to_thread(server.make_key, "no-tokens", scopes=["models"])
    response = await http.post(
        "/tokenize", json={"model": MODEL, "prompt": "a"}, headers={"Authorization": f"Bearer {key.text}"}
    )
    assert_error(response, 403, "insufficient_permissions")
