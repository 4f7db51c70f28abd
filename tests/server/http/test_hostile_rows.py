"""Bodies and heads meant to exhaust or to confuse: gigabytes, bombs, smuggled requests. Each costs the sender one 4xx.

Wrong values of single fields are in test_hostile_bodies.py, strict JSON in test_bodies.py, heads that never end and
broken HTTP in test_errors.py, schemas in test_json_schema.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from chat_parts import CHAT, HELLO, MODEL, assert_error, assert_well
from serving import CANARY, Key, Server, async_poll_until, open_socket, raw_request

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

MIB = 2**20
JSON = {"Content-Type": "application/json"}
BASE = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 1}
BODY = json.dumps(BASE).encode()
LIMIT_BYTES = 25 * MIB


@pytest.fixture(autouse=True, scope="module")
async def _the_server_is_well_afterwards(http: httpx2.AsyncClient) -> AsyncIterator[None]:
    yield
    await assert_well(http)


def headers(key: Key, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.text}", **JSON, **more}


def exchange(server: Server, data: bytes) -> tuple[bytes, bytes]:
    """Send raw bytes, read until the server closes."""
    with open_socket(server) as opened:
        opened.sendall(data)
        head, _, content = opened.makefile("rb").read().partition(b"\r\n\r\n")
    return head, content


def read_head(opened: socket.socket) -> bytes:
    """Read one answer of a connection that stays open; return its head."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += opened.recv(1)
    (size,) = (line.partition(b":")[2] for line in data.lower().splitlines() if line.startswith(b"content-length:"))
    left = int(size)
    while left:
        left -= len(opened.recv(left))
    return data


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
def test_a_gigabyte_is_refused_without_being_kept(server: Server, admin_key: Key, *, chunked: bool) -> None:
    before = psutil.Process(server.pid).memory_info().rss
    piece = b" " * MIB
    framed = b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece
    size = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(2**30)}
    sent, answer = 0, b""
    with open_socket(server) as opened:
        opened.sendall(raw_request("POST", CHAT, headers(admin_key, **size)))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(1024):
                opened.sendall(framed)
                sent += MIB
        with contextlib.suppress(ConnectionResetError):
            answer = opened.recv(MIB)
        grown = psutil.Process(server.pid).memory_info().rss - before
    assert sent < 256 * MIB, "it went on reading"
    assert grown < 4 * LIMIT_BYTES
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_is_declared_too_large_is_refused_before_it_comes(server: Server, admin_key: Key) -> None:
    with open_socket(server) as opened:
        size = str(LIMIT_BYTES + 1)
        opened.sendall(raw_request("POST", CHAT, headers(admin_key, **{"Content-Length": size})))
        assert read_head(opened).startswith(b"HTTP/1.1 413 ")
        opened.sendall(b" " * (LIMIT_BYTES + 1) + raw_request("GET", "/v1/models", headers(admin_key)))
        assert read_head(opened).startswith(b"HTTP/1.1 200 ")


async def test_a_bomb_in_a_compressed_body_is_not_unpacked(http: httpx2.AsyncClient) -> None:
    bomb = gzip.compress(b" " * (64 * MIB))
    for encoding in ("gzip", "deflate", "GZIP", "identity, gzip", "x-gzip", "zstd"):
        response = await http.post(CHAT, content=bomb, headers={**JSON, "Content-Encoding": encoding})
        assert_error(response, 415, "unsupported_media_type")
    assert_error(await http.post(CHAT, content=bomb, headers=JSON), 400, "invalid_json")


@pytest.mark.parametrize("levels", [65, 1000, 10_000, 100_000, 1_000_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")], ids=["arrays", "objects"])
async def test_a_deep_body_is_refused_quickly(
    http: httpx2.AsyncClient, levels: int, opening: str, closing: str
) -> None:
    content = f'{{"model": "{MODEL}", "metadata": {opening * levels}1{closing * levels}}}'
    began = time.monotonic()
    assert_error(await http.post(CHAT, content=content, headers=JSON), 400, "invalid_json")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32", "utf-8-sig", "utf-7"])
async def test_only_utf_8_is_read(http: httpx2.AsyncClient, encoding: str) -> None:
    content = json.dumps(BASE | {"user": "é"}, ensure_ascii=False).encode(encoding)
    named = {"Content-Type": f"application/json; charset={encoding}"}
    for sent in (JSON, named):
        response = await http.post(CHAT, content=content, headers=sent)
        if encoding != "utf-7":  # whose letters are those of ASCII
            assert_error(response, 400, "invalid_json")
        assert response.status_code < 500


@pytest.mark.parametrize("name", ["get\0weather", "get_weather\n", "gét", "", "x" * 129, "../x", "a b"])
async def test_names_hold_letters_digits_and_little_else(http: httpx2.AsyncClient, name: str) -> None:
    tools = [{"type": "function", "function": {"name": name}}]
    assert_error(await http.post(CHAT, json=BASE | {"tools": tools}), 400, "invalid_value", "tools[0].function.name")


async def test_of_a_key_given_twice_the_last_counts_everywhere(http: httpx2.AsyncClient) -> None:
    """Were two parsers to disagree, one could check what the other does not use."""
    doubled = BODY[:-1] + b', "model": "nobody", "model": "%b", "n": 100000, "n": 1}' % MODEL.encode()
    response = await http.post(CHAT, content=doubled, headers=JSON)
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 1
    turned = BODY[:-1] + b', "n": 1, "n": 100000}'
    assert_error(await http.post(CHAT, content=turned, headers=JSON), 400, "invalid_value", "n")


@pytest.mark.parametrize("count", [2049, 10_000])
async def test_thousands_of_messages_are_refused_and_hold_nobody_up(http: httpx2.AsyncClient, count: int) -> None:
    crowd = asyncio.create_task(http.post(CHAT, json=BASE | {"messages": HELLO * count}))
    began = time.monotonic()
    assert (await http.get("/health/live")).status_code == 200
    assert time.monotonic() - began < 2
    assert_error(await crowd, 400, "invalid_value", "messages")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 100_000}, "n"),
        ({"logprobs": True, "top_logprobs": 1_000_000}, "top_logprobs"),
        ({"stop": ["x"] * 100_000}, "stop"),
        ({"logit_bias": {str(token): 1 for token in range(300_000)}}, "logit_bias"),
        ({"logit_bias": {"1": 1e308}}, "logit_bias"),
    ],
    ids=["n", "top_logprobs", "stop", "logit_bias", "bias"],
)
async def test_what_would_blow_up_the_engine_is_refused_by_name(
    http: httpx2.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    assert_error(await http.post(CHAT, json=BASE | fields), 400, "invalid_value", param)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:22/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "http://2130706433/",
        "http://0177.0.0.1/",
        "file:///etc/passwd",
        "gopher://127.0.0.1:25/_HELO",
        "https://example.org\\@127.0.0.1/",
        "data:image/png;base64," + "A" * MIB,
        "data:text/html,<script>",
    ],
    ids=lambda url: url[:40],
)
async def test_no_picture_is_fetched_for_a_model_that_cannot_see(http: httpx2.AsyncClient, url: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    response = await http.post(CHAT, json=BASE | {"messages": [{"role": "user", "content": content}]})
    assert_error(response, 400, "unsupported_capability", "messages[0].content[0]")


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Content-Length: +4\r\n",
        b"Content-Length: 0x4\r\n",
        b"Content-Length: 4, 4\r\n",
        b"Content-Length: 4\r\n 5\r\n",
        b"X-Folded: a\r\n b\r\nContent-Length: 4\r\n",
    ],
    ids=repr,
)
def test_a_second_request_cannot_be_smuggled_in_a_body(server: Server, admin_key: Key, framing: bytes) -> None:
    key = f"Authorization: Bearer {admin_key.text}\r\n".encode()
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: smuggled\r\n" + key + b"Connection: close\r\n\r\n"
    start = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + key + framing
    head, content = exchange(server, start + b"\r\n0\r\n\r\n" + hidden)
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"smuggled" not in head + content
    assert not any(line["request_id"] == "smuggled" for line in server.access_lines())


@pytest.mark.parametrize(
    "spoof",
    [
        {"X-Forwarded-For": "203.0.113.9"},
        {"X-Forwarded-Host": f"{CANARY}.example", "X-Forwarded-Proto": "https"},
        {"Forwarded": f"for=203.0.113.9;host={CANARY}.example"},
        {"X-Original-URL": "/health/live", "X-Rewrite-URL": "/health/live"},
        {"X-HTTP-Method-Override": "GET"},
    ],
    ids=lambda spoof: next(iter(spoof)),
)
async def test_forwarded_headers_of_strangers_change_nothing(
    http: httpx2.AsyncClient, server: Server, spoof: dict[str, str]
) -> None:
    name = f"spoof-{next(iter(spoof)).lower()}"
    response = await http.post(CHAT, json=BASE, headers={**spoof, "X-Request-Id": name, "Host": f"{CANARY}.example"})
    assert response.status_code == 200
    assert CANARY not in response.text + str(response.headers)
    written = lambda: [line for line in server.access_lines() if line["request_id"] == name]  # noqa: E731
    await async_poll_until(lambda: bool(written()), 60)
    assert "203.0.113.9" not in str(written())


@pytest.mark.parametrize("given", [b"a\rX-Evil: 1", b"a\nX-Evil: 1", b"a\r\n\tX-Evil: 1", b"a\0b", b"\x1b[31m"])
def test_a_request_id_cannot_write_headers(server: Server, admin_key: Key, given: bytes) -> None:
    key = f"Authorization: Bearer {admin_key.text}\r\nConnection: close\r\n".encode()
    head, _ = exchange(
        server, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + key + b"X-Request-Id: " + given + b"\r\n\r\n"
    )
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 200 "))
    assert b"evil" not in head.lower()
    assert b"x-request-id: req_" in head
