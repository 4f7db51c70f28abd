"""Models of a pool that take turns: how one makes room, sleeps, wakes up or dies meanwhile. Backends are held open."""

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from skipping_loop import on_skipping_loop

from engine import EngineDiedError, LoadError, ModelSpec, UnavailableError, UnknownModelError, load_config
from engine.pool.memory import SWAP_EVERY_SECONDS, Ledger, MemoryPlan, Share
from engine.pool.pool import Pool

SPECS = list(load_config(Path(__file__).parents[2] / "models.yaml").models.values())[:2]
PLUS, PRO = (spec.id for spec in SPECS)
ALONE = MemoryPlan()
SWAPPING = MemoryPlan({None: 10}, {name: Share({None: 10}, swaps=True) for name in (PLUS, PRO)})


class Backend:
    """One that answers nothing, and says what was asked of it."""

    def __init__(self, *, sleeps: bool) -> None:
        self.died = asyncio.Event()
        self.told: list[str] = []
        self.wakes = True
        self._sleeps = sleeps

    async def idle(self) -> None:
        """Nothing runs here."""

    async def sleep(self) -> bool:
        self.told.append("sleep")
        return self._sleeps

    async def wake(self) -> None:
        self.told.append("wake")
        if not self.wakes:
            raise RuntimeError("it does not wake up")

    async def shutdown(self) -> None:
        self.told.append("shutdown")

    def terminate(self) -> None:
        self.told.append("terminate")


class Place:
    """A pool of two models with room for one, and every backend that it has loaded."""

    def __init__(self, *, sleeps: bool) -> None:
        self.made: dict[str, list[Backend]] = {PLUS: [], PRO: []}
        self._sleeps = sleeps
        self.refused = False
        self.ledger = Ledger(SWAPPING)
        self.pool = Pool(SPECS, self._load, self.ledger)
        self.pool.start()

    async def _load(self, spec: ModelSpec, report: Any) -> Any:
        report("loading", 0.5)
        if self.refused:
            raise LoadError("it is refused")
        self.made[spec.id].append(Backend(sleeps=self._sleeps))
        return self.made[spec.id][-1]

    def states(self) -> list[str]:
        return [health.status for health in self.pool.health()]

    async def use(self, model: str, seconds: float = 1.0) -> None:
        with await self.pool.acquire(model):
            assert self.pool.get(model) is self.made[model][-1]
            await asyncio.sleep(seconds)

    def reload(self, specs: list[ModelSpec], plan: MemoryPlan, outdated: Collection[str] = ()) -> None:
        self.ledger.plan(plan)
        self.pool.update(specs, outdated)

    async def rest(self) -> None:
        await asyncio.sleep(2 * SWAP_EVERY_SECONDS)


@pytest.mark.parametrize("sleeps", [True, False])
@on_skipping_loop
async def test_one_makes_room_and_comes_back(sleeps: bool) -> None:  # noqa: FBT001
    place = Place(sleeps=sleeps)
    await place.rest()
    assert place.states() == ["ready", "unloaded"]
    await place.use(PRO)
    assert place.states() == ["sleeping" if sleeps else "unloaded", "ready"]
    await place.rest()
    await place.use(PLUS)
    assert place.states() == ["ready", "sleeping" if sleeps else "unloaded"]
    assert len(place.made[PLUS]) == (1 if sleeps else 2)
    assert place.made[PLUS][0].told == (["sleep", "wake"] if sleeps else ["sleep", "shutdown"])
    assert place.ledger.swaps == 2
    await place.pool.stop()


@on_skipping_loop
async def test_one_that_is_evicted_by_hand_ends_its_lease_and_comes_back_when_it_is_asked_for() -> None:
    place = Place(sleeps=False)
    await place.rest()
    with await place.pool.acquire(PLUS):
        assert place.pool.evict(PLUS)
        await place.rest()
        assert place.made[PLUS][0].told == []
    await place.rest()
    assert place.states() == ["unloaded", "unloaded"]
    await place.use(PLUS)
    assert place.states() == ["ready", "unloaded"]
    await place.pool.stop()


@on_skipping_loop
async def test_one_with_memory_of_its_own_is_not_evicted_by_hand() -> None:
    place = Place(sleeps=False)
    place.ledger.plan(ALONE)
    await place.rest()
    assert not place.pool.evict(PLUS)
    with pytest.raises(UnknownModelError):
        place.pool.evict("no such model")
    await place.rest()
    assert place.made[PLUS][0].told == []
    await place.pool.stop()


@on_skipping_loop
async def test_one_that_failed_is_loaded_again_when_that_is_asked_for() -> None:
    place = Place(sleeps=False)
    place.ledger.plan(ALONE)
    place.refused = True
    await place.rest()
    assert place.states()[0] == "failed"
    place.refused = False
    place.pool.load_again(PLUS)
    await place.rest()
    assert place.states()[0] == "ready"
    place.pool.load_again(PLUS)  # it is: nothing happens
    await place.rest()
    assert len(place.made[PLUS]) == 1
    await place.pool.stop()


@on_skipping_loop
async def test_one_that_does_not_wake_up_is_loaded_anew() -> None:
    place = Place(sleeps=True)
    await place.rest()
    await place.use(PRO)
    place.made[PLUS][0].wakes = False
    await place.rest()
    await place.use(PLUS)
    assert place.made[PLUS][0].told == ["sleep", "wake", "shutdown"]
    assert len(place.made[PLUS]) == 2
    await place.pool.stop()


@pytest.mark.parametrize("sleeps", [True, False])
@on_skipping_loop
async def test_one_that_dies_out_of_its_turn_is_loaded_when_it_is_asked_for(sleeps: bool) -> None:  # noqa: FBT001
    place = Place(sleeps=sleeps)
    await place.rest()
    await place.use(PRO)
    place.made[PLUS][0].died.set()
    await place.rest()
    assert place.states() == ["unloaded", "ready"]
    await place.use(PLUS)
    assert len(place.made[PLUS]) == 2
    await place.pool.stop()


@on_skipping_loop
async def test_one_that_dies_in_its_turn_keeps_its_room_and_is_back_at_once() -> None:
    place = Place(sleeps=False)
    await place.rest()
    place.made[PLUS][0].died.set()
    with pytest.raises(EngineDiedError):
        await place.use(PLUS)
    await place.rest()
    assert place.states() == ["ready", "unloaded"]
    assert len(place.made[PLUS]) == 2
    await place.pool.stop()


@on_skipping_loop
async def test_after_a_reload_that_gives_all_of_them_room_everybody_is_loaded() -> None:
    place = Place(sleeps=False)
    await place.rest()
    place.reload(SPECS, ALONE)
    await place.rest()
    assert place.states() == ["ready", "ready"]
    assert len(place.made[PLUS]) == 1
    await place.pool.stop()


@on_skipping_loop
async def test_after_a_reload_that_takes_room_away_they_begin_to_take_turns() -> None:
    place = Place(sleeps=False)
    place.reload(SPECS, ALONE)
    await place.rest()
    assert place.states() == ["ready", "ready"]
    place.reload(SPECS, SWAPPING)
    await place.rest()
    assert sorted(place.states()) == ["ready", "unloaded"]
    await place.use(PLUS)
    assert place.states() == ["ready", "unloaded"]
    await place.rest()
    await asyncio.gather(place.use(PRO), place.use(PLUS))
    assert sorted(place.states()) == ["ready", "unloaded"]
    await place.pool.stop()


@on_skipping_loop
async def test_after_a_reload_a_model_that_was_alone_makes_room_when_its_last_answer_has_ended() -> None:
    place = Place(sleeps=False)
    place.reload(SPECS[:1], ALONE)
    await place.rest()
    using = asyncio.create_task(place.use(PLUS, 300))
    await place.rest()
    place.reload(SPECS, SWAPPING)
    await place.use(PRO)
    assert using.done()
    assert place.made[PLUS][0].told == ["sleep", "shutdown"]
    await place.rest()
    await place.use(PLUS)
    assert place.states() == ["ready", "unloaded"]
    await using
    await place.pool.stop()


@on_skipping_loop
async def test_a_model_whose_weights_have_come_is_loaded_anew_after_its_last_answer() -> None:
    place = Place(sleeps=False)
    place.reload(SPECS, ALONE)
    await place.rest()
    using = asyncio.create_task(place.use(PLUS, 5))
    await asyncio.sleep(1)
    place.reload(SPECS, ALONE, {PLUS})
    await place.rest()
    await using
    assert [len(place.made[name]) for name in (PLUS, PRO)] == [2, 1]
    assert place.states() == ["ready", "ready"]
    await place.pool.stop()


@on_skipping_loop
async def test_who_waits_when_the_pool_ends_is_told_so() -> None:
    place = Place(sleeps=False)
    await place.rest()
    using = asyncio.create_task(place.use(PLUS, 1000))
    waiting = asyncio.create_task(place.use(PRO))
    await place.rest()
    await place.pool.stop()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(waiting, 5)
    using.cancel()
