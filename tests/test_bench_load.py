"""What the benchmarks' load generator makes of an HTTP answer, however it is cut into pieces."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks import load
from benchmarks.chat_job import ChatJob, Measurement
from benchmarks.children import Child
from benchmarks.errors import BenchError
from benchmarks.http_answers import AnswerError, Connection
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

JOB = ChatJob(model="m", streams=2, requests=5, streamed=True, max_tokens=2, label="a")
SCRIPTS = str(Path(__file__).parents[1] / "scripts")

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}}\n\n'
DONE = b"data: [DONE]\n\n"


def text(content: str) -> bytes:
    chunk = {"choices": [{"delta": {"content": content}, "finish_reason": None}], "usage": None}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def chunked(*writes: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(write), write) for write in writes) + b"0\r\n\r\n"


def plain(body: object, status: str = "200 OK", extra: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nContent-Length: {len(content)}\r\n{extra}\r\n"
    return head.encode() + content


STREAM = chunked(ROLE + text("Hi"), b": keep-alive\n\n", text('"') + USAGE + DONE)
PLAIN = plain({"choices": [{"message": {"content": "Hi"}}], "usage": {"completion_tokens": 2}})


class Answering:
    """A real server that answers every request with the same bytes, in the pieces given."""

    def __init__(self, pieces: Sequence[bytes], *, hang_up: bool) -> None:
        self.pieces = pieces
        self.hang_up = hang_up
        self.requests: list[bytes] = []
        self.connections = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)  # lets the other side read what it has
                if self.hang_up:
                    return


@contextlib.asynccontextmanager
async def answering(*pieces: bytes, hang_up: bool = False) -> AsyncIterator[Answering]:
    parts = Answering(pieces, hang_up=hang_up)
    async with await asyncio.start_server(parts.serve, "127.0.0.1", 0) as server:
        parts.port = server.sockets[0].getsockname()[1]
        yield parts


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def fed(pieces: Sequence[bytes]) -> Connection:
    connection = Connection()
    for piece in pieces:
        connection.data_received(piece)
    return connection


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40, 10_000])
async def test_a_stream_is_read_the_same_however_it_is_cut(size: int):
    async with answering(*cut(STREAM, size)) as server:
        connection = await Connection.open("127.0.0.1", server.port)
        for _ in range(2):
            answer = await connection.ask(b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
            assert answer.streamed
            assert len(answer.text_times) == 2
            assert answer.started <= answer.text_times[0] <= answer.text_times[1] <= answer.finished
            assert answer.completion_tokens() == 2
        connection.close()
        assert server.connections == 1


@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_every_way_to_cut_a_stream_gives_the_same_events(places: set[int]):
    edges = [0, *sorted(places), len(STREAM)]
    answer = fed([STREAM[start:stop] for start, stop in pairwise(edges)])._answer
    assert (len(answer.text_times), answer.reads.done, answer.completion_tokens()) == (2, True, 2)


def test_events_may_end_in_carriage_returns_and_have_spaces_in_their_json():
    events = b'data: {"choices": [{"delta": {"content": "Hi"}}]}\r\n\r\n', USAGE.replace(b"\n", b"\r\n"), DONE
    for size in (1, 1000):
        answer = fed(cut(chunked(*events), size))._answer
        assert (len(answer.text_times), answer.completion_tokens()) == (1, 2)


@pytest.mark.parametrize("wire", [STREAM, PLAIN])
def test_what_comes_after_the_end_changes_nothing(wire: bytes):
    connection = fed([wire])
    before = connection._answer.finished
    connection.data_received(plain({"error": "too late"}, "408 Request Timeout"))
    assert (connection._answer.status, connection._answer.finished) == (200, before)
    assert connection._answer.completion_tokens() == 2


@pytest.mark.parametrize("size", [1, 5, 10_000])
async def test_a_plain_answer_counts_the_servers_tokens_and_has_no_first_token(size: int):
    async with answering(*cut(PLAIN, size)) as server:
        connection = await Connection.open("127.0.0.1", server.port)
        answer = await connection.ask(b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        connection.close()
    assert (answer.text_times, answer.streamed, answer.completion_tokens()) == ([], False, 2)


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (plain({"error": {"message": "too busy"}}, "503 Service Unavailable"), "status 503.*too busy"),
        (chunked(text("Hi"), b'data: {"error": {"message": "engine died"}}\n\n' + DONE), "engine died"),
        (chunked(text("Hi"), USAGE), "no complete usage"),
        (chunked(text("Hi"), DONE), "says: nothing"),
        (plain([]), "no complete usage"),
        (STREAM[:-30], "closed the connection before"),
        (b"220 mail.example ESMTP\r\n", "does not speak HTTP"),
    ],
)
async def test_one_failed_answer_ends_the_run_and_is_shown(wire: bytes, said: str):
    async with answering(wire, hang_up=True) as server:
        with pytest.raises(AnswerError, match=said):
            await load.measure(JOB, host="127.0.0.1", port=server.port, key="k")


async def test_a_server_that_is_not_there_is_named():
    async with answering() as server:
        port = server.port
    with pytest.raises(BenchError, match=f"cannot connect to 127.0.0.1 port {port}"):
        await load.measure(JOB, host="127.0.0.1", port=port, key="k")


async def test_a_run_sends_every_request_once_over_as_many_connections_as_streams():
    async with answering(*cut(STREAM, 50)) as server:
        seen = await load.measure(JOB, host="127.0.0.1", port=server.port, key="hk_1")
    assert server.connections == 2
    bodies = [json.loads(request.split(b"\r\n\r\n")[1]) for request in server.requests]
    assert len({body["messages"][0]["content"] for body in bodies}) == len(bodies) == 5
    assert {(body["stream"], body["max_tokens"], body["ignore_eos"], body["temperature"]) for body in bodies} == {
        (True, 2, True, 0)
    }
    assert all(b"Authorization: Bearer hk_1\r\n" in request for request in server.requests)
    assert (seen.completion_tokens, seen.text_events) == (10, 10)
    assert len(seen.latency_seconds) == len(seen.time_to_first_token_seconds) == 5
    assert len(seen.inter_token_latency_seconds) == 5


async def test_connections_that_the_server_closes_are_opened_again():
    closing = plain({"usage": {"completion_tokens": 2}}, extra="Connection: close\r\n")
    async with answering(closing, hang_up=True) as server:
        seen = await load.measure(JOB, host="127.0.0.1", port=server.port, key="k")
        assert server.connections == 5
    assert len(seen.latency_seconds) == 5
    assert seen.time_to_first_token_seconds == []


async def test_the_load_generator_runs_as_a_process_and_reports_problems_in_words(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": SCRIPTS, load.KEY_VARIABLE: "k"}
    async with answering(STREAM) as server:
        arguments = ("benchmarks.load", "127.0.0.1", str(server.port))
        child = await Child.start("load", *arguments, environment=environment, log=tmp_path / "load.log")
        try:
            seen = await child.run(JOB, Measurement)
            assert (len(seen.latency_seconds), seen.completion_tokens) == (5, 10)
            server.pieces = [plain({"error": {"message": "busy"}}, "429 Too Many Requests")]
            with pytest.raises(BenchError, match=r"The load reports: the answer had status 429.*busy"):
                await child.run(JOB, Measurement)
        finally:
            await child.stop()
    assert child.process.returncode is not None


async def test_a_process_that_ends_by_itself_is_reported_with_its_last_words(tmp_path: Path):
    environment = {"PYTHONPATH": SCRIPTS}
    child = await Child.start("load", "benchmarks.load", environment=environment, log=tmp_path / "log")
    with pytest.raises(BenchError, match=r"(?s)ended by itself.*IndexError"):
        await child.run(JOB, Measurement)
    await child.stop()
