"""What is written, and how a client's leaving is noticed: the server's own HTTP over a transport that records."""

import asyncio
import gc
import json

import pytest
from connection_parts import END, LARGE, Connection, ask, chunk
from serving import async_poll_until, raw_request


async def test_a_plain_answer_is_written_whole():
    connection = Connection()
    connection.protocol.data_received(ask("/plain", b"hello"))
    await connection.ended()
    answer = b"".join(connection.writes)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nhello")


async def test_a_fault_of_ours_is_an_internal_error_that_tells_nothing_of_the_request():
    connection = Connection()
    connection.protocol.data_received(ask("/bug", b"a secret"))
    await connection.ended()
    head, _, body = b"".join(connection.writes).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"\r\nx-request-id: req_" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "internal_error", None)
    assert "x-request-id" in error["message"]
    assert b"secret" not in body
    assert [record.error_code for record in connection.log] == ["internal_error"]


async def test_each_event_is_a_chunk_and_the_end_follows_the_last():
    connection = Connection()
    connection.protocol.data_received(ask("/events"))
    await connection.begun.wait()
    first = b"".join(await connection.written(2))
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert first.endswith(b"\r\n\r\n" + chunk(b"one"))
    connection.gate.set()
    await connection.ended()
    assert b"".join(connection.writes).endswith(chunk(b"one") + chunk(b"two") + chunk(b"three") + END)


async def test_the_next_answer_follows_a_streamed_one():
    connection = Connection()
    connection.protocol.data_received(ask("/quick") + ask("/plain", b"next"))
    await connection.ended()
    first, second = b"".join(connection.writes).split(END)
    assert first.endswith(chunk(b"0") + chunk(b"1") + chunk(b"2"))
    assert second.endswith(b"\r\n\r\nnext")


async def test_a_head_does_not_wait_for_a_body_that_comes_later():
    connection = Connection()
    connection.protocol.data_received(ask("/head", b"", "GET"))
    (head,) = await connection.written(1)
    assert head.endswith(b"\r\n\r\n")
    connection.gate.set()
    await connection.ended()
    assert connection.writes[1:] == [b"late"]


async def test_a_comment_is_written_while_the_first_event_is_waited_for():
    connection = Connection()
    connection.protocol.data_received(ask("/waiting"))
    head, *comments = await connection.written(3)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"".join([head, *comments]).endswith(chunk(b": keep-alive\n\n") * 2)
    connection.gate.set()
    await connection.ended()
    assert b"".join(connection.writes).endswith(chunk(b"two") + chunk(b"three") + END)


async def test_no_more_is_held_than_a_little_and_a_client_that_takes_nothing_holds_the_app_up():
    connection = Connection(room=10 * len(LARGE))
    connection.protocol.data_received(ask("/large"))
    await async_poll_until(lambda: connection.protocol.flow.write_paused, 60)
    assert max(map(len, connection.writes)) <= 2**16
    assert 10 <= sum(map(len, connection.writes)) / len(LARGE) < 16
    connection.transport.take(2**30)
    await connection.ended()
    assert b"".join(connection.writes).endswith(chunk(LARGE) * 100 + END)


async def test_what_fails_after_the_first_event_is_told_after_it():
    connection = Connection()
    connection.protocol.data_received(ask("/broken"))
    await connection.ended()
    answer = b"".join(connection.writes)
    _, body = answer.split(b"\r\n\r\n", 1)
    assert body.startswith(chunk(b"one"))
    assert b'"error"' in body
    assert body.endswith(END)


@pytest.mark.parametrize("path", ["/events", "/slow", "/waiting"])
async def test_a_client_that_leaves_is_noticed_without_a_task_that_watches(path: str):
    connection = Connection()
    before = asyncio.all_tasks()
    connection.protocol.data_received(ask(path) + ask("/plain"))  # another waits behind it
    await connection.begun.wait()
    others = asyncio.all_tasks() - before - connection.state.tasks
    assert not others
    connection.protocol.connection_lost(None)
    await connection.ended()
    assert connection.left == ["slow" if path == "/slow" else "stream"]
    assert [record.status for record in connection.log] == [499]


async def test_what_a_request_held_is_freed_at_once_when_its_client_leaves():
    connection = Connection()
    gc.disable()
    try:
        connection.protocol.data_received(ask("/slow"))
        await connection.begun.wait()
        connection.protocol.connection_lost(None)
        await connection.ended()
        assert connection.request() is None
    finally:
        gc.enable()


async def test_what_is_no_request_ends_a_stream_and_is_not_answered_within_it():
    connection = Connection()
    connection.protocol.data_received(ask("/events"))
    await connection.written(2)
    connection.protocol.data_received(b"\0\r\n\r\n")
    await connection.ended()
    assert connection.left == ["stream"]
    assert b"".join(connection.writes).endswith(chunk(b"one"))
    assert connection.transport.is_closing()
    assert [record.status for record in connection.log] == [499]


async def test_a_connection_holds_so_many_waiting_requests_and_no_more():
    connection = Connection()
    connection.protocol.data_received(ask("/quick") * 64)
    await async_poll_until(lambda: len(connection.log) == 64, 60)
    assert not connection.transport.is_closing()
    full = Connection()
    full.protocol.data_received(ask("/quick") * 66)
    assert b"too_many_pipelined" in b"".join(full.writes)
    await async_poll_until(full.transport.is_closing, 60)


async def test_the_rest_of_a_refused_body_is_taken_before_the_connection_closes():
    """As behind nginx, which sends `Connection: close`: a reset would cost it the answer."""
    connection = Connection()
    head = raw_request("POST", "/none", {"Connection": "close", "Content-Length": "1000000"})
    connection.protocol.data_received(head + bytes(100_000))
    await connection.ended()
    assert b"".join(connection.writes).startswith(b"HTTP/1.1 404 ")
    connection.protocol.data_received(bytes(899_999))
    assert not connection.transport.is_closing()
    connection.protocol.data_received(bytes(1))
    assert connection.transport.is_closing()


async def test_of_a_refused_body_so_much_is_taken_and_no_more():
    connection = Connection()
    head = raw_request("POST", "/none", {"Connection": "close", "Content-Length": "100000000000"})
    connection.protocol.data_received(head + bytes(100_000))
    await connection.ended()
    pieces = 0
    while not connection.transport.is_closing():
        connection.protocol.data_received(bytes(2**20))
        pieces += 1
    assert pieces == 65
