"""The pool keeps models loaded. Its loads are fakes that hold a state open until the test lets them go."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from skipping_loop import settle

from engine import (
    EngineDiedError,
    LoadError,
    ModelLoadingError,
    ModelSpec,
    UnavailableError,
    UnknownModelError,
    load_config,
)
from engine.errors import StartError
from engine.pool.model_state import Streak
from engine.pool.pool import Pool
from engine.process.parent import WorkerDiedError

SPECS = list(load_config(Path(__file__).parents[2] / "models.yaml").models.values())[:2]
PLUS, PRO = (spec.id for spec in SPECS)


class Backend:
    """A backend that answers nothing and remembers how it ended."""

    context_length = 7

    def __init__(self) -> None:
        self.died = asyncio.Event()
        self.ended: list[str] = []
        self.last_answer = asyncio.Event()

    async def idle(self) -> None:
        await self.last_answer.wait()

    async def shutdown(self) -> None:
        self.ended.append("shutdown")

    def terminate(self) -> None:
        self.ended.append("terminate")


class Loads:
    """The `load` of a pool: each call waits until the test settles it."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[Load] = asyncio.Queue()
        self.cancelled: list[str] = []
        self.count = 0

    async def __call__(self, spec: ModelSpec, report: Any) -> Any:
        self.count += 1
        load = Load(spec.id, report)
        self.calls.put_nowait(load)
        try:
            return await load.outcome
        except asyncio.CancelledError:
            self.cancelled.append(spec.id)
            raise

    async def next(self) -> Load:
        return await asyncio.wait_for(self.calls.get(), 60)


class Load:
    def __init__(self, model: str, report: Any) -> None:
        self.model = model
        self.report = report
        self.outcome: asyncio.Future[Backend] = asyncio.get_running_loop().create_future()

    def succeed(self) -> Backend:
        backend = Backend()
        self.outcome.set_result(backend)
        return backend


@pytest.fixture
def loads() -> Loads:
    return Loads()


@pytest.fixture
async def pool(loads: Loads) -> AsyncIterator[Pool]:
    made = Pool(SPECS[:1], loads)
    made.start()
    yield made
    await made.stop()


async def until(pool: Pool, status: str, phase: str = "", model: str = PLUS) -> None:
    """Wait for the pool to say so. Pools report every change, so nothing is polled."""

    def says_so() -> bool:
        return any(one.id == model and one.status == status and phase in one.phase for one in pool.health())

    while not says_so():
        async with asyncio.timeout(60):
            await pool.wait_for_change()


async def ready(pool: Pool, model: str) -> None:
    await until(pool, "ready", model=model)


async def test_a_model_that_loads_says_how_far_it_is(pool: Pool, loads: Loads):
    load = await loads.next()
    for phase, progress, patience in (("importing", 0.1, 10), ("warming up", 0.9, 5)):
        load.report(phase, progress)
        await until(pool, "loading", phase)
        assert pool.health()[0].progress == progress
        with pytest.raises(ModelLoadingError, match=phase) as caught:
            pool.get(PLUS)
        assert caught.value.retry_after_seconds == patience


async def test_a_ready_model_is_handed_out_and_an_unknown_one_is_not(pool: Pool, loads: Loads):
    backend = (await loads.next()).succeed()
    await ready(pool, PLUS)
    assert pool.get(PLUS) is backend
    assert pool.health()[0].progress == 1.0
    with pytest.raises(UnknownModelError):
        pool.get("nobody")


async def test_a_report_that_comes_after_the_load_changes_nothing(pool: Pool, loads: Loads):
    load = await loads.next()
    load.succeed()
    await ready(pool, PLUS)
    load.report("importing", 0.1)
    await asyncio.sleep(0)  # lets the loop deliver it
    assert (pool.health()[0].status, pool.health()[0].phase) == ("ready", "ready")


async def test_a_dead_engine_is_refused_at_once_then_restarted(pool: Pool, loads: Loads):
    first = (await loads.next()).succeed()
    await ready(pool, PLUS)
    first.died.set()
    with pytest.raises(EngineDiedError) as caught:  # before any task of the pool has had its turn
        pool.get(PLUS)
    assert caught.value.retry_after_seconds == 5
    again = await loads.next()
    assert first.ended == ["shutdown"]
    assert (pool.health()[0].status, pool.health()[0].restarts) == ("loading", 1)
    with pytest.raises(EngineDiedError):
        pool.get(PLUS)
    second = again.succeed()
    await ready(pool, PLUS)
    assert pool.get(PLUS) is second
    assert pool.health()[0].restarts == 1


async def test_a_model_that_can_never_load_fails_for_good_and_leaves_its_neighbour_alone(loads: Loads):
    pool = Pool(SPECS, loads)
    pool.start()
    calls = {load.model: load for load in (await loads.next(), await loads.next())}
    calls[PLUS].outcome.set_exception(LoadError("the reason, for the operator"))
    backend = calls[PRO].succeed()
    await until(pool, "failed")
    await ready(pool, PRO)
    assert pool.get(PRO) is backend
    assert pool.health()[0].error == "the reason, for the operator"
    assert "the reason" not in (pool.health()[0].reason or "")
    with pytest.raises(UnavailableError) as caught:
        pool.get(PLUS)
    assert not isinstance(caught.value, (ModelLoadingError, EngineDiedError))
    assert "the reason" not in caught.value.message
    assert caught.value.retry_after_seconds is None
    await pool.stop()
    assert loads.count == 2


async def test_a_load_that_fails_by_chance_is_tried_again(pool: Pool, loads: Loads):
    (await loads.next()).outcome.set_exception(RuntimeError("something with a path /secret"))
    await until(pool, "loading", "did not start")
    assert "/secret" not in (pool.health()[0].error or "")
    (await loads.next()).succeed()
    await ready(pool, PLUS)
    assert pool.health()[0].error is None


async def test_a_worker_that_dies_while_it_loads_is_a_reason_in_words(pool: Pool, loads: Loads):
    (await loads.next()).outcome.set_exception(WorkerDiedError(-signal.SIGKILL))
    await until(pool, "loading", "did not start")
    assert "was killed by SIGKILL" in (pool.health()[0].error or "")
    assert "WorkerDiedError" not in (pool.health()[0].error or "")


async def test_an_error_of_a_library_is_named_and_the_log_has_the_rest(pool: Pool, loads: Loads):
    (await loads.next()).outcome.set_exception(OSError("something with a path /secret"))
    await until(pool, "loading", "did not start")
    assert pool.health()[0].error == "The engine did not start: OSError; the log has the details."


async def test_a_first_load_is_given_up_after_three_attempts(pool: Pool, loads: Loads):
    for _ in range(3):
        (await loads.next()).outcome.set_exception(StartError("RuntimeError: CUDA error"))
    (task,) = pool._tasks.values()
    await asyncio.wait_for(task, 60)
    (health,) = pool.health()
    assert (health.status, loads.count) == ("failed", 3)
    assert "3 times in a row" in (health.reason or "")
    assert "CUDA" not in (health.reason or "")  # it is shown to everybody
    assert (health.error or "").endswith("The last time: RuntimeError: CUDA error")


async def test_stopping_cancels_loads_and_ends_ready_models_gracefully(loads: Loads):
    pool = Pool(SPECS, loads)
    pool.start()
    calls = {load.model: load for load in (await loads.next(), await loads.next())}
    backend = calls[PRO].succeed()
    await ready(pool, PRO)
    await pool.stop()
    assert loads.cancelled == [PLUS]
    assert backend.ended == ["shutdown"]
    assert {health.status for health in pool.health()} == {"unloaded"}
    for model in (PLUS, PRO):
        with pytest.raises(UnavailableError):
            pool.get(model)


async def test_terminating_ends_ready_models_at_once_and_restarts_nothing(loads: Loads):
    pool = Pool(SPECS[:1], loads)
    pool.start()
    backend = (await loads.next()).succeed()
    await ready(pool, PLUS)
    await pool.terminate()
    backend.died.set()
    assert backend.ended == ["terminate"]
    assert loads.count == 1


def test_the_pauses_between_restarts_double_up_to_a_minute():
    assert [Streak(failures).pause_seconds for failures in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert Streak(1000).pause_seconds == 60


def changed(spec: ModelSpec, **fields: Any) -> ModelSpec:
    return spec.model_copy(update=fields)


async def test_a_new_entry_is_loaded_and_the_others_stay_as_they_are(pool: Pool, loads: Loads):
    first = (await loads.next()).succeed()
    await ready(pool, PLUS)
    pool.update(SPECS)
    second = (await loads.next()).succeed()
    await ready(pool, PRO)
    assert (pool.get(PLUS), pool.get(PRO)) == (first, second)
    assert first.ended == []


async def test_a_model_that_is_gone_answers_nobody_new_and_ends_with_its_last_answer(pool: Pool, loads: Loads):
    backend = (await loads.next()).succeed()
    await ready(pool, PLUS)
    pool.update(SPECS[1:])
    with pytest.raises(UnknownModelError):
        pool.get(PLUS)
    assert [health.id for health in pool.health()] == [PRO]
    await settle()
    assert backend.ended == []
    backend.last_answer.set()
    await settle()
    assert backend.ended == ["shutdown"]


async def test_a_changed_engine_is_loaded_again_once_the_last_answer_has_ended(pool: Pool, loads: Loads):
    old = (await loads.next()).succeed()
    await ready(pool, PLUS)
    pool.update([changed(SPECS[0], weights="other")])
    await settle()
    with pytest.raises(ModelLoadingError):
        pool.get(PLUS)
    assert (old.ended, loads.calls.qsize()) == ([], 0)
    old.last_answer.set()
    new = (await loads.next()).succeed()
    await ready(pool, PLUS)
    assert (old.ended, pool.get(PLUS)) == (["shutdown"], new)


async def test_what_the_engine_does_not_need_to_know_changes_in_place(pool: Pool, loads: Loads):
    backend = (await loads.next()).succeed()
    await ready(pool, PLUS)
    pool.update([changed(SPECS[0], description="Another.", tier="enhanced")])
    await settle()
    assert pool.get(PLUS) is backend
    assert loads.count == 1


async def test_a_model_that_failed_for_good_is_tried_again_after_a_change(pool: Pool, loads: Loads):
    (await loads.next()).outcome.set_exception(LoadError("no such folder"))
    await settle()
    assert pool.health()[0].status == "failed"
    pool.update(SPECS[:1])
    (await loads.next()).succeed()
    await ready(pool, PLUS)


async def test_a_model_that_comes_back_while_it_leaves_is_loaded_once_more(pool: Pool, loads: Loads):
    old = (await loads.next()).succeed()
    await ready(pool, PLUS)
    pool.update(SPECS[1:])
    await settle()
    pool.update(SPECS[:1])
    old.last_answer.set()
    while (load := await loads.next()).model != PLUS:
        load.succeed()
    load.succeed()
    await ready(pool, PLUS)
    assert old.ended == ["shutdown"]


async def test_stopping_ends_also_what_is_still_giving_its_last_answer(loads: Loads):
    pool = Pool(SPECS[:1], loads)
    pool.start()
    backend = (await loads.next()).succeed()
    await ready(pool, PLUS)
    pool.update([changed(SPECS[0], weights="other")])
    await settle()
    await pool.stop()
    assert backend.ended == ["shutdown"]


async def test_who_waits_for_a_model_that_died_gets_its_successor(pool: Pool, loads: Loads):
    first = (await loads.next()).succeed()
    await ready(pool, PLUS)
    await pool.revived(PLUS)
    assert pool.get(PLUS) is first
    first.died.set()
    waiting = asyncio.create_task(pool.revived(PLUS))
    (await loads.next()).outcome.set_exception(RuntimeError)
    second = (await loads.next()).succeed()
    await asyncio.wait_for(waiting, 60)
    assert pool.get(PLUS) is second


async def test_who_waits_for_a_model_that_is_taken_away_is_told(pool: Pool, loads: Loads):
    (await loads.next()).succeed().died.set()
    await settle()
    waiting = asyncio.create_task(pool.revived(PLUS))
    load = await loads.next()
    pool.update(SPECS[1:])
    load.outcome.set_exception(RuntimeError)
    with pytest.raises(UnknownModelError):
        await asyncio.wait_for(waiting, 60)


async def test_an_engine_that_cannot_even_end_does_not_keep_its_successor_from_starting(pool: Pool, loads: Loads):
    class Stubborn(Backend):
        async def shutdown(self) -> None:
            raise RuntimeError

    first = Stubborn()
    (await loads.next()).outcome.set_result(first)
    await ready(pool, PLUS)
    first.died.set()
    second = (await loads.next()).succeed()
    await ready(pool, PLUS)
    assert pool.get(PLUS) is second


async def test_it_is_hopeless_only_when_every_model_has_failed_for_good(loads: Loads):
    pool = Pool(SPECS, loads)
    pool.start()
    hopeless = asyncio.create_task(pool.hopeless())
    calls = {load.model: load for load in (await loads.next(), await loads.next())}
    calls[PLUS].outcome.set_exception(LoadError("no such folder"))
    await settle()
    assert not hopeless.done()
    calls[PRO].outcome.set_exception(LoadError("no such folder"))
    await asyncio.wait_for(hopeless, 60)
    pool.update(SPECS)
    for load in (await loads.next(), await loads.next()):
        load.succeed()
    hopeless = asyncio.create_task(pool.hopeless())
    await settle()
    assert not hopeless.done()
    hopeless.cancel()
    await pool.stop()


async def test_who_waits_for_a_model_that_cannot_come_back_is_told(pool: Pool, loads: Loads):
    first = (await loads.next()).succeed()
    await ready(pool, PLUS)
    first.died.set()
    waiting = asyncio.create_task(pool.revived(PLUS))
    (await loads.next()).outcome.set_exception(LoadError("gone"))
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(waiting, 60)


async def test_of_several_engines_a_key_has_one_while_it_is_ready_and_has_not_clearly_more_to_do(loads: Loads):
    names = [PLUS, f"{PLUS}#2", f"{PLUS}#3"]
    pool = Pool([SPECS[0].model_copy(update={"id": name}) for name in names], loads)
    assert pool.engines_of(PLUS) == names
    pool.start()
    try:
        backends = {}
        for _ in names:
            load = await loads.next()
            backends[load.model] = load.succeed()
        for name in names:
            await ready(pool, name)
        owners = [f"key{number}" for number in range(60)]
        homes = {owner: pool.engine_for(PLUS, owner) for owner in owners}
        assert min([*homes.values()].count(name) for name in names) > 5
        assert homes == {owner: pool.engine_for(PLUS, owner) for owner in owners}
        mine = homes["key1"]
        leases = [await pool.acquire(mine) for _ in range(4)]
        assert pool.engine_for(PLUS, "key1") != mine, "four more than others have"
        leases.pop().close()
        assert pool.engine_for(PLUS, "key1") == mine
        backends[mine].died.set()
        moved = {owner: pool.engine_for(PLUS, owner) for owner in owners}
        assert mine not in moved.values()
        assert {owner: home for owner, home in homes.items() if home != mine}.items() <= moved.items()
    finally:
        await pool.terminate()
    assert pool.engine_for("unknown", "key1") == "unknown"
