"""A stream: what is put into it comes out, it ends once, and says so to those who asked."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from engine.stream import Stream


def filled(*items: int) -> Stream[int]:
    stream: Stream[int] = Stream()
    for item in items:
        stream.put(item)
    return stream


async def test_items_come_out_in_order_and_an_error_after_them():
    stream = filled(1, 2)
    stream.finish(LookupError("late"))
    stream.put(3)
    assert [await anext(stream), await anext(stream)] == [1, 2]
    with pytest.raises(LookupError):
        await anext(stream)
    assert [item async for item in stream] == []


async def test_a_reader_waits_for_an_item_and_a_cancelled_wait_loses_none():
    stream = filled()
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    again = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.put(1)
    assert await again == 1


@pytest.mark.parametrize("how", ["read", "failed", "closed", "closed when finished"])
async def test_owners_are_called_once_the_last_first_however_it_ends(how: str):
    called: list[int] = []
    stream = filled(1)
    stream.on_end(lambda: called.append(1))
    stream.on_end(lambda: called.append(2))
    if how != "closed":
        stream.finish(LookupError() if how == "failed" else None)
    async with aclosing(stream):
        if not how.startswith("closed"):
            await asyncio.gather(_read(stream), return_exceptions=True)
            assert called == [2, 1]
    await stream.aclose()
    assert called == [2, 1]
    stream.on_end(lambda: called.append(3))
    assert called == [2, 1, 3]


async def test_every_owner_is_called_whatever_another_one_raises():
    called: list[int] = []
    stream = filled()
    stream.on_end(lambda: called.append(1))
    stream.on_end(lambda: [].index(1))
    with pytest.raises(ValueError, match="not in list"):
        await stream.aclose()
    assert called == [1]


async def test_closing_aborts_what_is_not_finished_and_then_it_has_ended():
    order: list[str] = []
    stream = filled(1)

    async def abort() -> None:
        stream.put(2)
        stream.finish(LookupError("on its way out"))
        order.append("aborted")

    stream.on_abort = abort
    stream.on_end(lambda: order.append("ended"))
    await stream.aclose()
    await stream.aclose()
    assert order == ["aborted", "ended"]
    assert [item async for item in stream] == []


async def test_closing_does_not_abort_what_is_finished():
    stream = filled(1)
    stream.finish()

    async def abort() -> None:
        raise AssertionError

    stream.on_abort = abort
    await stream.aclose()


async def test_a_sink_takes_items_at_once_and_what_it_refuses_is_queued_with_all_behind_it():
    taken: list[int] = []

    def sink(item: int) -> bool:
        if item == 2:
            return False
        taken.append(item)
        return True

    stream: Stream[int] = Stream()
    stream.sink = sink
    for item in (1, 2, 3):
        stream.put(item)
    assert taken == [1]
    assert [await anext(stream), await anext(stream)] == [2, 3]
    stream.put(4)
    assert taken == [1, 4]


async def _read(stream: Stream[int]) -> list[int]:
    return [item async for item in stream]
