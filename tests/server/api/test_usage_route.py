"""`GET /v1/usage`: what was just used is in it, everybody sees their own, and admins all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from chat_parts import CHAT, HELLO, MODEL, assert_error
from serving import Key, Server
from standstill import standstill

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

USAGE = "/v1/usage"
BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 3, "temperature": 0}
FIELDS = ["start", "key", "model", "kind", "requests", "prompt_tokens", "completion_tokens", "cached_tokens"]
FIELDS += ["images", "audio_seconds", "errors", "aborted"]


async def new_key(server: Server, http: httpx2.AsyncClient, **fields: Any) -> dict[str, str]:
    """The id and the header of a new key."""
    made = (await http.post("/v1/admin/keys", json={"name": "user", "tier": "enhanced", **fields})).json()
    server.made_keys.append(Key(made["key"]))
    return {"id": made["public_id"], "Authorization": f"Bearer {made['key']}"}


def header(key: dict[str, str]) -> dict[str, str]:
    return {"Authorization": key["Authorization"]}


async def read(http: httpx2.AsyncClient, mine: dict[str, str] | None = None, **params: str) -> list[dict[str, Any]]:
    response = await http.get(USAGE, params=params, headers=header(mine) if mine else None)
    assert response.status_code == 200, response.text
    assert response.json()["object"] == "list"
    data: list[dict[str, Any]] = response.json()["data"]
    return data


async def running(http: httpx2.AsyncClient) -> int:
    """How many requests the model answers now."""
    models = (await http.get("/v1/models")).json()["data"]
    return sum(model["running"] for model in models if model["id"] == MODEL)


async def test_what_was_used_a_moment_ago_is_counted(server: Server, http: httpx2.AsyncClient):
    key = await new_key(server, http, scopes=["chat", "batch"])
    assert await read(http, key) == []
    used = [(await http.post(CHAT, json=BODY, headers=header(key))).json()["usage"] for _ in range(2)]
    batch = await http.post(f"{CHAT}/batch", json={"requests": [BODY, BODY]}, headers=header(key))
    messages = [{"role": "user", "content": "word " * 40_000}]
    long = await http.post(CHAT, json=BODY | {"messages": messages}, headers=header(key))
    assert_error(long, 400, "context_length_exceeded", "messages")
    rows = {row["kind"]: row for row in await read(http, key, by="hour,kind,model,key")}
    assert set(rows) == {"chat", "batch"}
    assert list(rows["chat"]) == FIELDS
    chat = rows["chat"]
    assert (chat["requests"], chat["errors"], chat["aborted"]) == (3, 1, 0)
    assert (chat["key"], chat["model"]) == (key["id"], MODEL)
    assert chat["prompt_tokens"] == sum(each["prompt_tokens"] for each in used)
    assert chat["completion_tokens"] == sum(each["completion_tokens"] for each in used)
    assert rows["batch"]["requests"] == 2
    assert rows["batch"]["prompt_tokens"] == batch.json()["usage"]["prompt_tokens"]
    [day] = await read(http, key)
    assert (day["requests"], day["kind"], day["key"], day["model"]) == (5, None, None, None)
    assert day["start"].endswith("T00:00:00Z")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_counted_with_what_was_made(
    server: Server, http: httpx2.AsyncClient, *, stream: bool
):
    key = await new_key(server, http)
    body = BODY | {"max_tokens": 16_000, "ignore_eos": True, "stream": stream}  # takes many seconds
    if stream:
        async with http.stream("POST", CHAT, json=body, headers=header(key)) as response:
            await anext(response.aiter_lines())
    else:
        answer = asyncio.create_task(http.post(CHAT, json=body, headers=header(key)))
        while not await running(http):
            assert not answer.done(), answer.result().text
        assert (await http.post(CHAT, json=BODY)).status_code == 200  # made beside it, step by step
        answer.cancel()
    async with asyncio.timeout(60):
        while not (rows := await read(http, key)):
            continue
    assert (rows[0]["requests"], rows[0]["aborted"], rows[0]["errors"]) == (1, 1, 0)
    assert rows[0]["prompt_tokens"] > 0
    assert 0 < rows[0]["completion_tokens"] < 8000


async def test_a_prompt_that_was_dispatched_is_charged_when_its_reader_leaves_before_the_first_token(
    server: Server, http: httpx2.AsyncClient
):
    key = await new_key(server, http, limits={"tokens_per_minute": 6000})
    long = BODY | {"messages": [{"role": "user", "content": "word " * 2000}], "stream": True}
    with standstill(server, MODEL):
        answer = asyncio.create_task(http.post(CHAT, json=long, headers=header(key)))
        while not await running(http):
            assert not answer.done(), answer.result().text
        answer.cancel()
        async with asyncio.timeout(60):
            while not (rows := await read(http, key)):
                continue
    assert (rows[0]["aborted"], rows[0]["completion_tokens"]) == (1, 0)
    assert rows[0]["prompt_tokens"] > 2000
    level = (await http.post(CHAT, json=BODY, headers=header(key))).headers["x-ratelimit-remaining-tokens"]
    assert int(level) < 5500


async def test_keys_see_their_own_usage_and_nobody_elses(server: Server, http: httpx2.AsyncClient):
    one, two = [await new_key(server, http, scopes=["chat"]) for _ in range(2)]
    for key, count in ((one, 1), (two, 2)):
        for _ in range(count):
            assert (await http.post(CHAT, json=BODY, headers=header(key))).status_code == 200
    assert [row["requests"] for row in await read(http, one)] == [1]
    assert [(row["key"], row["requests"]) for row in await read(http, two, by="key")] == [(two["id"], 2)]
    assert [row["requests"] for row in await read(http, two, key=two["id"])] == [2]
    refused = await http.get(USAGE, params={"key": one["id"]}, headers=header(two))
    assert_error(refused, 403, "insufficient_permissions", "key")
    everybody = {row["key"]: row["requests"] for row in await read(http, by="key")}
    assert (everybody[one["id"]], everybody[two["id"]]) == (1, 2)
    assert [row["requests"] for row in await read(http, key=one["id"])] == [1]
    assert await read(http, key=one["id"], model="service-pro") == []
    assert await read(http, key="0123456789Ab") == []


async def test_the_longest_spans_are_allowed(http: httpx2.AsyncClient):
    for params in ({"since": "366d"}, {"since": "31d", "by": "hour"}):
        assert (await http.get(USAGE, params=params)).status_code == 200


@pytest.mark.parametrize(
    ("params", "param", "words"),
    [
        ({"by": "week"}, "by", "must be one of hour, day"),
        ({"by": ""}, "by", "must be one of"),
        ({"since": "soon"}, "since", "must be a time span"),
        ({"since": "999999w"}, "since", "must be a time span"),
        ({"until": "2026-11-21T12:00:00"}, "until", "like 2027-01-31T12:00:00Z"),
        ({"since": "1d", "until": "2d"}, "until", "must be later than `since`"),
        ({"since": "400d"}, "since", "at most 366 days"),
        ({"since": "60d", "by": "hour"}, "since", "at most 31 days"),
        ({"from": "7d"}, "from", "is not known here"),
    ],
)
async def test_a_wrong_question_is_explained(http: httpx2.AsyncClient, params: dict[str, str], param: str, words: str):
    response = await http.get(USAGE, params=params)
    assert_error(response, 400, "invalid_value", param)
    assert words in response.json()["error"]["message"]
