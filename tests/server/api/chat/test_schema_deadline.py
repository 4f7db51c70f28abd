"""JSON schemas that would keep the grammar compiler busy for minutes cost their sender 10 s and nobody else anything."""

import asyncio
import json
import time
from contextlib import suppress
from typing import Any

import httpx2
import psutil
import pytest
from chat_parts import CHAT, HELLO, MODEL
from serving import Key, Server, async_poll_until

from server.api.json_schema import object_schema

pytestmark = pytest.mark.engine

# All of them pass the limits that are checked on paper, and take far more than 10 s, or gigabytes.
BOMBS: dict[str, dict[str, Any]] = {
    "counted properties": {
        "type": "object",
        "properties": {f"p{number}": {"type": "string"} for number in range(256)},
        "minProperties": 16,
    },
    "repeats that may be empty": {"type": "string", "pattern": "^([a-z]{0,10}[0-9]{0,10}){1,99}$"},
    "everything refers to everything": {
        "$defs": {
            str(here): {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/{there}"}} for there in range(36)]}
            for here in range(36)
        },
        "$ref": "#/$defs/0",
    },
}
MOST_RSS_BYTES = 2.5 * 2**30


def small(number: int) -> dict[str, Any]:
    """Another schema for each number; `maxLength` makes it one that is compiled outside the engine first."""
    code = {"type": "string", "maxLength": 4}
    return {"type": "object", "properties": {f"code{number}": code}, "required": [f"code{number}"]}


def answer_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}], "tool_choice": "required"}


async def post(server: Server, key: Key, fields: dict[str, Any]) -> tuple[httpx2.Response, float]:
    """Ask for an answer; return it and how many seconds it took."""
    body = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 200, **fields}
    began = time.monotonic()
    async with httpx2.AsyncClient(base_url=server.root_url, timeout=240) as client:
        response = await client.post(CHAT, json=body, headers={"Authorization": f"Bearer {key.text}"})
    return response, time.monotonic() - began


def compilers(server: Server) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(server.pid).children(recursive=True):
        try:
            if process.name() == "hearth-schemas":
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def assert_refused(response: httpx2.Response, field: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("schema_too_complex", field)
    assert "simpler" in error["message"]


async def test_three_bombs_end_at_the_deadline_while_another_key_is_served(server: Server) -> None:
    for bomb in BOMBS.values():
        object_schema(bomb)
    bomber, accomplice, neighbour = (server.make_key(name) for name in ("bomber", "accomplice", "neighbour"))
    counted, repeats, references = BOMBS.values()
    bombs = [
        asyncio.create_task(post(server, bomber, answer_format(counted))),
        asyncio.create_task(post(server, bomber, tool(repeats))),
        asyncio.create_task(post(server, accomplice, answer_format(references) | {"stream": True})),
    ]
    slowest, served, most_bytes = 0.0, 0, 0
    while not all(bomb.done() for bomb in bombs):
        response, took = await post(server, neighbour, answer_format(small(served)))
        assert response.status_code == 200, response.text
        assert set(json.loads(response.json()["choices"][0]["message"]["content"])) == {f"code{served}"}
        slowest, served = max(slowest, took), served + 1
        with suppress(psutil.NoSuchProcess):
            most_bytes = max([most_bytes, *(process.memory_info().rss for process in compilers(server))])
    answers = [bomb.result() for bomb in bombs]
    for (response, seconds), field in zip(answers, ("response_format", "tools", "response_format"), strict=True):
        assert_refused(response, field)
        assert seconds < 100  # one after the other, on a machine with much else to do
    assert slowest < min(seconds for _, seconds in answers)
    assert served >= 2
    assert most_bytes < MOST_RSS_BYTES
    response, seconds = await post(server, bomber, answer_format(counted))
    assert_refused(response, "response_format")
    assert seconds < 9, "it was known to be too complex"  # else it would take 10 again


async def test_a_compiler_that_is_killed_is_replaced(server: Server, admin_key: Key) -> None:
    first, _ = await post(server, admin_key, answer_format(small(1001)))
    assert first.status_code == 200, first.text
    killed = compilers(server)
    assert killed
    for process in killed:
        process.kill()
    for number in range(1002, 1005):
        response, _ = await post(server, admin_key, answer_format(small(number)))
        assert response.status_code == 200, response.text
    assert not {process.pid for process in killed} & {process.pid for process in compilers(server)}


async def test_a_compiler_killed_in_the_middle_costs_nobody_an_answer(server: Server, admin_key: Key) -> None:
    slow = {"type": "string", "pattern": "^([a-z]{0,10}[0-9]{0,10}){1,40}$"}
    busy = asyncio.create_task(post(server, admin_key, answer_format(slow) | {"max_tokens": 5}))
    times = {process.pid: process.cpu_times().user for process in compilers(server)}

    def at_work() -> list[psutil.Process]:
        found = []
        for process in compilers(server):
            with suppress(psutil.NoSuchProcess):
                found += [process] if process.cpu_times().user > times.get(process.pid, 0) + 0.2 else []
        return found

    await async_poll_until(lambda: bool(at_work()), 60)
    for process in at_work():
        process.kill()
    assert not busy.done()
    response, _ = await busy
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_that_is_none_is_refused_before_an_answer_starts(
    server: Server, admin_key: Key, *, stream: bool
) -> None:
    for schema in ({"type": "nonsense"}, {"type": "string", "maxLength": "nonsense"}):
        response, _ = await post(server, admin_key, answer_format(schema) | {"stream": stream})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "response_format"


async def test_strict_holds_what_it_says_or_says_that_it_cannot(server: Server, admin_key: Key) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 7}}, "required": ["n"]}
    lenient = answer_format(schema)
    assert (await post(server, admin_key, lenient))[0].status_code == 200
    lenient["response_format"]["json_schema"]["strict"] = True
    response, _ = await post(server, admin_key, lenient)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
    assert "multipleOf" in response.json()["error"]["message"]


async def test_json_is_not_padded_with_whitespace(server: Server, admin_key: Key) -> None:
    """The demo model, asked for something it never learnt, is as weak as they come."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [1, 2]}}, "required": ["a", "b"]}
    for fields in (answer_format(schema), tool(schema)):
        for seed in range(3):
            response, _ = await post(server, admin_key, fields | {"temperature": 2, "seed": seed})
            assert response.status_code == 200, response.text
            message = response.json()["choices"][0]["message"]
            text = message["content"] or message["tool_calls"][0]["function"]["arguments"]
            assert set(json.loads(text)) == {"a", "b"}
            assert len(text) <= len(' { "a" : 1 , "b" : 1 } ')
