"""The arithmetic of `bench batch`: its items, what it takes for a right answer, its figures, and its two senders."""

from __future__ import annotations

import asyncio
import contextlib
import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from benchmarks import batch_load, interactive_load
from benchmarks.batch_items import bad_places, batch_items
from benchmarks.batch_job import (
    BatchJob,
    BatchMeasurement,
    InteractiveJob,
    InteractiveMeasurement,
    batch_figures,
    check_batch,
    interactive_figures,
)
from benchmarks.errors import BenchError
from benchmarks.footprint import Footprint
from pydantic import ValidationError

from server.schemas.chat import ChatCompletionBody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

JOB = BatchJob(model="m", items=40, bad=0.1, max_tokens=8, label="a")
TOKENS = 3
STREAM = (
    b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n'
    b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'
)


def answered(requests: list[Any], bad: frozenset[int]) -> dict[str, Any]:
    """What a right server says to a batch."""
    responses: list[dict[str, Any]] = []
    for index, body in enumerate(requests):
        labels = {"index": index, "custom_id": body["custom_id"] if isinstance(body, dict) else None}
        outcome = {"error": {}} if index in bad else {"usage": {"completion_tokens": TOKENS}}
        responses.append({**labels, **outcome})
    counts = {"total": len(requests), "succeeded": len(requests) - len(bad), "failed": len(bad)}
    return {"responses": responses, "counts": counts}


class Answering:
    """A real server that answers batches and single requests by what `answer` makes of a body."""

    def __init__(self, answer: Callable[[dict[str, Any]], bytes]) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0
        self.hang_up = False
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.heads.append(head)
                self.bodies.append(body)
                content = self.answer(body)
                kind = b"text/event-stream" if body.get("stream") is True else b"application/json"
                head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(content))
                writer.write(head + content)
                if self.hang_up:
                    return


@contextlib.asynccontextmanager
async def answering(answer: Callable[[dict[str, Any]], bytes]) -> AsyncIterator[Answering]:
    parts = Answering(answer)
    async with await asyncio.start_server(parts.serve, "127.0.0.1", 0) as server:
        parts.port = server.sockets[0].getsockname()[1]
        yield parts


def right(body: dict[str, Any]) -> bytes:
    if "requests" in body:
        return json.dumps(answered(body["requests"], JOB.bad_places)).encode()
    return json.dumps({"usage": {"completion_tokens": TOKENS}}).encode()


def test_the_bad_items_are_so_many_and_always_the_same():
    assert len(bad_places(256, 0.1)) == 26
    assert bad_places(256, 0.1) == bad_places(256, 0.1) != bad_places(255, 0.1)
    assert bad_places(10, 0) == frozenset()


def test_all_good_items_pass_the_servers_checks_and_differ_in_what_they_ask_for():
    items = batch_items("m", 64, 0, 64, "a")
    bodies = [ChatCompletionBody.model_validate(item) for item in items]
    assert {"tools", "response_format", "logprobs", "top_p", "seed"} <= {name for item in items for name in item}
    lengths = [body.max_tokens or 0 for body in bodies]
    assert min(lengths) >= 32
    assert max(lengths) <= 96
    assert len(set(lengths)) > 20
    other = batch_items("m", 64, 0, 64, "b")
    assert [item["max_tokens"] for item in other] == lengths
    assert not {str(item["messages"]) for item in items} & {str(item["messages"]) for item in other}


def test_of_each_kind_of_bad_item_some_are_sent_and_the_server_can_tell():
    items = batch_items("m", 64, 0.25, 64, "a")
    bad = [items[place] for place in sorted(bad_places(64, 0.25))]
    unreadable = 0
    for item in bad:
        try:
            ChatCompletionBody.model_validate(item)
        except ValidationError:
            unreadable += 1
    assert (
        unreadable >= 6
    )  # a wrong type, no messages, no object; the others are known by model, stream, length, picture
    assert any(isinstance(item, dict) and item["model"] == "no-such-model" for item in bad)
    assert any(isinstance(item, dict) and item.get("stream") for item in bad)


def test_a_right_answer_is_counted():
    assert check_batch(answered(JOB.bodies(2), JOB.bad_places), JOB, 2) == 36 * TOKENS


def _swapped(answer: dict[str, Any]) -> None:
    first, second, *rest = answer["responses"]
    answer["responses"] = [second, first, *rest]


def _one_failed(answer: dict[str, Any]) -> None:
    place = min(set(range(JOB.items)) - JOB.bad_places)
    answer["responses"][place]["error"] = {"message": "busy"}


def _bad_answered(answer: dict[str, Any]) -> None:
    del answer["responses"][min(JOB.bad_places)]["error"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_swapped, "not answered in its place"),
        (_one_failed, "a good item failed.*busy"),
        (_bad_answered, "a bad item was answered"),
        (lambda answer: answer["responses"].pop(), "answered with 39"),
        (lambda answer: answer["counts"].update(failed=0), "counts"),
        (lambda answer: answer["responses"][5].update(custom_id="other"), "not answered in its place"),
    ],
)
async def test_a_wrong_answer_ends_the_run(spoil: Callable[[dict[str, Any]], object], said: str):
    def wrong(body: dict[str, Any]) -> bytes:
        answer = answered(body["requests"], JOB.bad_places)
        spoil(answer)
        return json.dumps(answer).encode()

    async with answering(wrong) as server:
        with pytest.raises(BenchError, match=said):
            await batch_load.measure(JOB, host="127.0.0.1", port=server.port, key="k")


async def test_a_batch_goes_over_one_connection_and_its_good_items_alone_over_one_each():
    async with answering(right) as server:
        whole = await batch_load.measure(JOB, host="127.0.0.1", port=server.port, key="hk_1")
        assert (server.connections, len(server.bodies)) == (1, 1)
        single = BatchJob("m", 40, 0.1, 8, "a", batched=False)
        alone = await batch_load.measure(single, host="127.0.0.1", port=server.port, key="hk_1")
        assert (server.connections, len(server.bodies)) == (37, 37)
    good = [body for place, body in enumerate(server.bodies[0]["requests"]) if place not in JOB.bad_places]
    assert sorted(map(json.dumps, server.bodies[1:])) == sorted(map(json.dumps, good))
    assert server.heads[0].startswith(b"POST /v1/chat/completions/batch HTTP/1.1\r\n")
    assert all(b"Authorization: Bearer hk_1\r\n" in head for head in server.heads)
    assert (whole.good_items, whole.completion_tokens) == (alone.good_items, alone.completion_tokens) == (36, 108)


async def test_batches_follow_each_other_with_new_prompts_until_the_time_is_over():
    async with answering(right) as server:
        job = BatchJob("m", 40, 0.1, 8, "a", seconds=0.05)
        seen = await batch_load.measure(job, host="127.0.0.1", port=server.port, key="k")
    assert seen.batches == len(server.bodies) > 1
    assert seen.good_items == 36 * seen.batches
    assert seen.wall_seconds >= 0.05
    names = [item["custom_id"] for body in server.bodies for item in body["requests"] if isinstance(item, dict)]
    assert len(set(names)) == len(names)


def test_interactive_requests_come_one_in_each_interval_at_a_fixed_place():
    job = InteractiveJob("m", seconds=10, every_seconds=0.1, max_tokens=16, label="a", seed=1)
    moments = job.moments()
    assert moments == job.moments()
    assert [int(moment * 10 + 1e-9) for moment in moments] == list(range(100))
    gaps = [after - before for before, after in pairwise(moments)]
    assert min(gaps) < 0.05
    assert max(gaps) > 0.15
    assert len({job.fields(index)["messages"][0]["content"] for index in range(100)}) == 100


async def test_a_connection_that_the_server_closed_while_it_rested_is_not_used():
    job = InteractiveJob("m", seconds=0.1, every_seconds=0.01, max_tokens=3, label="a", seed=1)
    async with answering(lambda _: STREAM) as server:
        server.hang_up = True
        seen = await interactive_load.measure(job, host="127.0.0.1", port=server.port, key="k")
    assert len(seen.latency_seconds) == 10
    assert server.connections >= 10


async def test_interactive_requests_are_streamed_timed_and_reported_when_one_fails():
    job = InteractiveJob("m", seconds=0.2, every_seconds=0.01, max_tokens=3, label="a", seed=1)
    async with answering(lambda _: STREAM) as server:
        seen = await interactive_load.measure(job, host="127.0.0.1", port=server.port, key="k")
        assert len(seen.time_to_first_token_seconds) == len(server.bodies) == 20
        assert all(body["stream"] and body["max_tokens"] == 3 for body in server.bodies)
        assert min(seen.late_seconds) >= 0
        server.answer = lambda _: b'data: {"error": {"message": "engine died"}}\n\n'
        with pytest.raises(BenchError, match="engine died"):
            await interactive_load.measure(job, host="127.0.0.1", port=server.port, key="k")


def test_figures_have_the_units_that_their_names_say():
    seen = BatchMeasurement(wall_seconds=2.0, cpu_seconds=0.1, good_items=10, completion_tokens=100, batches=1)
    figures = batch_figures(seen, Footprint(0.4, 0.8, 2**20, 2**21))
    expected = {
        "wall_seconds": 2.0,
        "items_per_second": 5.0,
        "tokens_per_second": 50.0,
        "api_cpu_ms_per_item": 40.0,
        "engine_cpu_ms_per_item": 80.0,
        "load_cpu_ms_per_item": 10.0,
        "api_peak_rss_mib": 1.0,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    asked = InteractiveMeasurement([0.1, 0.3], [1.0, 2.0], [0.0, 0.0])
    beside = interactive_figures(asked, seen)
    assert (beside["time_to_first_token_p50_ms"], beside["latency_p50_ms"]) == pytest.approx((200, 1500))
    assert (beside["items_per_second"], beside["batches"]) == (5.0, 1)
    assert interactive_figures(asked, None)["batches"] is None
