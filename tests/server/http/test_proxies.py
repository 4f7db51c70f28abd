"""Hearth behind nginx, HAProxy and Caddy with HTTPS, as docker/ configures them: nothing is held back or made up."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from chat_parts import CHAT, HELLO, HELLO_ANSWER, MODEL, assert_error
from proxy_parts import PROXIES, Proxy, missing_reason
from serving import Server, async_poll_until, poll_until
from tls_pair import Pair, make_pair

pytestmark = pytest.mark.engine

# One that `chat_server` is told of.
ORIGIN = "https://chat.example.org"
LONG = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count from 1 to 100."}],
    "temperature": 0,
    "max_tokens": 1900,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module", params=PROXIES)
def proxy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, chat_server: Server, pair: Pair
) -> Iterator[Proxy]:
    reason = missing_reason(request.param)
    if reason is not None:
        pytest.skip(reason)
    upstream = urlsplit(chat_server.root_url).netloc
    with Proxy(request.param, tmp_path_factory.mktemp(request.param), upstream, pair) as running:
        # HAProxy and Caddy listen before they are ready to pass something on
        def passes() -> bool:
            return httpx2.get(f"{running.url}/health/live", verify=pair.client_context(), timeout=60).status_code == 200

        poll_until(passes, 60, describe=running.log)
        yield running


@pytest.fixture
async def outside(proxy: Proxy, pair: Pair, chat_server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    """A client that knows the proxy's address alone."""
    assert chat_server.admin_key is not None
    headers = {"Authorization": f"Bearer {chat_server.admin_key.text}"}
    async with httpx2.AsyncClient(
        base_url=proxy.url, headers=headers, verify=pair.client_context(), timeout=60
    ) as client:
        yield client


async def line_of(server: Server, request_id: str) -> dict[str, Any]:
    """The access line of a request, once it is written."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found[:] = [line for line in server.access_lines() if line["request_id"] == request_id]
        return bool(found)

    await async_poll_until(is_there, 60)
    return found[0]


async def test_a_chat_streams_token_by_token(outside: httpx2.AsyncClient, chat_server: Server):
    """Told by when the pieces came, and by the log's own time of the end: both are this machine's clock."""
    came_at: list[float] = []
    async with outside.stream("POST", CHAT, json=LONG) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        data = b""
        async for piece in answer.aiter_raw():
            came_at.append(time.time())
            data += piece
    assert data.endswith(b"data: [DONE]\n\n")
    line = await line_of(chat_server, answer.headers["x-request-id"])
    assert line["completion_tokens"] == 1900
    generated_for = line["duration_seconds"] - line["time_to_first_token_seconds"]
    ended_at = line["time"]
    assert ended_at - came_at[0] > 0.5 * generated_for, "the first piece was held back"
    assert came_at[-1] - ended_at < 0.5 * generated_for, "the last pieces were held back"
    # A proxy that waits for 4 KiB would have made of these 400 KiB a hundred pieces.
    assert len(came_at) > 200, f"{len(came_at)} pieces for {len(data)} bytes"


async def test_a_client_that_leaves_is_told_to_the_server(outside: httpx2.AsyncClient, chat_server: Server):
    async with outside.stream("POST", CHAT, json=LONG) as answer:
        first = await anext(answer.aiter_raw())
        assert first.startswith(b"data: ")
    line = await line_of(chat_server, answer.headers["x-request-id"])
    assert line["status"] == 499
    assert line["completion_tokens"] < 1900


async def test_a_preflight_of_a_named_origin_passes_without_a_key(proxy: Proxy, pair: Pair):
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    async with httpx2.AsyncClient(base_url=proxy.url, verify=pair.client_context(), timeout=60) as browser:
        answer = await browser.options(CHAT, headers=asked)
        assert answer.status_code == 200, answer.text
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in answer.headers["access-control-allow-headers"]
        refused = await browser.options(CHAT, headers=asked | {"Origin": "https://elsewhere.example"})
        assert_error(refused, 403, "origin_not_allowed")
        assert "access-control-allow-origin" not in refused.headers


async def test_whoever_asks_is_logged_by_their_address_and_not_by_what_they_claim(
    outside: httpx2.AsyncClient, chat_server: Server
):
    claims = {"X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "http", "Forwarded": "for=203.0.113.8"}
    answer = await outside.post(CHAT, json={"model": MODEL, "messages": HELLO, "temperature": 0}, headers=claims)
    assert answer.json()["choices"][0]["message"]["content"] == HELLO_ANSWER
    assert (await line_of(chat_server, answer.headers["x-request-id"]))["client"] == "127.0.0.1"


async def test_errors_stay_our_own(outside: httpx2.AsyncClient, proxy: Proxy, pair: Pair):
    assert_error(await outside.get("/v1/models/none"), 404, "model_not_found", "model")
    assert_error(await outside.get("/v1/models", headers={"Authorization": "Bearer no"}), 401, "invalid_api_key")
    too_large = b'{"model": "' + b"x" * (25 * 2**20) + b'"}'
    json = {"Content-Type": "application/json"}
    if (
        proxy.kind == "caddy"
    ):  # It closes half a second after an answer, whatever comes: only who reads on sees the 413.
        with httpx2.Client(
            base_url=outside.base_url, headers=outside.headers, verify=pair.client_context(), timeout=60
        ) as client:
            answer = await asyncio.to_thread(client.post, CHAT, content=too_large, headers=json, timeout=60)
    else:
        answer = await outside.post(CHAT, content=too_large, headers=json)
    assert_error(answer, 413, "request_too_large")


@pytest.mark.parametrize("kind", PROXIES)
async def test_a_server_that_is_not_running_is_told_in_our_shape_of_errors(kind: str, tmp_path: Path, pair: Pair):
    reason = missing_reason(kind)
    if reason is not None:
        pytest.skip(reason)
    nobody = "127.0.0.1:9"
    with Proxy(kind, tmp_path, nobody, pair) as proxy:
        async with httpx2.AsyncClient(base_url=proxy.url, verify=pair.client_context(), timeout=30) as client:
            answer = await client.get("/v1/models")
    error = answer.json()["error"]
    assert answer.status_code == 503, answer.text
    assert (error["type"], error["code"], error["param"]) == ("server_error", "engine_unavailable", None)
    assert answer.headers["retry-after"] == "5"
    assert answer.headers["content-type"].startswith("application/json")
