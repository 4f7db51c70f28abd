"""A model in a child process, with real children, on both event loops: what it does as long as nobody dies."""

import asyncio
import os
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from misbehaving.floods import EVENT_BYTES
from workers import DEADLINE_SECONDS, collect, job_of, numbers, on_both_loops, start, until, worker

from engine.admission import Room
from engine.errors import EngineDiedError, GenerationError, NotStartedError, OverloadedError, RequestError
from engine.process.parent import WorkerBackend
from engine.process.protocol import MAX_FRAME_BYTES, Done, Event, FrameError, FrameReader, to_frame
from engine.stream import BoundedStream, Stream


@on_both_loops
async def test_jobs_run_side_by_side_and_each_gets_its_own_events_in_order() -> None:
    async with worker() as running:
        answers = await asyncio.gather(*(collect(running, b"%d" % end) for end in (0, 3, 500, 12)))
    assert answers == [numbers(0), numbers(3), numbers(500), numbers(12)]


@on_both_loops
async def test_the_child_has_its_own_environment_priority_and_process_group_and_reports_while_it_loads() -> None:
    said: list[tuple[str, float]] = []
    async with worker(report=lambda *what: said.append(what), environment={"WORD": "zwieback"}, nice=3) as running:
        ready, group = os.getpriority(os.PRIO_PROCESS, running.pid), os.getpgid(running.pid)
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert group == running.pid
    assert ready == ours + 3, "it gives way to others once it is ready, and not while it loads"
    assert said == [("reading", 0.25), (f"priority {ours}, word zwieback", 0.75)]


@on_both_loops
async def test_errors_of_a_job_come_as_what_they_are_and_concern_no_other() -> None:
    async with worker() as running:
        other = asyncio.create_task(collect(running, b"2000"))
        with pytest.raises(RequestError, match="not a number") as request:
            await collect(running, b"x")
        with pytest.raises(OverloadedError, match="Enough") as overloaded:
            await collect(running, b"too much")
        with pytest.raises(GenerationError, match="could not work on"):
            await collect(running, b"bug")
        got: list[bytes] = []
        with pytest.raises(GenerationError, match=r"Thirteen\."):
            await _collect_into(got, job_of(running, b"13"))
        assert await other == numbers(2000)
    assert request.value.param == "to"
    assert overloaded.value.retry_after_seconds == 7
    assert got == numbers(13)


async def test_a_job_that_is_too_large_for_a_frame_is_refused_before_it_is_sent() -> None:
    async with worker() as running:
        with pytest.raises(RequestError, match="too large"):
            await collect(running, bytes(MAX_FRAME_BYTES))
        assert await collect(running, b"2") == numbers(2)


@on_both_loops
async def test_closing_a_run_returns_when_the_child_has_let_go_of_the_job() -> None:
    async with worker() as running:
        async with aclosing(job_of(running, b"1000000000")) as endless:
            await anext(endless)
        assert running._jobs == {}
        assert await collect(running, b"1") == numbers(1)


@on_both_loops
async def test_a_run_that_was_never_begun_or_has_ended_is_closed_without_a_word() -> None:
    async with worker() as running:
        await job_of(running, b"5").aclose()
        ended = job_of(running, b"1")
        assert [event async for event in ended] == numbers(1)
        await ended.aclose()
        assert next(running._numbers) == 2


@on_both_loops
async def test_closing_after_a_wait_was_cancelled_cancels_the_job() -> None:
    async with worker("deaf:open_service") as running:
        holder = job_of(running, b"")
        assert await anext(holder) == b"started"
        waiting = asyncio.create_task(anext(holder))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        closing = asyncio.create_task(holder.aclose())
        await until(lambda: next(iter(running._jobs.values())).take is None)
        assert await collect(running, b"let go") == []
        await closing
        assert running._jobs == {}


async def test_what_a_service_says_of_a_job_after_its_end_reaches_nobody() -> None:
    async with worker("talks_on:open_service") as running:
        assert [await collect(running, b"2") for _ in range(50)] == [numbers(2)] * 50
        assert running._jobs == {}


@pytest.mark.parametrize("way", ["python", "cuda", "cpu", "at once"])
async def test_memory_that_runs_out_fails_the_jobs_and_the_child_lives_on(way: str) -> None:
    async with worker("wants_memory:open_service") as running:
        with pytest.raises(GenerationError, match="out of memory"):
            await collect(running, way.encode())
        assert await collect(running, b"2") == numbers(2)


async def test_an_answer_too_large_for_a_frame_fails_its_job_and_the_child_lives_on() -> None:
    async with worker("wants_memory:open_service") as running:
        with pytest.raises(GenerationError, match="too large"):
            await collect(running, b"huge event")
        assert await collect(running, b"2") == numbers(2)


@on_both_loops
async def test_what_is_not_read_is_given_up_at_a_bound_and_keeps_no_other_waiting() -> None:
    bound = 8 * EVENT_BYTES
    async with worker("floods:open_service") as running:
        model = WorkerBackend(running, Room(sequences=1, waiting=9))

        def start_job(events: int) -> Stream[bytes]:
            async def make(stream: Stream[bytes]) -> None:
                async with model.admission.enter("a", prompt_tokens=1, max_tokens=0):
                    await model.run(
                        b"%d" % events,
                        lambda event: stream.put(msgspec.msgpack.decode(event)),
                        within_seconds=60,
                        advice="",
                    )

            stream = BoundedStream[bytes](bound, len)
            model.start(stream, make)
            return stream

        unread, behind = start_job(30), start_job(7)
        await asyncio.wait_for(model.idle(), DEADLINE_SECONDS)
        assert [int.from_bytes(event[:4], "big") async for event in behind] == list(range(7))
        seen: list[bytes] = []
        with pytest.raises(GenerationError, match="not read"):
            await _collect_into(seen, unread)
        assert [int.from_bytes(event[:4], "big") for event in seen] == list(range(9))
        assert running._jobs == {}


@on_both_loops
async def test_a_job_whose_events_cannot_be_taken_fails_alone_and_is_cancelled() -> None:
    async with worker() as running:
        taken: list[object] = []
        other = asyncio.create_task(collect(running, b"500"))
        with pytest.raises(ZeroDivisionError):
            await running.run(b"1000000000", lambda _: taken.append(1 / (3 - len(taken))))
        assert len(taken) == 3
        assert await other == numbers(500)
        assert running._jobs == {}


@on_both_loops
async def test_a_reader_that_leaves_a_full_backlog_frees_the_child() -> None:
    async with worker("floods:open_service") as running:
        async with aclosing(job_of(running, b"90")) as job:
            await anext(job)
        assert running._jobs == {}
        assert len(await collect(running, b"3")) == 3


@on_both_loops
async def test_a_shutdown_ends_the_child_by_itself_and_the_jobs_that_run() -> None:
    running = await start()
    async with aclosing(job_of(running, b"1000000000")) as job:
        await anext(job)
        await asyncio.gather(*(running.shutdown(DEADLINE_SECONDS) for _ in range(2)))
        assert (running.exit_status, running.died.is_set()) == (0, True)
        with pytest.raises(EngineDiedError):
            await _collect_into([], job)
    with pytest.raises(NotStartedError):
        await collect(running, b"1")
    await running.shutdown()
    running.terminate()


@on_both_loops
async def test_a_shutdown_reaches_a_child_whose_reader_has_stopped_reading() -> None:
    async with worker("floods:open_service") as running, aclosing(job_of(running, b"90")) as job:
        await anext(job)
        await running.shutdown(within_seconds=DEADLINE_SECONDS)
        assert running.exit_status == 0


def test_messages_come_out_of_any_pieces_as_they_went_in() -> None:
    messages = [Event(1, b"x" * 300), Done(1), Event(2, b"")]
    stream = b"".join(to_frame(message) for message in messages)
    for size in (1, 3, 5, len(stream)):
        reader: FrameReader[Any] = FrameReader(Event[bytes] | Done)
        seen = []
        for start_at in range(0, len(stream), size):
            seen += reader.read(stream[start_at : start_at + size])
        assert seen == messages


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4Evil", b"\x82\xa4type\xa4Done\xa3job\xa1\xff"]
)
def test_a_frame_that_holds_no_message_is_an_error(content: bytes) -> None:
    reader: FrameReader[Any] = FrameReader(Event[bytes] | Done)
    with pytest.raises(FrameError):
        list(reader.read(len(content).to_bytes(4, "big") + content))


def test_neither_half_imports_a_heavy_library() -> None:
    script = """
import sys, engine.process.child, engine.process.parent
print(sorted({"torch", "vllm", "diffusers", "transformers", "numpy"} & set(sys.modules)))
"""
    root = Path(__file__).parents[3]
    assert subprocess.check_output([sys.executable, "-c", script], cwd=root, text=True) == "[]\n"


async def _collect_into(seen: list[bytes], run: object) -> None:
    async for event in run:
        seen.append(event)  # noqa: PERF401  # what came before an error counts
