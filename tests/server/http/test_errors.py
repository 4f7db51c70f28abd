"""Addresses, methods and headers: every answer has an id, and every refusal our shape."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from chat_parts import CHAT, HELLO, MODEL, assert_error
from serving import CANARY, Key, Server, async_poll_until, open_socket, raw_request

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

OURS = re.compile(r"req_[0-9a-f]{24}")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", CHAT, "POST"),
        ("DELETE", CHAT, "POST"),
        ("OPTIONS", CHAT, "POST"),
        ("TRACE", CHAT, "POST"),
        ("POST", "/v1/models", "GET"),
        ("PUT", "/v1/models", "GET"),
        ("OPTIONS", "/v1/models", "GET"),
        ("PATCH", "/v1/models/service-plus", "GET"),
        ("POST", "/health/live", "GET, HEAD"),
        ("DELETE", "/health/ready", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_told_the_right_one(http: httpx2.AsyncClient, method: str, path: str, allowed: str):
    response = await http.request(method, path)
    assert_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == allowed
    assert allowed in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models", CHAT, "/nothing", "/health/live"])
async def test_head_is_answered_without_a_body(http: httpx2.AsyncClient, path: str):
    response = await http.head(path)
    assert response.status_code in {200, 404, 405}
    assert response.content == b""
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("//", "two slashes"),
        ("//v1/models", "two slashes"),
        ("/models", "/v1"),
        ("/chat/completions", "/v1"),
        ("/v1", "/v1"),
        ("/v1/", "/v1"),
        ("/v1//models", "two slashes"),
        ("/v1/chat/completions/", "Remove the slash at the end"),
        ("/health/live/", "Remove the slash at the end"),
        ("/v1//chat/completions", "two slashes"),
        ("/v1/v1/chat/completions", "remove one /v1"),
        ("/chat/completions", "The base address ends in /v1"),
        ("/models/", "/v1"),
        ("/v1/moderations", "/v1/chat/completions, "),
        ("/v1/score", "/v1/rerank"),
        ("/score", "/v1/rerank"),
        ("/v1/../health/live", "/v1"),
        ("/redoc", "/v1"),
        # What other servers have.
        ("/load", "/v1"),
        ("/server_info", "/v1"),
        ("/v1/conversations", "/v1/chat/completions, "),
        (f"/{CANARY}", "/v1"),
        ("/%00%0d%0aX-Evil:1", "/v1"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_address_that_is_not_there_is_not_found(server: Server, admin_key: Key, method, path, advice):
    """Sent raw, because clients tidy addresses up."""
    headers = {"Authorization": f"Bearer {admin_key.text}", "Connection": "close"}
    with open_socket(server) as opened:
        opened.sendall(raw_request(method, path, headers))
        head, _, content = opened.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    assert b"x-request-id: req_" in head
    assert b"location" not in head.lower()
    assert b"X-Evil" not in head
    error = json.loads(content)["error"]
    assert (error["code"], error["param"], error["type"]) == ("not_found", None, "invalid_request_error")
    assert advice in error["message"]
    assert CANARY not in error["message"]


@pytest.mark.parametrize("given", ["a", "mine-7_X", "a" * 64])
@pytest.mark.parametrize(("path", "status"), [("/v1/models", 200), ("/health/live", 200), ("/nothing", 404)])
async def test_the_callers_request_id_comes_back(http: httpx2.AsyncClient, given: str, path: str, status: int):
    response = await http.get(path, headers={"X-Request-Id": given})
    assert (response.status_code, response.headers["x-request-id"]) == (status, given)


@pytest.mark.parametrize("given", ["", "a" * 65, "a b", "a/b", "{}", "'; --", "ä".encode(), b"\xff", "0x7f3a (at)"])
async def test_a_malformed_request_id_is_replaced(http: httpx2.AsyncClient, given: str | bytes):
    response = await http.get("/v1/models", headers={"X-Request-Id": given})
    assert OURS.fullmatch(response.headers["x-request-id"])


async def test_a_key_in_the_place_of_a_request_id_is_neither_echoed_nor_logged(
    http: httpx2.AsyncClient, server: Server, admin_key: Key
):
    """The first 64 of its characters would be a valid id. That no file has them is checked when the server ends."""
    response = await http.get("/v1/models", headers={"X-Request-Id": admin_key.text[:64]})
    assert response.status_code == 200
    assert OURS.fullmatch(response.headers["x-request-id"])
    shown = admin_key.text[:40]
    ours = response.headers["x-request-id"]
    await async_poll_until(lambda: any(line["request_id"] == ours for line in server.access_lines()), 60)
    assert shown not in (server.data_dir / "logs" / "access.jsonl").read_text("utf-8")


async def test_each_request_gets_an_id_of_its_own(http: httpx2.AsyncClient):
    given = [(await http.get("/health/live")).headers["x-request-id"] for _ in range(3)]
    assert len(set(given)) == 3
    assert all(OURS.fullmatch(one) for one in given)


async def test_a_callers_id_never_reaches_the_engine(http: httpx2.AsyncClient):
    """Two requests of one id at the same time would be one request to the engine."""
    headers = {"X-Request-Id": "same"}
    request = {"model": MODEL, "messages": HELLO, "temperature": 0}
    answers = [(await http.post(CHAT, json=request, headers=headers)).json()["id"] for _ in range(2)]
    assert answers[0] != answers[1]
    assert not any("same" in one for one in answers)


async def test_a_long_header_is_answered_like_any_other(http: httpx2.AsyncClient):
    response = await http.get("/v1/models", headers={"X-Long": CANARY * 2000, "X-Request-Id": "b" * 20_000})
    assert response.status_code == 200
    assert OURS.fullmatch(response.headers["x-request-id"])


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nX-Long: ", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000])
def test_a_head_that_never_ends_is_cut_off(server: Server, start: bytes):
    with open_socket(server) as opened:
        opened.sendall(start + b"x" * (64 * 2**10 + 1 - len(start)))
        head, _, content = opened.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(content)["error"]["code"] == "headers_too_large"


@pytest.mark.parametrize("size", [66_000, 120_000, 250_000])
def test_a_head_that_comes_whole_has_the_same_limit(server: Server, admin_key: Key, size: int):
    headers = {"Authorization": f"Bearer {admin_key.text}", "X-Long": "x" * size}
    with open_socket(server) as opened:
        opened.sendall(raw_request("GET", "/v1/models", headers))
        head, _, content = opened.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(content)["error"]["code"] == "headers_too_large"


@pytest.mark.parametrize("size", [1000, 100_000, 2**20])
def test_large_bodies_on_a_connection_that_stays_open_are_no_long_heads(server: Server, admin_key: Key, size: int):
    headers = {"Authorization": f"Bearer {admin_key.text}"}
    body = json.dumps({"model": "nobody", "messages": HELLO, "user": "x" * size}).encode()
    with open_socket(server) as opened, opened.makefile("rb") as reader:
        for _ in range(20):
            opened.sendall(raw_request("POST", CHAT, headers, body))
            assert reader.readline() == b"HTTP/1.1 404 Not Found\r\n"
            length = next(
                int(line.split()[1]) for line in iter(reader.readline, b"") if line[:15].lower() == b"content-length:"
            )
            while reader.readline() != b"\r\n":
                pass
            assert b"model_not_found" in reader.read(length)


@pytest.mark.parametrize(
    "data",
    [
        b"BREW / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nBroken Header\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    ],
    ids=lambda data: repr(data[:30]),
)
def test_what_is_no_http_is_refused_in_our_shape(server: Server, data: bytes):
    with open_socket(server) as opened:
        opened.sendall(data)
        head, _, content = opened.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert list(json.loads(content)["error"]) == ["message", "type", "param", "code"]


async def test_the_answer_says_nothing_of_the_server_behind_it(http: httpx2.AsyncClient):
    for path in ("/health/live", "/nothing"):
        assert "server" not in (await http.get(path)).headers


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"])
async def test_any_json_type_is_read(http: httpx2.AsyncClient, content_type: str):
    request = {"model": MODEL, "messages": HELLO, "max_tokens": 1}
    response = await http.post(CHAT, content=json.dumps(request), headers={"Content-Type": content_type})
    assert response.status_code == 200
