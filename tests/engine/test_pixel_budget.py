"""The pixels of all requests together are bounded, freed with the block that made them, and shared out in turns."""

import asyncio
import gc

import pytest
from PIL import Image
from serving import async_poll_until
from skipping_loop import settle
from test_pictures import asking, saved, uri

from engine.media import ImageLimits, Pictures, PixelBudget, PixelLoad


class Asker:
    """Takes pixels and keeps them until told otherwise."""

    def __init__(self, budget: PixelBudget, owner: str, pixels: int, order: list[str]) -> None:
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(budget, owner, pixels, order))

    async def _run(self, budget: PixelBudget, owner: str, pixels: int, order: list[str]) -> None:
        async with budget.taken(owner, pixels):
            order.append(owner)
            await self._leave.wait()

    async def end(self) -> None:
        self._leave.set()
        await self.task


async def test_owners_take_turns_however_many_requests_one_of_them_has():
    budget, order = PixelBudget(10), []
    many = [Asker(budget, "many", 10, order) for _ in range(4)]
    await settle()
    one = Asker(budget, "one", 10, order)
    await settle()
    assert order == ["many"]
    for asker in (many[0], many[1], one, many[2], many[3]):
        await asker.end()
        await settle()
    assert order == ["many", "many", "one", "many", "many"]


async def test_what_fits_runs_together_and_more_than_all_runs_alone():
    budget, order = PixelBudget(10), []
    first, second, third = (Asker(budget, name, pixels, order) for name, pixels in (("a", 4), ("b", 6), ("c", 1)))
    await settle()
    assert order == ["a", "b"]
    assert budget.load == PixelLoad(used=10, limit=10, waiting=1)
    giant = Asker(budget, "giant", 99, order)
    await first.end()
    await settle()
    assert order == ["a", "b", "c"]
    await second.end()
    await settle()
    assert order == ["a", "b", "c"]
    await third.end()
    await settle()
    assert order == ["a", "b", "c", "giant"]
    await giant.end()


@pytest.mark.parametrize("at_its_turn", [False, True])
async def test_one_that_leaves_takes_nothing_with_it(*, at_its_turn: bool):
    budget, order = PixelBudget(10), []
    first = Asker(budget, "a", 10, order)
    await settle()
    left, small = Asker(budget, "b", 10, order), Asker(budget, "c", 2, order)
    await settle()
    if at_its_turn:
        first._leave.set()
        asyncio.get_running_loop().call_soon(left.task.cancel)  # right behind the end of the first
    else:
        left.task.cancel()
    await first.end()
    await settle()
    assert order == ["a", "c"]
    await small.end()
    last = Asker(budget, "d", 10, order)
    await settle()
    assert order[-1] == "d"
    await last.end()


async def test_one_that_leaves_lets_those_behind_it_pass():
    budget, order = PixelBudget(10), []
    first = Asker(budget, "a", 5, order)
    await settle()
    left, small = Asker(budget, "b", 10, order), Asker(budget, "c", 2, order)
    await settle()
    left.task.cancel()
    await settle()
    assert order == ["a", "c"]
    await first.end()
    await small.end()


async def test_pixels_are_free_after_the_block_whoever_still_refers_to_them():
    gc.disable()
    try:
        pictures = Pictures(ImageLimits())
        url = uri(saved(Image.new("RGB", (8, 8))))
        async with pictures.decoded(asking(url), most=1) as seen:
            image = seen.messages[0]["content"][1]["image_pil"]
            assert image.getpixel((0, 0)) == (0, 0, 0)
        with pytest.raises(ValueError, match="closed image"):
            image.getpixel((0, 0))
        pictures.close()
    finally:
        gc.enable()


async def test_requests_with_pictures_wait_for_the_pixels_of_others():
    pictures = Pictures(ImageLimits(max_megapixels=0.01))
    request = asking(*[uri(saved(Image.new("RGB", (100, 100))))] * 2)
    entered = []

    async def ask(name: str) -> None:
        async with pictures.decoded(request, most=2):
            entered.append(name)

    async with pictures.decoded(request, most=2):
        task = asyncio.create_task(ask("second"))
        await async_poll_until(lambda: pictures.load.waiting == 1 or bool(entered), 30)
        async with pictures.decoded(asking(), most=2):
            pass  # no picture: no wait
        assert entered == []
    await task
    assert entered == ["second"]
    pictures.close()
