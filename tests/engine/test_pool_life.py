"""Whatever happens to models in whatever order, the pool keeps its rules. A Hypothesis state machine.

Loads and backends are held open by the test; the pool, its tasks and its events are real. The clock jumps over pauses.
"""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from skipping_loop import SkippingLoop

from engine import (
    EngineDiedError,
    LoadError,
    ModelLoadingError,
    ModelSpec,
    UnavailableError,
    UnknownModelError,
    load_config,
)
from engine.pool.model_state import NEXT, REST_SECONDS
from engine.pool.pool import Pool

SPECS = {spec.id: spec for spec in list(load_config(Path(__file__).parents[2] / "models.yaml").models.values())[:2]}
MODELS = st.sampled_from(list(SPECS))
STEADY_SECONDS = 61.0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of failures on purpose."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Backend:
    def __init__(self, spec: ModelSpec, *, stubborn: bool) -> None:
        self.spec = spec
        self.died = asyncio.Event()
        self.last_answer = asyncio.Event()
        self.ended = False
        self.stubborn = stubborn

    @property
    def alive(self) -> bool:
        return not (self.ended or self.died.is_set())

    async def idle(self) -> None:
        await self.last_answer.wait()

    async def shutdown(self) -> None:
        self.ended = True
        await asyncio.sleep(0.1)
        if self.stubborn:
            raise RuntimeError("it does not end as it should")

    def terminate(self) -> None:
        self.ended = True


class Expected:
    """What the rules say of one model: the reference that the pool is held to."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.forget()

    def forget(self) -> None:
        """It begins anew, with another configuration."""
        self.failures = 0
        self.ready_at: float | None = None
        self.refused = False

    def became_ready(self) -> None:
        self.ready_at = self.clock()

    def died(self) -> None:
        assert self.ready_at is not None
        self.failures = 0 if self.clock() - self.ready_at > STEADY_SECONDS - 1 else self.failures + 1

    @property
    def given_up(self) -> bool:
        return self.refused or (self.ready_at is None and self.failures >= 3)

    @property
    def rests(self) -> bool:
        return not self.given_up and self.failures >= 5


async def gather(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.complaints: list[Any] = []
        self.runner = asyncio.Runner(loop_factory=SkippingLoop)
        self.loop = self.runner.get_loop()
        self.loop.set_exception_handler(lambda _, complaint: self.complaints.append(complaint))
        self.loading: dict[str, list[asyncio.Future[bool]]] = {model: [] for model in SPECS}
        self.backends: list[Backend] = []
        self.stubborn = False
        self.waiters: list[asyncio.Task[Any]] = []
        self.expected = {model: Expected(self.loop.time) for model in SPECS}
        self.wanted = dict(SPECS)
        self.seen: dict[str, str] = {}

    @initialize(end=st.sampled_from(["stop", "terminate"]))
    def start(self, end: str) -> None:
        self.end = end

        async def begin() -> None:
            self.pool = Pool(self.wanted.values(), self.load)
            self.pool.start()

        self.do(begin())

    async def load(self, spec: ModelSpec, report: Any) -> Any:
        outcome: asyncio.Future[bool] = self.loop.create_future()
        self.loading[spec.id].append(outcome)
        report("reading", 0.5)
        try:
            stubborn = await outcome
        finally:
            self.loading[spec.id].remove(outcome)
        self.backends.append(Backend(spec, stubborn=stubborn))
        return self.backends[-1]

    @rule(model=MODELS, shutdown=st.sampled_from(["easy", "stubborn"]))
    def load_succeeds(self, model: str, shutdown: str) -> None:
        for outcome in self.loading[model]:
            stale = self.is_stale(model)
            outcome.set_result(shutdown == "stubborn")
            if not stale:
                self.expected[model].became_ready()
        self.settle()

    @rule(model=MODELS, why=st.sampled_from(["wrong", "by chance"]))
    def load_fails(self, model: str, why: str) -> None:
        wrong = why == "wrong"
        for outcome in self.loading[model]:
            outcome.set_exception(LoadError("no such folder") if wrong else RuntimeError("out of luck"))
            if not self.is_stale(model):
                self.expected[model].refused = wrong
                self.expected[model].failures += not wrong
        self.settle()
        self.check_verdict(model)

    @rule(model=MODELS)
    def die(self, model: str) -> None:
        """It dies while it answers, or while it gives its last answers."""
        for backend in self.living(model):
            if self.pool._models[model].backend is backend:
                self.expected[model].died()
            backend.died.set()
            assert not isinstance(self.handed_out(model), Backend)  # before any task has had its turn
        self.settle()
        self.check_verdict(model)

    @rule(model=MODELS, times=st.integers(2, 6))
    def crash_again_and_again(self, model: str, times: int) -> None:
        for _ in range(times):
            self.load_succeeds(model, "easy")
            self.die(model)
            self.wait(10)

    @rule(model=MODELS)
    def give_the_last_answer(self, model: str) -> None:
        for backend in self.living(model):
            backend.last_answer.set()
        self.settle()

    @rule(models=st.sets(MODELS, min_size=1), changed=st.sets(MODELS))
    def reload(self, models: set[str], changed: set[str]) -> None:
        before = self.wanted
        self.wanted = {}
        for model, first in SPECS.items():
            if model in models:
                old = before.get(model, first)
                weights = f"{old.weights}x" if model in changed else old.weights
                self.wanted[model] = old.model_copy(update={"weights": weights})

        async def update() -> None:
            self.pool.update(self.wanted.values())
            for model in SPECS:
                if model not in self.wanted or self.is_stale(model):
                    self.expected[model].forget()

        self.do(update())
        self.settle()

    @rule(seconds=st.sampled_from([1.0, 10.0, STEADY_SECONDS, REST_SECONDS + 1]))
    def wait(self, seconds: float) -> None:
        self.do(asyncio.sleep(seconds))
        self.settle()
        for model in self.wanted:
            if seconds > REST_SECONDS and not self.expected[model].given_up:
                assert self.living(model) or self.loading[model]

    @rule(model=MODELS)
    def wait_for_its_return(self, model: str) -> None:
        self.waiters.append(self.loop.create_task(self.pool.revived(model)))
        self.settle()

    @precondition(lambda self: any(self.loading.values()))
    @rule(model=MODELS)
    def report_progress(self, model: str) -> None:
        if self.loading[model]:
            self.pool._models[model].load_on("warming up", 0.9)

    @invariant()
    def tasks_live_and_nothing_else_does(self) -> None:
        if not hasattr(self, "pool"):
            return
        for task in self.pool._tasks.values():
            assert not task.done() or task.exception() is None
        # For each model its task, and the three things it waits for; for each waiter its own; and who gives turns
        waiting = sum(not waiter.done() for waiter in self.waiters)
        assert len(asyncio.all_tasks(self.loop)) <= 4 * len(self.pool._models) + waiting + 1

    @invariant()
    def answers_are_not_cut_short(self) -> None:
        assert not any(
            backend.ended for backend in self.backends if not (backend.died.is_set() or backend.last_answer.is_set())
        )

    @invariant()
    def never_two_of_one_model(self) -> None:
        for model in SPECS:
            assert len(self.living(model)) + len(self.loading[model]) <= 1

    @invariant()
    def only_a_living_one_is_handed_out(self) -> None:
        if not hasattr(self, "pool"):
            return
        states = {health.id: health for health in self.pool.health()}
        assert set(states) == set(self.wanted)
        for model in SPECS:
            backend = self.handed_out(model)
            if isinstance(backend, Backend):
                assert backend.alive
                assert backend.spec.weights == self.wanted[model].weights
                assert states[model].status == "ready"
            elif model not in self.wanted:
                assert isinstance(backend, UnknownModelError)
            else:
                assert isinstance(backend, UnavailableError)
                assert states[model].status in {"loading", "failed"}
                dead = states[model].status == "loading" and self.pool._models[model].died
                assert isinstance(backend, EngineDiedError if dead else UnavailableError)
                loading = states[model].status == "loading" and not dead
                assert isinstance(backend, ModelLoadingError) == loading

    @invariant()
    def it_fails_when_the_rules_say_so_and_not_before(self) -> None:
        if not hasattr(self, "pool"):
            return
        for health in self.pool.health():
            expected = self.expected[health.id]
            if health.status == "failed":
                # One that is on its way to another configuration may still be ending what died
                assert expected.given_up or expected.rests or self.is_stale(health.id)
                assert health.reason
            elif expected.given_up:
                assert self.is_stale(health.id)
        given_up = [self.expected[model].given_up and not self.is_stale(model) for model in self.wanted]
        assert self.pool.is_hopeless() == all(given_up)

    @invariant()
    def who_waits_is_told_as_soon_as_there_is_something_to_tell(self) -> None:
        if hasattr(self, "pool") and not any(slot.reviving() for slot in self.pool._models.values()):
            assert all(waiter.done() for waiter in self.waiters)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.do(self.pool.stop() if self.end == "stop" else self.pool.terminate())
            self.settle()
            assert all(backend.ended for backend in self.backends)
            assert not any(self.loading.values())
            assert {health.status for health in self.pool.health()} <= {"unloaded"}
            results = self.do(gather(self.waiters))
            assert all(
                result is None or isinstance(result, (UnavailableError, UnknownModelError)) for result in results
            )
            assert not asyncio.all_tasks(self.loop)
        self.runner.close()
        assert self.complaints == []

    def do(self, doing: Any) -> Any:
        return self.runner.run(doing)

    def check_verdict(self, model: str) -> None:
        """After a failure."""
        expected, slot = self.expected[model], self.pool._models.get(model)
        if slot is not None and model in self.wanted and not slot.stale.is_set() and not self.living(model):
            tried_again = bool(self.loading[model])
            assert (slot.status == "failed") == ((expected.given_up or expected.rests) and not tried_again)

    def living(self, model: str) -> list[Backend]:
        return [backend for backend in self.backends if backend.spec.id == model and backend.alive]

    def is_stale(self, model: str) -> bool:
        """Whether it is on its way to another configuration."""
        slot = self.pool._models.get(model)
        return slot is not None and slot.stale.is_set()

    def handed_out(self, model: str) -> Any:
        try:
            return self.pool.get(model)
        except (UnavailableError, UnknownModelError) as error:
            return error

    def settle(self) -> None:
        """Let everything happen that needs no pause, and note which states follow each other."""

        async def turn() -> None:
            for _ in range(30):
                await asyncio.sleep(0)
                for name, slot in self.pool._models.items():
                    before = self.seen.get(name)
                    assert before is None or before == slot.status or slot.status in NEXT[before]  # type: ignore[index]
                    self.seen[name] = slot.status
                for name in set(self.seen) - set(self.pool._models):
                    del self.seen[name]

        self.do(turn())


Life.TestCase.settings = settings(max_examples=80, stateful_step_count=40, suppress_health_check=list(HealthCheck))
TestLife = pytest.mark.timeout(120)(Life.TestCase)
