"""Any order of the public verbs, on a real child, leaves every run with exactly one end. A Hypothesis state machine."""

import asyncio
import os
import signal
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, precondition, rule
from workers import DEADLINE_SECONDS, job_of, numbers, start

from engine.errors import EngineDiedError, NotStartedError

ENDLESS = 10**9


class Run:
    """A `run` that is being read, what was read, and how it ended."""

    def __init__(self, events: Any, end: int) -> None:
        self.events, self.end = events, end
        self.seen: list[bytes] = []
        self.closed = self.died = False

    @property
    def over(self) -> bool:
        return self.closed or self.died or len(self.seen) == self.end


class Life(RuleBasedStateMachine):
    runs = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.complaints: list[Any] = []
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.runner.get_loop().set_exception_handler(lambda _, complaint: self.complaints.append(complaint))
        self.open: list[Run] = []

    @initialize()
    def start(self) -> None:
        self.worker = self.do(start())
        self.dying = False

    @precondition(lambda self: self.dying)
    @rule()
    def start_another(self) -> None:
        """As the pool does after a death."""
        for run in list(self.open):
            self.read_on(run)
        assert self.worker.exit_status is not None
        self.start()

    @rule(target=runs, end=st.sampled_from([0, 1, 7, ENDLESS]))
    def begin(self, end: int) -> Run:
        async def make() -> Run:
            return Run(job_of(self.worker, b"%d" % end), end)

        started: Run = self.do(make())
        self.open.append(started)
        return started

    @rule(run=runs)
    def read(self, run: Run) -> None:
        """Read one event, or see that there are no more."""
        if run in self.open:
            self.do(self.advance(run))

    @rule(run=consumes(runs))
    def close(self, run: Run) -> None:
        self.do(run.events.aclose())
        self.forget(run)

    @rule(run=consumes(runs))
    def close_while_reading(self, run: Run) -> None:
        """Cancel the task that reads, as a server does whose client has left."""

        async def leave() -> None:
            reading = asyncio.create_task(self.read_all(run))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await run.events.aclose()

        self.do(leave())
        self.forget(run)

    @rule(run=consumes(runs))
    def read_on(self, run: Run) -> None:
        """Read to the end, which an endless run of a living child does not have."""
        if run in self.open and (run.end != ENDLESS or self.dying):
            self.do(self.read_all(run))
            self.forget(run)
        else:
            self.close(run)

    @rule(how=st.sampled_from(["kill", "terminate"]))
    def kill(self, how: str) -> None:
        if how == "terminate" or self.worker.exit_status is not None:
            self.worker.terminate()
        else:
            os.kill(self.worker.pid, signal.SIGKILL)
        self.do(self.worker.died.wait())
        self.dying = True

    @rule()
    def kill_while_all_are_closed(self) -> None:
        async def end() -> None:
            closing = [asyncio.create_task(run.events.aclose()) for run in self.open]
            await asyncio.sleep(0)
            self.worker.terminate()
            await asyncio.gather(*closing, self.worker.died.wait())

        self.do(end())
        self.open.clear()
        self.dying = True

    @rule()
    def shut_down(self) -> None:
        already = self.worker.exit_status
        self.do(self.worker.shutdown(within_seconds=DEADLINE_SECONDS / 2))
        assert self.worker.exit_status == (0 if already is None else already)
        self.dying = True

    def teardown(self) -> None:
        for run in self.open:
            self.do(run.events.aclose())
        if hasattr(self, "worker"):
            self.do(self.worker.shutdown(within_seconds=DEADLINE_SECONDS / 2))
            assert self.worker._jobs == {}
        self.runner.close()
        assert self.complaints == []

    def do(self, doing: Any) -> Any:
        return self.runner.run(asyncio.wait_for(doing, DEADLINE_SECONDS))

    def forget(self, run: Run) -> None:
        if run in self.open:
            self.open.remove(run)

    async def read_all(self, run: Run) -> None:
        while await self.advance(run):
            pass
        if not self.dying and run in self.open:
            assert run.end != ENDLESS
            assert run.seen == numbers(run.end)

    async def advance(self, run: Run) -> bool:
        """Whether there was another event. A death is an end only if there was one."""
        try:
            run.seen.append(await anext(run.events))
        except StopAsyncIteration:
            # One that was closed before has no more to say. All that an endless one would say fills the memory
            closed = run.died or run not in self.open
            assert closed or (run.end != ENDLESS and run.seen == numbers(run.end))
            return False
        except NotStartedError:
            assert self.dying
            assert run.seen == []
            run.died = True
            return False
        except EngineDiedError:
            assert self.dying
            run.died = True
            return False
        assert run.seen[-1] == b"%d" % (len(run.seen) - 1)
        return True


class LongLife(Life):
    pass


WALK = settings(stateful_step_count=25, suppress_health_check=list(HealthCheck))
Life.TestCase.settings = settings(WALK, max_examples=4)
LongLife.TestCase.settings = settings(WALK, max_examples=200)
TestLife = pytest.mark.timeout(120)(Life.TestCase)
TestLongLife = pytest.mark.rounds(pytest.mark.timeout(1800)(LongLife.TestCase))
