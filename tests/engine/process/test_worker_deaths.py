"""How a worker and those who wait for it end: at load, in mid-job, with the server. Real children, both event loops."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
from workers import DEADLINE_SECONDS, collect, job_of, numbers, on_both_loops, start, until, wait_until_gone, worker

from engine.errors import EngineDiedError, LoadError, NotStartedError
from engine.process.parent import WorkerDiedError
from engine.stream import Stream


@on_both_loops
async def test_a_service_that_refuses_to_load_says_why() -> None:
    with pytest.raises(LoadError, match=r"^There is no pipeline in /models/x\.$"):
        await start("loads:refuse")


@pytest.mark.parametrize(
    ("service", "status"),
    [
        ("crashes_at_import:open_service", 1),
        ("not_there:open_service", 1),
        ("well:not_there", 1),
        ("loads:raise_something", 1),
        ("loads:exit_quietly", 5),
        ("loads:be_killed", -signal.SIGKILL),
    ],
)
async def test_a_child_that_dies_while_it_loads_is_an_error_with_its_exit_status(service: str, status: int) -> None:
    with pytest.raises(WorkerDiedError, match=f"status {status}" if status > 0 else "SIGKILL") as died:
        await start(service)
    assert died.value.exit_status == status


def test_what_went_wrong_at_load_is_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerDiedError):
        asyncio.run(start("crashes_at_import:open_service"))
    assert "ImportError: libcudart.so.13: cannot open shared object file" in capfd.readouterr().err


@pytest.mark.parametrize("service", ["loads:never_end", "loads:go_on_reporting"])
@on_both_loops
async def test_cancelling_a_start_kills_the_child(service: str) -> None:
    pids: list[int] = []
    starting = asyncio.create_task(start(service, lambda phase, _: pids.append(int(phase))))
    await until(lambda: bool(pids))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("raise", 1),
        ("exit", 3),
        ("segfault", -signal.SIGSEGV),
        ("write nonsense", -signal.SIGKILL),
        ("write a huge frame", -signal.SIGKILL),
    ],
)
async def test_a_child_that_dies_in_mid_job_ends_every_run(way: str, status: int) -> None:
    async with worker("dies:open_service") as running:
        runs = [asyncio.create_task(collect(running, way.encode())) for _ in range(3)]
        for run in runs:
            with pytest.raises(EngineDiedError):
                await run
        await running.died.wait()
        assert running.exit_status == status
        with pytest.raises(NotStartedError):
            await collect(running, b"exit")


@pytest.mark.parametrize("way", ["shutdown", "kill"])
async def test_what_a_child_leaves_in_its_temporary_folder_goes_with_it(way: str) -> None:
    async with worker() as running:
        folder = Path(psutil.Process(running.pid).environ()["TMPDIR"])
        (folder / "left").write_bytes(b"...")
        if way == "kill":
            os.kill(running.pid, signal.SIGKILL)
            await running.died.wait()
        else:
            await running.shutdown()
        assert not os.access(folder, os.F_OK)


def test_an_unexpected_error_leaves_a_trace_without_the_words_of_a_client(capfd: pytest.CaptureFixture[str]) -> None:
    async def crash() -> None:
        async with worker("dies:open_service") as running:
            with pytest.raises(EngineDiedError):
                await collect(running, b"raise")
            await running.died.wait()

    asyncio.run(crash())
    log = capfd.readouterr().err
    assert "ValueError: (message left out)" in log
    assert "dies.py" in log


@on_both_loops
async def test_an_answer_that_was_complete_before_the_child_died_is_an_answer() -> None:
    started = await asyncio.gather(*(start("dies:open_service") for _ in range(2)))
    for running in started:
        assert await collect(running, b"finish first") == [b"x" * 150_000]
        await running.died.wait()
        assert running.exit_status == 4


@on_both_loops
async def test_a_killed_child_is_seen_at_once_also_by_who_has_not_read_its_events() -> None:
    running = await start()
    jobs = [job_of(running, b"1000000000") for _ in range(3)]
    for job in jobs:
        await anext(job)
    os.kill(running.pid, signal.SIGKILL)
    await asyncio.wait_for(running.died.wait(), DEADLINE_SECONDS)
    assert running.exit_status == -signal.SIGKILL
    for job in jobs:
        with pytest.raises(EngineDiedError):
            await asyncio.wait_for(_read_to_its_end(job), DEADLINE_SECONDS)


@pytest.mark.parametrize("order", ["close first", "kill first"])
@on_both_loops
async def test_closing_a_run_of_a_child_that_is_dying_is_quick_and_silent(order: str) -> None:
    running = await start("deaf:open_service")
    job = job_of(running, b"")
    await anext(job)
    if order == "kill first":
        running.terminate()
        await job.aclose()
    else:
        closing = asyncio.create_task(job.aclose())
        await until(lambda: next(iter(running._jobs.values())).take is None)
        running.terminate()
        await closing
    await running.died.wait()


@on_both_loops
async def test_a_child_that_hangs_in_a_step_is_killed_by_a_shutdown_that_has_waited_long_enough() -> None:
    running = await start("dies:open_service")
    async with aclosing(job_of(running, b"hang")) as job:
        assert await anext(job) == b"started"
        await running.shutdown(within_seconds=0.1)
        assert running.exit_status == -signal.SIGKILL


async def test_a_child_that_is_stopped_can_be_terminated() -> None:
    running = await start()
    os.kill(running.pid, signal.SIGSTOP)
    running.terminate()
    await asyncio.wait_for(running.died.wait(), DEADLINE_SECONDS)


async def test_a_child_that_closes_its_socket_and_stays_is_killed_after_a_while() -> None:
    async with worker("dies:open_service") as running:
        with pytest.raises(EngineDiedError):
            await collect(running, b"close")
        assert not running.died.is_set()
        await asyncio.wait_for(running.died.wait(), DEADLINE_SECONDS)
        assert running.exit_status == -signal.SIGKILL


@pytest.mark.parametrize("way", ["idle", "hang"])
def test_a_child_ends_with_its_server_however_that_ends(way: str) -> None:
    script = """
import asyncio, sys
from workers import job_of, start

async def main(way):
    running = await start("dies:open_service")
    if way == "hang":
        await anext(job_of(running, b"hang"))
    print(running.pid, flush=True)
    await running.died.wait()

asyncio.run(main(sys.argv[1]))
"""
    paths = {"PYTHONPATH": os.pathsep.join(str(Path(__file__).parents[up]) for up in (0, 3))}
    with subprocess.Popen(
        [sys.executable, "-c", script, way], stdout=subprocess.PIPE, env=os.environ | paths
    ) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        server.kill()
    wait_until_gone(pid)


@pytest.mark.parametrize("batches", [2, pytest.param(10, marks=pytest.mark.rounds)])
@on_both_loops
async def test_workers_later_no_descriptor_thread_or_process_is_left(batches: int) -> None:
    async def live(number: int) -> None:
        running = await start()
        assert await collect(running, b"3") == numbers(3)
        if number % 2:
            running.terminate()
            await running.died.wait()
        else:
            await running.shutdown()

    await live(0)
    gc.collect()
    before = _held()
    for _ in range(batches):
        await asyncio.gather(*(live(number) for number in range(5)))
    with pytest.raises(LoadError):
        await start("loads:refuse")
    gc.collect()
    assert _held() == before


def _held() -> tuple[int, int, list[str]]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), children


async def _read_to_its_end(job: Stream[bytes]) -> None:
    async for _ in job:
        pass
