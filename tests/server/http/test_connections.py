"""Clients that use HTTP in their own way: upgrades, trailers, pipelining, and far too much of everything."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
from chat_parts import CHAT, HELLO, HELLO_ANSWER, MODEL, assert_error
from leaving_parts import gone_line
from serving import Key, Server, open_socket, raw_request

from server.http.protocol import http_config
from server.settings import load_settings

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

HELLO_BODY = json.dumps({"model": MODEL, "messages": HELLO, "temperature": 0}).encode()


def headers(key: Key, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.text}", "Content-Type": "application/json", **more}


def test_an_idle_connection_stays_open_for_longer_than_clients_and_proxies_keep_it() -> None:
    """Whoever closes first may close upon a request that is on its way: nginx does after 60 s, and asks again."""
    assert http_config(None, load_settings(), None).timeout_keep_alive > 60


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_an_offer_to_upgrade_is_passed_over(server: Server, admin_key: Key, protocol: str) -> None:
    """Java's HTTP client makes this offer with every request."""
    offer = headers(admin_key, Connection="Upgrade, close", Upgrade=protocol)
    with open_socket(server) as opened:
        opened.sendall(raw_request("POST", CHAT, offer, HELLO_BODY))
        head, _, content = opened.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(content)["choices"][0]["message"]["content"] == HELLO_ANSWER


def test_an_upgrade_is_no_way_round_the_key(server: Server) -> None:
    offer = {
        "Connection": "Upgrade, close",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "x",
        "Sec-WebSocket-Version": "13",
    }
    with open_socket(server) as opened:
        opened.sendall(raw_request("GET", "/v1/models", offer))
        head, _, content = opened.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 ")
    assert json.loads(content)["error"]["code"] == "invalid_api_key"


def test_trailers_after_a_chunked_body_are_dropped(server: Server, admin_key: Key) -> None:
    chunked = headers(admin_key, Connection="close", **{"Transfer-Encoding": "chunked"})
    start = raw_request("POST", CHAT, chunked) + b"%x\r\n%b\r\n0\r\n" % (len(HELLO_BODY), HELLO_BODY)
    with open_socket(server) as opened:
        opened.sendall(start + b"X-Trailer: y\r\n" * 1000 + b"\r\n")
        head, _, content = opened.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(content)["choices"][0]["message"]["content"] == HELLO_ANSWER


async def test_a_client_that_leaves_with_a_request_waiting_behind_is_noticed(server: Server, admin_key: Key) -> None:
    long = {"model": MODEL, "messages": HELLO, "max_tokens": 8000, "ignore_eos": True, "n": 8, "stream": True}
    left = headers(admin_key, **{"X-Request-Id": "left-behind"})
    with open_socket(server) as opened:
        opened.sendall(raw_request("POST", CHAT, left, json.dumps(long).encode()))
        opened.sendall(raw_request("GET", "/v1/models", headers(admin_key)))
        assert opened.recv(100).startswith(b"HTTP/1.1 200 ")
        left_at = time.time()
    await gone_line(server, "left-behind", left_at)


async def test_a_body_of_nothing_but_mistakes_is_refused_quickly(http: httpx2.AsyncClient) -> None:
    body = b'{"model": "m", "messages": [' + b"{}," * 1_000_000 + b"{}]}"
    began = time.monotonic()
    response = await http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert_error(response, 413, "request_too_large")
    assert time.monotonic() - began < 5
