"""A network that is silent for a while in the middle of an answer, and goes on."""

import json
import select
import socket

import pytest
from chat_parts import CHAT, HELLO, MODEL, events
from serving import Server, raw_request
from stalling_proxy import StallingProxy

pytestmark = pytest.mark.engine

SILENT_SECONDS = 2
# More than the kernel holds for a line that takes nothing, so that the server itself has to wait.
LONG = {"model": MODEL, "messages": HELLO, "temperature": 0, "n": 8, "max_tokens": 400, "ignore_eos": True}


def test_an_answer_arrives_whole_though_the_line_was_silent_for_two_seconds(chat_server: Server) -> None:
    assert chat_server.admin_key is not None
    headers = {
        "Authorization": f"Bearer {chat_server.admin_key.text}",
        "Content-Type": "application/json",
        "Connection": "close",
        "X-Request-Id": "silent-line",
    }
    body = LONG | {"stream": True, "stream_options": {"include_usage": True}}
    with StallingProxy(chat_server) as proxy, socket.create_connection(proxy.address, timeout=60) as client:
        client.sendall(raw_request("POST", CHAT, headers, json.dumps(body).encode()))
        began = client.recv(4096)
        proxy.fall_silent()
        while select.select([client], [], [], SILENT_SECONDS)[0]:  # what was on its way yet
            began += client.recv(4096)
        assert b"[DONE]" not in began
        proxy.go_on()
        received = began + client.makefile("rb").read()
    head, _, content = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    *chunks, last = events(unchunked(content))
    assert last["usage"]["completion_tokens"] == 8 * 400
    ends = {chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"] == "length"}
    assert ends == set(range(8))


def unchunked(content: bytes) -> bytes:
    """What a chunked body holds; fails where its last chunk is missing."""
    whole = b""
    while True:
        size, _, rest = content.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return whole
        whole, content = whole + rest[:length], rest[length + 2 :]
