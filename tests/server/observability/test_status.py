"""What `hearth status` is made of: the last minute, the words, and the socket that answers."""

import asyncio
import socket
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from server.cli import app
from server.cli.status import duration, memory_text, served_with, shown, work_text
from server.instance import only_one
from server.observability.metrics import LastMinute
from server.observability.status import FILE, Status, StatusError, ask
from server.observability.status_server import degraded, status_socket
from server.settings import load_settings
from server.store.usage import Usage

GIB = 2**30
MODEL: dict[str, Any] = {
    "id": "service-plus",
    "status": "ready",
    "phase": "ready",
    "progress": 1.0,
    "for_seconds": 5.0,
    "reason": None,
    "restarts": 0,
    "served_with": {"source": "variant", "folder": "large-fp8"},
    "gpus": [0, 1],
    "memory": {"planned_gpu_bytes": 40 * GIB, "planned_ram_bytes": None, "gpu_bytes": 38 * GIB, "ram_bytes": 3 * GIB},
    "pids": [7],
    "running": 2,
    "waiting": 1,
    "kv_cache_usage": 0.314,
    "last_minute": {
        "seconds": 60.0,
        "answers": 120,
        "errors": 3,
        "tokens_per_second": 12.5,
        "images": 0,
        "audio_seconds": 0.0,
    },
}
WITH_CODE = {"source": "demo", "folder": "chat", "compiled": True}
WHOLE: dict[str, Any] = {
    "status": "failed",
    "version": "1",
    "pid": 5,
    "base_url": "http://127.0.0.1:8000/v1",
    "started_at": "2026-11-21T12:00:00Z",
    "uptime_seconds": 90000.0,
    "requests_running": 3,
    "last_minute": {"seconds": 60.0, "requests": 150, "refused": 30, "failed": 6},
    "swaps": 4,
    "ram_total_bytes": 64 * GIB,
    "ram_available_bytes": 50 * GIB,
    "models": [
        MODEL,
        MODEL
        | {"id": "service-pro", "status": "failed", "reason": "It did not start.", "served_with": None, "restarts": 5},
    ],
    "gpus": [
        {
            "index": 0,
            "name": "H100",
            "total_bytes": 80 * GIB,
            "used_bytes": 30 * GIB,
            "others_bytes": 10 * GIB,
            "holders": [
                {"pid": 7, "name": "vllm", "used_bytes": 20 * GIB, "model": "service-plus"},
                {"pid": 9, "name": "game", "used_bytes": 10 * GIB, "model": None},
            ],
        }
    ],
    "no_gpus": None,
    "paths": {"data_dir": "/d", "weights_dir": "/w", "models": "/m", "tls_cert": None},
    "host": "127.0.0.1",
    "reserve_bytes": GIB,
}
STATUS = Status.model_validate(WHOLE)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.5

    def __call__(self) -> float:
        return self.now


def test_what_ended_in_the_last_minute_counts_and_nothing_older():
    clock = Clock()
    recent = LastMinute(Usage(), clock)
    recent.add("a", Usage(completion_tokens=10))
    recent.add("a", Usage(completion_tokens=5, images=1))
    clock.now += 59
    recent.add("a", Usage(audio_seconds=2.5))
    assert recent.of("a") == Usage(completion_tokens=15, images=1, audio_seconds=2.5)
    clock.now += 2
    assert recent.of("a") == Usage(audio_seconds=2.5)
    assert recent.of("b") == Usage()


def test_a_server_that_has_just_started_tells_of_the_time_since_then():
    clock = Clock()
    recent = LastMinute(Usage(), clock)
    assert recent.seconds == 1
    clock.now += 20
    assert recent.seconds == 20
    clock.now += 600
    assert recent.seconds == 60


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.4, "0 s"), (61, "1 min 1 s"), (7200, "2 h"), (90061, "1 d 1 h"), (86400 * 9, "9 d")]
)
def test_a_span_is_told_with_its_two_largest_units(seconds: float, told: str):
    assert duration(seconds) == told


def test_a_model_is_told_in_words():
    model = STATUS.models[0]
    assert served_with(model) == "large-fp8 on GPU 0, 1"
    assert memory_text(model.memory) == "38.0 GiB GPU (40.0 GiB planned), 3.0 GiB RAM"
    assert work_text(model) == "2 answers/s, 0.05 errors/s, 12.5 tokens/s"
    assert served_with(STATUS.models[1]) == "-"
    with_code = Status.model_validate(WHOLE | {"models": [MODEL | {"served_with": WITH_CODE}]})
    assert served_with(with_code.models[0]) == "the demo on GPU 0, 1, compiled"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"progress": 0.5, "remaining_seconds": 6.2}, "loading: importing vLLM, 50%, about 7 s left"),
        ({"progress": 0.5}, "loading: importing vLLM, 50%"),
        ({"progress": 0.0, "remaining_seconds": None}, "loading: importing vLLM"),
    ],
)
def test_a_model_that_is_loaded_says_how_far_it_is_and_how_long_it_takes_yet(changes: dict[str, Any], told: str):
    loading = MODEL | {"status": "loading", "phase": "importing vLLM"} | changes
    console = Console(width=250)
    with console.capture() as caught:
        for one in shown(Status.model_validate(WHOLE | {"models": [loading]})):
            console.print(one)
    assert f" {told}  " in caught.get()


def test_the_table_says_who_failed_and_who_else_holds_the_gpu():
    console = Console(width=200)
    with console.capture() as caught:
        for one in shown(STATUS):
            console.print(one)
    text = caught.get()
    assert "Hearth serves 1 of 2 models at http://127.0.0.1:8000/v1, version 1, process 5, up for 1 d 1 h" in text
    assert "service-pro: It did not start." in text
    assert "30.0 GiB of 80.0 GiB taken; 10.0 GiB by others: game (process 9, 10.0 GiB)" in text
    assert "3 requests being answered; 2.5 requests/s, 0.5 refused/s, 0.1 failed/s; 4 swaps since the start" in text
    assert "31%" in text
    assert "traces" not in text
    with console.capture() as caught:
        console.print(*shown(Status.model_validate(WHOLE | {"traces": "collector.example.org:4318"})))
    assert "traces go to collector.example.org:4318" in caught.get()


async def test_the_socket_answers_its_owner_alone_however_long_the_path_is(tmp_path: Path):
    folder = tmp_path / ("x" * 200)
    folder.mkdir()

    async def read() -> bytes:
        return STATUS.model_dump_json().encode()

    async with status_socket(folder, {"status": read}):
        assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600
        assert [await asyncio.to_thread(ask, folder, 10) for _ in range(2)] == [STATUS, STATUS]
    assert not (folder / FILE).exists()
    assert ask(folder, 10) is None


async def test_what_a_killed_server_left_is_in_nobodys_way(tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / FILE))
    assert ask(tmp_path, 10) is None

    async def read() -> bytes:
        return STATUS.model_dump_json().encode()

    async with status_socket(tmp_path, {"status": read}):
        assert await asyncio.to_thread(ask, tmp_path, 10) == STATUS


@pytest.mark.parametrize(("reserve_gib", "told"), [(0, None), (2**20, "HEARTH_DISK_RESERVE_GIB")])
def test_a_disk_with_less_than_the_reserve_is_told(tmp_path: Path, reserve_gib: float, told: str | None):
    settings = load_settings(data_dir=tmp_path).model_copy(update={"disk_reserve_gib": reserve_gib})
    database = SimpleNamespace(failing=None, unwritable=None)
    found = degraded(SimpleNamespace(state=SimpleNamespace(database=database, settings=settings)))  # type: ignore[arg-type]
    assert (found is None) == (told is None)
    assert (told or "") in (found or "")


def test_a_server_that_does_not_move_is_told_from_none(tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / FILE))
        silent.listen()
        with pytest.raises(StatusError, match="has not answered for 0 s"):
            ask(tmp_path, 0.1)


def test_without_a_server_the_exit_code_is_1_and_while_one_starts_2(tmp_path: Path):
    none = CliRunner().invoke(app, ["status", "--data-dir", str(tmp_path)])
    assert none.exit_code == 1
    assert "Start one with scripts/serve" in none.stderr
    with only_one(tmp_path):
        starting = CliRunner().invoke(app, ["status", "--data-dir", str(tmp_path)])
    assert starting.exit_code == 2
    assert "is starting or ending" in starting.stderr


@pytest.mark.parametrize(("last", "code"), [("ready", 0), ("failed", 1), ("loading", 1)])
async def test_status_waits_until_no_model_is_being_loaded_or_time_is_up(last: str, code: int, tmp_path: Path):
    loading = Status.model_validate(WHOLE | {"status": "loading", "models": [MODEL | {"status": "loading"}]})
    ended = Status.model_validate(WHOLE | {"status": last, "models": [MODEL | {"status": last}]})
    asked = 0

    async def read() -> bytes:
        nonlocal asked
        asked += 1
        return (loading if asked == 1 else ended).model_dump_json().encode()

    arguments = ["status", "--data-dir", str(tmp_path), "--json", "--wait", "0.6" if last == "loading" else "60"]
    async with status_socket(tmp_path, {"status": read}):
        done = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert done.exit_code == code, done.stderr
    assert asked >= 2
    assert f'"status": "{last}"' in done.stdout


def test_a_server_that_has_not_begun_to_start_is_waited_for(tmp_path: Path):
    began = time.monotonic()
    done = CliRunner().invoke(app, ["status", "--data-dir", str(tmp_path), "--wait", "0.6"])
    assert (done.exit_code, "No Hearth runs" in done.stderr) == (1, True)
    assert time.monotonic() - began >= 0.6
    assert done.stderr.count(f"Waiting for a server with the data directory {tmp_path}") == 1


def test_who_waits_for_a_server_that_does_not_come_up_gets_exit_code_1(tmp_path: Path):
    with only_one(tmp_path):
        assert CliRunner().invoke(app, ["status", "--data-dir", str(tmp_path), "--wait", "0"]).exit_code == 1
