"""What the end of an engine leaves behind in the server, the end of what engines are forked from, and of memory."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from key_clients import client_with
from serving import Server, async_poll_until, poll_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

YAML = """\
models:
  service-plus:
    task: chat
    tier: standard
    capabilities: [chat, streaming]
    weights: service-plus
    demo: chat
    engine: {kv_cache_gib: 0.0625, stall_seconds: 4}
tiers:
  standard: {models: [standard]}
"""
CHAT: dict[str, Any] = {
    "model": "service-plus",
    "messages": [{"role": "user", "content": "Count to 3."}],
    "max_tokens": 8,
}
HUNGRY = """\
  hungry:
    task: chat
    tier: standard
    capabilities: [chat]
    weights: hungry
    demo: chat
    engine: {kv_cache_gib: %s}
"""
GIB = 2**30
DEATHS_UNTIL_A_REST = 5
BACK_SECONDS = 240


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ends")
    (folder / "models.yaml").write_text(YAML)
    with Server(folder, environment={"HEARTH_MODELS": str(folder / "models.yaml")}) as started:
        yield started
        assert started.stop() == 0, started.log()


def state(server: Server) -> dict[str, Any]:
    answer = httpx2.get(f"{server.root_url}/health/ready", timeout=60).json()
    return dict(answer["models"]["service-plus"])


def engine(server: Server) -> psutil.Process:
    """Its process: the child of the fork server."""
    (found,) = fork_server(server).children()
    return found


def fork_server(server: Server) -> psutil.Process:
    (found,) = (child for child in psutil.Process(server.pid).children() if "forkserver" in " ".join(child.cmdline()))
    return found


def held(server: Server) -> dict[str, int]:
    """Open descriptors, and threads of ZeroMQ's and others, of the server process."""
    folder = Path(f"/proc/{server.pid}")
    names = [(task / "comm").read_text() for task in (folder / "task").iterdir()]
    of_zmq = sum(name.startswith("ZMQ") for name in names)
    sockets = sum(str(file.readlink()).startswith("socket:") for file in (folder / "fd").iterdir() if file.is_symlink())
    return {
        "descriptors": len(list((folder / "fd").iterdir())) - sockets,  # sockets: clients come and go
        "threads of ZeroMQ": of_zmq,
        "other threads": len(names) - of_zmq,
    }


def kill_until(server: Server, restarts: int, status: str) -> None:
    def there() -> bool:
        now = state(server)
        return bool(now["status"] == status and now["restarts"] == restarts)

    engine(server).kill()
    poll_until(there, BACK_SECONDS, describe=server.log)


def test_where_memory_runs_out_the_kernel_takes_an_engine_before_the_server(server: Server) -> None:
    def score(process: psutil.Process) -> int:
        return int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())

    own = score(psutil.Process(server.pid))
    assert score(fork_server(server)) == own  # all engines would end with it
    assert score(engine(server)) == 500 > own


@pytest.mark.parametrize("deaths", [2, pytest.param(DEATHS_UNTIL_A_REST, marks=pytest.mark.rounds)])
def test_engines_later_the_server_holds_what_it_held(server: Server, deaths: int) -> None:
    before = held(server)
    for death in range(1, deaths + 1):
        kill_until(server, death, "failed" if death == DEATHS_UNTIL_A_REST else "ready")
    if deaths == DEATHS_UNTIL_A_REST:
        server.hearth("reload")
        poll_until(server.is_ready, BACK_SECONDS, describe=server.log)

    def as_before() -> bool:
        now = held(server)
        # What is blocking goes to Python's pool of threads, which grows to its size and stays there.
        return now["other threads"] <= before["other threads"] + 4 and all(
            now[what] <= before[what] + 2 for what in ("descriptors", "threads of ZeroMQ")
        )

    poll_until(as_before, 60, describe=lambda: f"{before} has become {held(server)}")


@pytest.mark.parametrize("stopped_first", [False, pytest.param(True, marks=pytest.mark.rounds)])
async def test_engines_come_back_after_the_end_of_what_they_are_forked_from(server: Server, stopped_first: bool):  # noqa: FBT001
    restarts, old = state(server)["restarts"], fork_server(server)
    libraries = old.environ()["LD_PRELOAD"]
    if stopped_first:
        old.suspend()
    old.kill()

    def back() -> bool:
        now = state(server)
        return bool(now["status"] == "ready" and now["restarts"] == restarts + 1)

    await async_poll_until(back, BACK_SECONDS, describe=server.log)
    assert "which engines are forked from, has died; a new one is started" in server.log()
    assert fork_server(server).pid != old.pid
    assert set(fork_server(server).environ()["LD_PRELOAD"].split(":")) == set(libraries.split(":"))
    assert server.admin_key is not None
    async with client_with(server, server.admin_key.text) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


def test_engines_come_back_though_what_they_are_forked_from_was_stopped(server: Server) -> None:
    restarts = state(server)["restarts"]
    born = engine(server)
    os.kill(fork_server(server).pid, signal.SIGSTOP)
    born.kill()

    def back() -> bool:
        now = state(server)
        return bool(now["status"] == "ready" and now["restarts"] == restarts + 1)

    poll_until(back, BACK_SECONDS, describe=server.log)
    assert "was stopped and is continued" in server.log()


async def failed(server: Server, client: httpx2.AsyncClient, kv_cache_gib: float) -> str:
    """Add the hungry model, and return the reason with which it failed."""
    file = server.data_dir.parent / "models.yaml"
    file.write_text(YAML.replace("tiers:", HUNGRY % kv_cache_gib + "tiers:"))
    assert (await client.post("/v1/admin/reload")).status_code == 200
    deadline = time.monotonic() + 240
    while (model := (await client.get("/health/ready")).json()["models"]["hungry"])["status"] != "failed":
        assert time.monotonic() < deadline, model
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "hungry"})).status_code == 503
    reason: str = model["reason"]
    return reason


async def test_memory_that_there_is_not_fails_a_model_alone_with_the_numbers_or_after_three_starts(server: Server):
    assert server.admin_key is not None
    async with client_with(server, server.admin_key.text) as client:
        assert "cannot be loaded as it is configured" in await failed(server, client, 4000)
        assert "`kv_cache_gib` is 4000, and this machine has" in server.log()
        # What is forked from now on inherits that.
        fork_server(server).rlimit(psutil.RLIMIT_AS, (6 * GIB, 6 * GIB))
        assert "did not start, 3 times in a row" in await failed(server, client, 8)
