"""A server with two API processes: answers, limits, keys and counts are those of one, and either may die."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import httpx2
import openai
import psutil
import pytest
from chat_parts import CHAT, LONGEST, MODEL, PROMPTS, ask, ask_streamed, assert_error, events, promised
from front_parts import TWO, client_each, fronts, pid_behind
from key_clients import client_with
from leaving_parts import line_of
from limit_parts import LONG, SHORT, answers, streaming, until_answered
from metrics_parts import Page
from process_parts import assert_all_gone
from serving import Key, Server, async_poll_until
from small_models import CHAT_ENTRY, IMAGE_ENTRY, VOICE_ENTRY, models_yaml

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

pytestmark = pytest.mark.engine

YAML = models_yaml(CHAT_ENTRY, VOICE_ENTRY, IMAGE_ENTRY)
MOST = 24
ABORTED = ("hearth_answers_total", {"kind": "chat", "model": MODEL, "outcome": "aborted"})
ANSWERED = ("hearth_requests_total", {"method": "POST", "model": MODEL, "route": CHAT, "status": "200"})
_REFILL_SECONDS = 3.0  # of one request at 20 a minute


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("two")
    (folder / "models.yaml").write_text(YAML)
    settings = {"HEARTH_MODELS": str(folder / "models.yaml"), "HEARTH_MAX_RUNNING_REQUESTS": str(MOST)}
    with Server(folder, environment=TWO | settings) as running:
        yield running


@pytest.fixture(scope="module")
async def admin(two: Server) -> AsyncIterator[httpx2.AsyncClient]:
    assert two.admin_key is not None
    async with client_with(two, two.admin_key.text) as client:
        yield client


async def key_of(two: Server, admin: httpx2.AsyncClient, **limits: int) -> Key:
    made = await admin.post("/v1/admin/keys", json={"name": "one", "tier": "standard", "limits": limits})
    assert made.status_code == 200, made.text
    two.made_keys.append(Key(made.json()["key"]))
    return two.made_keys[-1]


async def test_connections_are_spread_over_both_processes(two: Server) -> None:
    assert two.admin_key is not None
    behind = []
    for _ in range(40):
        async with client_with(two, two.admin_key.text) as client:
            behind.append(await pid_behind(two, client))
    assert {behind.count(front.pid) >= 5 for front in fronts(two)} == {True}, behind
    assert len(set(behind)) == 2


async def test_each_process_gives_the_promised_answers_plain_and_streamed(two: Server) -> None:
    assert two.admin_key is not None
    async with client_each(two, two.admin_key.text) as clients:
        for http in clients.values():
            client = _openai(two, two.admin_key, http)
            for prompt in (*list(PROMPTS.values())[:4], LONGEST):
                assert await ask(client, prompt) == promised(prompt)
                assert await ask_streamed(client, prompt) == promised(prompt)


def _openai(two: Server, key: Key, http: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=two.base_url, api_key=key.text, http_client=http, max_retries=0)


async def test_probabilities_texts_and_counts_travel_whole(two: Server, admin: httpx2.AsyncClient) -> None:
    plain = (await admin.post(CHAT, json=SHORT | {"max_tokens": 3, "logprobs": True, "top_logprobs": 2, "n": 2})).json()
    assert [choice["index"] for choice in plain["choices"]] == [0, 1]
    tokens = plain["choices"][0]["logprobs"]["content"]
    assert len(tokens) == 3
    assert all(len(token["top_logprobs"]) == 2 and token["bytes"] for token in tokens)
    for prompts in (["a", "b"], [[5, 6], [7]]):
        text = await admin.post("/v1/completions", json={"model": MODEL, "prompt": prompts, "max_tokens": 2})
        assert [choice["index"] for choice in text.json()["choices"]] == [0, 1]
    counted = await admin.post(
        "/v1/messages/count_tokens", json={"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}
    )
    assert counted.json() == {"input_tokens": plain["usage"]["prompt_tokens"]}
    answered = await admin.post("/v1/responses", json={"model": MODEL, "input": "Say hello.", "temperature": 0})
    assert answered.json()["status"] == "completed"


async def test_as_many_requests_run_as_the_key_may_have_over_both(two: Server, admin: httpx2.AsyncClient) -> None:
    key = await key_of(two, admin, parallel_requests=2)
    async with client_each(two, key.text) as clients:
        one, other = clients.values()
        async with streaming(one):
            async with streaming(other):
                for client in (one, other):
                    refused = await client.post(CHAT, json=SHORT)
                    assert_error(refused, 429, "rate_limit_exceeded")
                    assert "2 requests running" in refused.json()["error"]["message"]
            await until_answered(one)
            await until_answered(other)


async def test_as_many_requests_pass_in_a_minute_as_the_limit_says_over_both(
    two: Server, admin: httpx2.AsyncClient
) -> None:
    key = await key_of(two, admin, requests_per_minute=20)
    async with client_each(two, key.text) as clients:
        began, responses = time.monotonic(), []
        for _ in range(4):
            responses += await asyncio.gather(
                *(each.post(CHAT, json=SHORT) for each in clients.values() for _ in "123456")
            )
        refilled = (time.monotonic() - began) / _REFILL_SECONDS
    passed = [response for response in responses if response.status_code == 200]
    assert 20 <= len(passed) <= 20 + math.ceil(refilled)
    assert all(response.headers["x-ratelimit-limit-requests"] == "20" for response in responses)
    assert all(response.status_code in {200, 429} for response in responses)


async def test_so_many_requests_run_at_once_over_both_and_others_get_their_share(
    two: Server, admin: httpx2.AsyncClient
) -> None:
    key, stranger = await key_of(two, admin), await key_of(two, admin)
    async with (
        client_each(two, key.text) as clients,
        client_with(two, stranger.text) as other,
        AsyncExitStack() as held,
    ):
        for client in clients.values():
            for _ in range(MOST // 2):
                await held.enter_async_context(streaming(client))
        for client in clients.values():
            assert_error(await client.post(CHAT, json=SHORT), 503, "server_overloaded")
        assert await answers(other)


async def test_a_key_revoked_over_http_is_refused_by_both_at_once(two: Server, admin: httpx2.AsyncClient) -> None:
    key = await key_of(two, admin)
    async with client_each(two, key.text) as clients:
        assert [await answers(each) for each in clients.values()] == [True, True]
        assert (await admin.post(f"/v1/admin/keys/{key.public_id}/revoke")).status_code == 200
        for each in clients.values():
            assert_error(await each.post(CHAT, json=SHORT), 401, "invalid_api_key")


async def test_a_key_revoked_on_the_machine_is_refused_by_both_within_ten_seconds(
    two: Server, admin: httpx2.AsyncClient
) -> None:
    key = await key_of(two, admin)
    async with client_each(two, key.text) as clients:
        assert [await answers(each) for each in clients.values()] == [True, True]
        await asyncio.to_thread(two.revoke, key)
        deadline = time.monotonic() + 10
        for each in clients.values():
            while (response := await each.post(CHAT, json=SHORT)).status_code == 200:
                assert time.monotonic() < deadline
            assert_error(response, 401, "invalid_api_key")


async def test_changed_limits_hold_in_both_at_once(two: Server, admin: httpx2.AsyncClient) -> None:
    key = await key_of(two, admin, requests_per_minute=50)
    async with client_each(two, key.text) as clients:
        for limit in ("50", "40"):
            for each in clients.values():
                assert (await each.post(CHAT, json=SHORT)).headers["x-ratelimit-limit-requests"] == limit
            await admin.patch(f"/v1/admin/keys/{key.public_id}", json={"limits": {"requests_per_minute": 40}})


async def test_a_client_that_leaves_ends_its_answer_in_the_engine(two: Server, admin: httpx2.AsyncClient) -> None:
    assert two.admin_key is not None
    before = await counted(admin, ABORTED)
    async with client_each(two, two.admin_key.text) as clients:
        for number, client in enumerate(clients.values()):
            body = LONG | {"max_tokens": 1900, "stream": True}
            headers = {"x-request-id": f"left-{number}"}
            async with client.stream("POST", CHAT, json=body, headers=headers) as response:
                assert (await anext(response.aiter_lines())).startswith("data: ")
            line = await line_of(two, f"left-{number}")
            assert (line["status"], line["completion_tokens"] < 1900) == (499, True)
            await until(lambda: counted(admin, ABORTED), before + number + 1)
        status = (await admin.get("/v1/admin/status")).json()
    assert [model["running"] for model in status["models"] if model["id"] == MODEL] == [0]


async def test_everything_else_is_answered_by_way_of_each_process(two: Server) -> None:
    assert two.admin_key is not None
    async with client_each(two, two.admin_key.text) as clients:
        for client in clients.values():
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == MODEL
            assert (await client.get("/health/live")).json() == {"status": "ok"}
            assert (await client.get("/health/ready")).json()["status"] == "ready"
            assert (await client.head("/health/live")).status_code == 200
            drawn = await client.post(
                "/v1/images/generations", json={"model": "service-image", "prompt": "a red circle"}
            )
            assert drawn.status_code == 200, drawn.text
            picture = await client.get(drawn.json()["data"][0]["url"])
            assert picture.content.startswith(b"\x89PNG")
            (voice, *_) = (await client.get("/v1/audio/voices")).json()["voices"]
            spoken = await client.post(
                "/v1/audio/speech", json={"model": "service-voice", "input": "Hello.", "voice": voice["id"]}
            )
            assert spoken.status_code == 200, spoken.text
            padded = [SHORT | {"user": "x" * 2**10, "messages": [{"role": "user", "content": "Say hello."}]}] * 200
            batch = await client.post(f"{CHAT}/batch", json={"requests": padded})
            assert batch.json()["counts"]["succeeded"] == 200, batch.text
            events_ = events((await client.post(CHAT, json=SHORT | {"stream": True})).content)
            assert events_[-1]["choices"][0]["finish_reason"] == "length"


async def test_every_request_is_counted_and_logged_once(two: Server, admin: httpx2.AsyncClient) -> None:
    assert two.admin_key is not None
    async with client_each(two, two.admin_key.text) as clients:
        before = await counted(admin, ANSWERED)
        for number, client in enumerate(clients.values()):
            for _ in range(3):
                response = await client.post(CHAT, json=SHORT, headers={"x-request-id": f"counted-{number}"})
                assert response.status_code == 200
        await until(lambda: counted(admin, ANSWERED), before + 6)
    await line_of(two, "counted-1")
    logged = [line for line in two.access_lines() if line["request_id"].startswith("counted-")]
    assert [line["request_id"] for line in logged] == ["counted-0"] * 3 + ["counted-1"] * 3
    assert {(line["status"], line["client"], line["completion_tokens"]) for line in logged} == {(200, "127.0.0.1", 1)}


async def counted(admin: httpx2.AsyncClient, sample: tuple[str, dict[str, str]]) -> float:
    name, labels = sample
    return Page((await admin.get("/metrics")).text).value(name, **labels)


async def until(count: Callable[[], Awaitable[float]], wanted: float, seconds: float = 5) -> None:
    """The page of metrics is kept for a second."""
    deadline = time.monotonic() + seconds
    while (found := await count()) != wanted:
        assert time.monotonic() < deadline, found


async def test_of_a_killed_process_the_answers_end_the_other_goes_on_and_it_comes_back(
    two: Server, admin: httpx2.AsyncClient
) -> None:
    key = await key_of(two, admin, parallel_requests=2)
    async with client_each(two, key.text) as clients:
        (victim, cut), (survivor, spared) = clients.items()
        async with streaming(spared) as going_on:
            async with streaming(cut) as lost:
                os.kill(victim, signal.SIGKILL)
                with pytest.raises(httpx2.TransportError):
                    _ = [line async for line in lost]
            rest = [line async for line in going_on if line]
        assert rest[-1] == "data: [DONE]"
        await async_poll_until(lambda: len(fronts(two)) == 2, 10)
        assert survivor in {front.pid for front in fronts(two)}
    async with client_each(two, key.text) as clients:
        assert victim not in clients
        async with streaming(clients[survivor]):  # nothing of the cut one is counted any more
            assert all([await answers(client) for client in clients.values()])


async def test_a_terminal_or_service_manager_does_not_end_a_process_behind_its_leads_back(two: Server) -> None:
    before = fronts(two)
    for front in before:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            front.send_signal(number)
    assert two.admin_key is not None
    async with client_each(two, two.admin_key.text) as clients:
        assert set(clients) == {front.pid for front in before}


async def test_sigterm_lets_running_answers_finish_and_leaves_no_process(two: Server) -> None:
    assert two.admin_key is not None
    family = psutil.Process(two.pid).children(recursive=True)
    async with client_each(two, two.admin_key.text) as clients:
        one, other = clients.values()
        async with streaming(one) as lines:
            os.killpg(two.pid, signal.SIGTERM)
            deadline = time.monotonic() + 5
            while (response := await other.post(CHAT, json=SHORT)).status_code == 200:
                assert time.monotonic() < deadline
            assert_error(response, 503, "server_overloaded")
            async with client_with(two, two.admin_key.text) as late:
                assert (await late.get("/health/ready")).json()["status"] == "draining"
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
    assert two.wait() == 0, two.log()
    assert_all_gone(family)
    assert "Traceback" not in two.log()
