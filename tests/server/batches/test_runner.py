"""Batches from file to files, with lines that are answered at once, on both databases."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from batch_parts import (
    MODEL,
    Answers,
    House,
    answered,
    assert_each_once,
    house_at,
    jsonl,
    line,
)
from serving import async_poll_until

from engine.errors import EngineDiedError, GenerationError, RequestError, engine_died
from server.batches.folder import Folder
from server.batches.runner import BatchLimits
from server.errors import ApiError
from server.store.batches import FullError
from server.store.database import Database


@pytest.fixture
def house(database: Database, tmp_path: Path) -> House:
    return house_at(database, tmp_path / "batches")


def numbered(count: int) -> list[dict[str, Any]]:
    return [line(f"line {number}", n=number) for number in range(count)]


def ids(count: int) -> list[str]:
    return [f"line {number}" for number in range(count)]


async def test_answers_and_errors_come_in_the_order_of_the_input_and_are_counted(house: House):
    house.answers.one = lambda body: RequestError("No.", param="n") if body["n"] % 3 == 1 else answered(body)
    async with house.running() as runner:
        batch = await house.add(await house.key(), b"\n  \r\n" + jsonl(numbered(100)) + b"\n")
        runner.wake(batch)
        row = await house.ended(batch)
        journals = house.folder.path / "journals"
        await async_poll_until(lambda: not any(journals.iterdir()), 60)  # after the row says that it is completed
    assert (row.status, row.total, row.completed, row.failed) == ("completed", 100, 67, 33)
    assert row.model == MODEL
    assert row.usage == {"input_tokens": 201, "output_tokens": 134, "cached_tokens": 0, "reasoning_tokens": 0}
    assert None not in {row.in_progress_at, row.finalizing_at, row.completed_at}
    output, errors = house.output(row)
    assert_each_once(ids(100), output, errors)
    assert [one["response"]["body"]["echo"] for one in output] == [n for n in range(100) if n % 3 != 1]
    assert {one["response"]["status_code"] for one in output} == {200}
    assert errors[0]["response"]["status_code"] == 400
    assert errors[0]["response"]["body"]["error"]["param"] == "n"


async def test_a_file_that_is_wrong_fails_with_the_numbers_of_its_lines(house: House):
    good = line("a")
    wrong = [
        b"nonsense",
        b"[1]",
        b'{"custom_id": "\xff"}',
        json.dumps(good | {"custom_id": 7}).encode(),
        json.dumps(good | {"custom_id": "a"}).encode(),
        json.dumps(good | {"custom_id": "b", "method": "GET"}).encode(),
        json.dumps(good | {"custom_id": "c", "url": "/v1/embeddings"}).encode(),
        json.dumps(good | {"custom_id": "d", "body": 3}).encode(),
        json.dumps(good | {"custom_id": "e", "body": {"model": "nobody's"}}).encode(),
        json.dumps(good | {"custom_id": "f", "body": {}}).encode(),
        b"[" * 100_000,
        b"\x00",
        json.dumps(good | {"custom_id": [[]] * 100_000}).encode(),
    ]
    async with house.running() as runner:
        batch = await house.add(await house.key(), b"\n".join([json.dumps(good).encode(), *wrong]))
        runner.wake(batch)
        row = await house.ended(batch)
    assert row.status == "failed"
    assert [(error["line"], error["code"]) for error in row.errors or ()] == [
        (2, "invalid_json_line"),
        (3, "invalid_json_line"),
        (4, "invalid_json_line"),
        (5, "invalid_custom_id"),
        (6, "duplicate_custom_id"),
        (7, "invalid_method"),
        (8, "mismatched_endpoint"),
        (9, "invalid_body"),
        (10, "model_not_found"),
        (11, "model_not_found"),
        (12, "invalid_json_line"),
        (13, "invalid_json_line"),
        (14, "invalid_custom_id"),
    ]
    assert house.answers.asked == []


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\n \n", "empty_file"),
        (jsonl(numbered(11)), "too_many_lines"),
        (b"\n" * 5000, "too_many_lines"),
        (jsonl([line("long", text="x" * 5000)]), "line_too_long"),
        (b"x" * 5000, "line_too_long"),
    ],
)
async def test_a_file_beyond_the_limits_fails(database: Database, tmp_path: Path, content: bytes, code: str):
    house = house_at(database, tmp_path, limits=BatchLimits(most_lines=10, most_line_bytes=4096))
    async with house.running():
        row = await house.ended(await house.add(await house.key(), content))
    assert (row.status, [error["code"] for error in row.errors or ()]) == ("failed", [code])


async def test_at_most_a_hundred_errors_are_listed(house: House):
    async with house.running():
        row = await house.ended(await house.add(await house.key(), b"{\n" * 1000))
    assert len(row.errors or ()) == 100


async def test_cancelling_keeps_what_is_done_and_ends_soon(house: House):
    done = asyncio.Event()

    def one(body: Any) -> Any:
        if body["n"] == 99:
            house.answers.gate = asyncio.Event()  # the later ones never end
            done.set()
        return answered(body)

    house.answers.one, house.limits = one, BatchLimits(most_running=8)
    async with house.running() as runner:
        batch = await house.add(await house.key(), jsonl(numbered(300)))
        await asyncio.wait_for(done.wait(), 60)
        assert await house.store.move(batch, ("validating", "in_progress"), "cancelling")
        runner.wake(batch)
        async with asyncio.timeout(10):
            row = await house.ended(batch)
    assert row.status == "cancelled"
    output, errors = house.output(row)
    assert_each_once(ids(300), output, errors)
    assert 100 <= len(output) < 120
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert (row.total, row.completed, row.failed) == (300, len(output), 0)


async def test_past_its_window_a_batch_expires_with_what_is_done(house: House):
    house.answers.one = lambda body: answered(body) if body["n"] < 50 else ApiError(503, "x", "Later.")
    async with house.running() as runner:
        batch = await house.add(await house.key(), jsonl(numbered(60)), window=3600)
        await house.see(batch, lambda row: row.completed == 50)
        house.ahead_seconds = 3601.0
        runner.wake(batch)
        row = await house.ended(batch)
    assert row.status == "expired"
    output, errors = house.output(row)
    assert_each_once(ids(60), output, errors)
    assert [one["error"]["code"] for one in errors] == ["batch_expired"] * 10


async def test_limits_and_loads_are_waited_for(house: House):
    refusals = Counter[int]()

    def one(body: Any) -> Any:
        refusals[body["n"]] += 1
        if refusals[body["n"]] == 1 and body["n"] < 3:
            status = 429 if body["n"] else 503
            return ApiError(status, "later", "Later.", headers={"Retry-After": "1"})
        return answered(body)

    house.answers.one = one
    async with house.running():
        row = await house.ended(await house.add(await house.key(), jsonl(numbered(40))))
    assert (row.status, row.completed, row.failed) == ("completed", 40, 0)
    assert [refusals[number] for number in range(4)] == [2, 2, 2, 1]


async def test_what_will_never_work_is_the_error_of_its_line(house: House):
    errors = [
        ApiError(429, "insufficient_quota", "None.", headers={"x-should-retry": "false"}),
        GenerationError("The model gave up."),
        ValueError("a bug of ours"),
    ]
    house.answers.one = lambda body: errors[body["n"]]
    async with house.running():
        row = await house.ended(await house.add(await house.key(), jsonl(numbered(3))))
    _, failed = house.output(row)
    assert [one["response"]["status_code"] for one in failed] == [429, 500, 500]
    assert Counter(body["n"] for body in house.answers.asked) == {0: 1, 1: 3, 2: 3}
    assert "a bug of ours" not in json.dumps(failed)


async def test_a_line_that_kills_its_engine_is_found_out_and_costs_nobody_else(house: House):
    """Its neighbours die with it, then it runs alone: twice is enough."""
    alone: list[int] = []
    crashed = asyncio.Event()

    async def answer(endpoint: str, key: Any, request_id: str, body: Any) -> dict[str, Any]:
        nonlocal crashed
        house.answers.asked.append(body)
        house.answers.running += 1
        mine = crashed
        try:
            for _ in range(20):
                await asyncio.sleep(0)
                if mine.is_set():
                    raise engine_died(EngineDiedError)
            if body["n"] == 7:
                alone.append(house.answers.running)
                crashed, before = asyncio.Event(), crashed
                before.set()
                raise engine_died(EngineDiedError)
            return answered(body)
        finally:
            house.answers.running -= 1

    house.answers.answer = answer  # type: ignore[method-assign]
    async with house.running():
        row = await house.ended(await house.add(await house.key(), jsonl(numbered(30))))
    output, errors = house.output(row)
    assert_each_once(ids(30), output, errors)
    assert [one["custom_id"] for one in errors] == ["line 7"]
    assert errors[0]["response"]["body"]["error"]["code"] == "engine_unavailable"
    assert len(alone) == 4
    assert alone[2:] == [1, 1]


async def test_a_revoked_key_ends_its_batches(house: House):
    house.limits = BatchLimits(key_seconds=0.1)
    house.answers.gate = asyncio.Event()
    async with house.running():
        key = await house.key()
        batch = await house.add(key, jsonl(numbered(3)))
        await house.see(batch, lambda row: row.status == "in_progress")
        await house.keys.revoke(key.public_id)
        row = await house.ended(batch)
    assert (row.status, [error["code"] for error in row.errors or ()]) == ("cancelled", ["key_revoked"])


async def test_a_key_that_was_replaced_hands_its_batches_on(house: House):
    key = await house.key()
    batch = await house.add(key, jsonl(numbered(3)))
    _, successor = await house.keys.rotate(key.public_id, timedelta())
    async with house.running():
        row = await house.ended(batch)
    assert row.status == "completed"
    owners = await house.store.owners(successor.public_id)
    assert set(owners) == {key.public_id, successor.public_id}
    assert await house.store.file(row.output_file_id or "", owners) is not None
    assert await house.store.file(row.output_file_id or "", [(await house.key("other")).public_id]) is None


async def test_two_keys_share_what_may_run(house: House):
    """One has a hundred times as many lines, and the other does not wait for them."""
    house.limits, house.answers.steps = BatchLimits(most_running=16), asyncio.Semaphore(0)
    steps = house.answers.steps
    small_ones: list[Any] = []

    def one(body: Any) -> Any:
        if body["small"]:
            small_ones.append(body)
        return answered(body)

    house.answers.one = one
    async with house.running():
        for small, count in ((False, 3000), (True, 30)):
            await house.add(await house.key(), jsonl(line(f"{number}", small=small) for number in range(count)))
        taken = 0
        while len(small_ones) < 30:
            await house.answers.until(finished=taken, running=16)
            steps.release()
            taken += 1
    assert 30 < taken < 120
    assert house.answers.most == 16


async def test_lines_at_work_are_bounded_by_their_bytes(database: Database, tmp_path: Path):
    house = house_at(database, tmp_path, limits=BatchLimits(most_bytes=30_000), answers=Answers(turns=50))
    async with house.running():
        lines = [line(f"line {number}", n=number, text="x" * 9000) for number in range(30)]
        row = await house.ended(await house.add(await house.key(), jsonl(lines)))
    assert row.completed == 30
    assert house.answers.most == 3


async def test_it_goes_on_where_another_process_was_killed(house: House):
    """Lines that were answered are not asked again; those at work are."""
    house.limits = BatchLimits(most_running=10)
    half = asyncio.Event()

    def one(body: Any) -> Any:
        if len(house.answers.asked) >= 500:
            half.set()
        return answered(body)

    house.answers.one = one
    batch = await house.add(await house.key(), jsonl(numbered(1000)))
    async with house.running():
        await asyncio.wait_for(half.wait(), 60)
    before = len(house.answers.asked)
    assert before < 1000
    async with house.running():
        row = await house.ended(batch)
    output, errors = house.output(row)
    assert_each_once(ids(1000), output, errors)
    assert (row.completed, row.failed) == (1000, 0)
    assert len(house.answers.asked) <= 1000 + 10


async def test_of_two_runners_of_a_shared_folder_one_has_it(database: Database, tmp_path: Path):
    first, second = (
        House(database, Folder(tmp_path / "shared", shared=True), Answers(gate=asyncio.Event())) for _ in range(2)
    )
    batch = await first.add(await first.key(), jsonl(numbered(50)))
    async with first.running(), second.running():
        await first.see(batch, lambda row: row.status == "in_progress")
        await async_poll_until(lambda: bool(first.answers.asked or second.answers.asked), 60)
        assert bool(first.answers.asked) != bool(second.answers.asked)
        for house in (first, second):
            assert house.answers.gate is not None
            house.answers.gate.set()
        row = await first.ended(batch)
    assert row.completed == 50
    assert len(first.answers.asked) + len(second.answers.asked) == 50


async def test_it_stops_though_it_was_woken_at_the_same_moment(house: House):
    async with asyncio.timeout(60), house.running() as runner:
        await house.ended(await house.add(await house.key(), jsonl(numbered(1))))
        for _ in range(20):  # until it has nothing to do
            await asyncio.sleep(0)
        runner.wake("none")


async def test_a_full_disk_is_waited_out(house: House):
    house.limits = BatchLimits(pause_seconds=0.1)
    house.folder = Folder(house.folder.path, kept_free_bytes=2**60)
    other = Folder(house.folder.path)
    kept, house.folder = house.folder, other
    batch = await house.add(await house.key(), jsonl(numbered(5)))
    house.folder = kept
    async with house.running():
        await house.see(batch, lambda row: row.status == "finalizing")
        kept._kept_free_bytes = 0
        row = await house.ended(batch)
    assert (row.status, row.completed) == ("completed", 5)


async def test_files_go_when_they_have_expired_but_not_those_that_a_batch_reads(house: House):
    house.answers.gate = asyncio.Event()
    key = await house.key()
    async with house.running() as runner:
        batch = await house.add(key, jsonl(numbered(2)), window=10**8)
        waiting = await house.see(batch, lambda row: row.status == "in_progress")
        house.ahead_seconds = 2e6
        await runner.sweep()
        assert house.folder.file(waiting.input_file_id).exists()
        house.answers.gate.set()
        row = await house.ended(batch)
        house.ahead_seconds = 2e8
        await runner.sweep()
    assert await house.store.batch(batch) is None
    assert await house.store.known_files([row.input_file_id, row.output_file_id or ""]) == set()


async def test_files_of_a_revoked_key_go_unless_a_successor_has_them(house: House):
    old = await house.key()
    async with house.running() as runner:
        row = await house.ended(await house.add(old, jsonl(numbered(2))))
        kept = [row.input_file_id, row.output_file_id or ""]
        _, new = await house.keys.rotate(old.public_id, timedelta())
        await house.keys.revoke(old.public_id)
        await runner.sweep()
        assert await house.store.known_files(kept) == set(kept)
        await house.keys.revoke(new.public_id)
        await runner.sweep()
    assert await house.store.known_files(kept) == set()
    assert [*(house.folder.path / "files").iterdir()] == []


async def test_what_a_key_may_have_is_exact_however_much_comes_at_once(house: House):
    key = await house.key()
    row = await house.store.batch(await house.add(key, jsonl(numbered(1))))
    assert row is not None

    async def add(number: int) -> bool:
        try:
            await house.store.add_batch(replace(row, id=f"batch_{number}"), [key.public_id], most=4)
        except FullError:
            return False
        return True

    assert sum(await asyncio.gather(*map(add, range(20)))) == 3
