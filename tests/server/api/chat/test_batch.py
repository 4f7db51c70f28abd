"""`POST /v1/chat/completions/batch`: order, isolation, sums, and the engine's death."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from chat_parts import assert_error
from demo_models.promised import FixedPrompt, fixed_prompts
from leaving_parts import gone_line, until_engines_rest
from serving import Key, Server, async_poll_until, open_socket, raw_request
from standstill import model_states

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

PATH = "/v1/chat/completions/batch"


def body(text: str = "What is the capital of France?", **fields: Any) -> dict[str, Any]:
    return {"model": "service-plus", "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def as_item(prompt: FixedPrompt) -> dict[str, Any]:
    item = {"model": "service-plus", "messages": prompt.messages, "temperature": 0, "custom_id": prompt.name}
    return {**item, "tools": prompt.tools} if prompt.tools else item


async def test_responses_come_in_the_order_of_the_requests_and_bad_items_fail_alone(http: httpx2.AsyncClient) -> None:
    prompts = fixed_prompts()
    items: list[Any] = [as_item(prompt) for prompt in prompts]
    bad = {
        3: (body(temperature=7), 400, "invalid_value", "temperature"),
        10: ({"model": "service-plus"}, 400, "missing_field", "messages"),
        11: ("no object", 400, "invalid_value", None),
        20: (body(model="nothing"), 404, "model_not_found", "model"),
        21: (body(stream=True), 400, "invalid_value", "stream"),
        40: (body("word " * 40_000), 400, "context_length_exceeded", "messages"),
        41: (body(custom_id=5), 400, "invalid_value", "custom_id"),
    }
    for index, (item, *_) in bad.items():
        items[index] = item

    answer = await http.post(PATH, json={"requests": items})

    assert answer.status_code == 200
    batch = answer.json()
    assert batch["object"] == "chat.completion.batch"
    assert batch["counts"] == {"total": len(items), "succeeded": len(items) - len(bad), "failed": len(bad)}
    assert [response["index"] for response in batch["responses"]] == list(range(len(items)))
    assert len({response["id"] for response in batch["responses"]}) == len(items)
    for index, (prompt, response) in enumerate(zip(prompts, batch["responses"], strict=True)):
        if index in bad:
            _, status, code, param = bad[index]
            assert response["choices"] == []
            assert response["status_code"] == status
            assert (response["error"]["code"], response["error"]["param"]) == (code, param)
            continue
        assert response["custom_id"] == prompt.name
        message = response["choices"][0]["message"]
        called = [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", [])
        ]
        assert (message["content"], called) == (prompt.answer, prompt.tool_calls or []), prompt.name
    good = [response["usage"] for response in batch["responses"] if "usage" in response]
    assert batch["usage"]["total_tokens"] == sum(usage["total_tokens"] for usage in good)


async def test_items_may_differ_in_model_and_form(http: httpx2.AsyncClient) -> None:
    items = [body(), body(model="service-pro", n=2), body(max_tokens=2)]
    responses = (await http.post(PATH, json={"requests": items})).json()["responses"]
    assert [response["model"] for response in responses] == ["service-plus", "service-pro", "service-plus"]
    assert [len(response["choices"]) for response in responses] == [1, 2, 1]
    assert [response["choices"][0]["finish_reason"] for response in responses] == ["stop", "stop", "length"]


@pytest.mark.parametrize(
    ("envelope", "code", "param"),
    [
        ({}, "missing_field", "requests"),
        ({"requests": []}, "invalid_value", "requests"),
        ({"requests": {}}, "invalid_value", "requests"),
        ({"requests": [{}] * 257}, "batch_too_large", "requests"),
        ([], "invalid_value", None),
    ],
)
async def test_bad_envelope_is_refused_as_a_whole(
    http: httpx2.AsyncClient, envelope: Any, code: str, param: str | None
) -> None:
    assert_error(await http.post(PATH, json=envelope), 400, code, param)


async def test_batch_needs_its_scope(http: httpx2.AsyncClient, server: Server) -> None:
    key = server.make_key("no batch", scopes=["chat"])
    answer = await http.post(PATH, json={"requests": [body()]}, headers={"Authorization": f"Bearer {key.text}"})
    assert_error(answer, 403, "insufficient_permissions", None)


async def test_client_that_leaves_aborts_all_items(server: Server, admin_key: Key) -> None:
    long = body("Count from 1 to 100.", max_tokens=8000, ignore_eos=True)
    sent = json.dumps({"requests": [long] * 16}).encode()
    headers = {"Authorization": f"Bearer {admin_key.text}", "Content-Type": "application/json", "X-Request-Id": "left"}
    await until_engines_rest(server)
    with open_socket(server) as connection:
        connection.sendall(raw_request("POST", PATH, headers, sent))
        await async_poll_until(lambda: model_states(server)["service-plus"]["running"] > 0, 60)
        left_at = time.time()
    await gone_line(server, "left", left_at)
    await until_engines_rest(server)
