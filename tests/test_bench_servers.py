"""What the benchmarks do to compare with vLLM's own servers, to send at a rate, and to draw."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks import load, rust_frontend
from benchmarks.chat_cases import Load, Shape, cases_for, loads
from benchmarks.chat_job import ChatJob
from benchmarks.chat_plot import points
from benchmarks.compare import paired, row_of
from benchmarks.errors import BenchError
from benchmarks.footprint import family, pss_bytes
from benchmarks.open_loop import Pool, at_moments
from benchmarks.report import print_table
from benchmarks.vllm_server import _flags, _named_vllm, serve_arguments
from benchmarks.workplace import open_workplace
from test_bench_load import STREAM, answering

ROOT = Path(__file__).parents[1]
OPEN = ChatJob("m", 0, 400, streamed=True, max_tokens=2, label="a", rate=50.0, seed=3)


def test_the_moments_of_an_open_loop_are_random_at_the_rate_asked_for_and_the_same_for_every_target():
    moments = OPEN.moments()
    assert moments == OPEN.moments() == sorted(moments)
    assert moments[-1] == pytest.approx(400 / 50, rel=0.15)
    gaps = [after - before for before, after in zip([0.0, *moments], moments, strict=False)]
    assert sum(gap > 1 / 50 for gap in gaps) == pytest.approx(400 / 2.718, rel=0.15)


async def test_an_open_loop_counts_from_the_moment_at_which_a_request_should_have_been_sent():
    job = ChatJob("m", 0, 5, streamed=True, max_tokens=2, label="a", rate=200.0, seed=1)
    async with answering(STREAM) as server:
        seen = await load.measure(job, host="127.0.0.1", port=server.port, key="k")
    assert len(server.requests) == len(seen.latency_seconds) == len(seen.late_seconds) == 5
    assert all(late < whole for late, whole in zip(seen.late_seconds, seen.latency_seconds, strict=True))
    late: list[float] = []

    async def send(number: int, moment: float) -> None:
        late.append(time.perf_counter() - moment)
        time.sleep(0.1)  # noqa: ASYNC251  # a sender that is kept from its work

    await at_moments([0.0, 0.01], send)
    assert late[1] > 0.08


async def test_a_failed_request_ends_an_open_loop():
    async def send(number: int, moment: float) -> None:
        if number == 1:
            raise BenchError("this one")
        await asyncio.Event().wait()

    with pytest.raises(BenchError, match="this one"):
        await at_moments([0.0, 0.0, 0.0], send)


async def test_connections_are_kept_for_the_next_request_and_closed_after_a_failure():
    async with answering(STREAM) as server:
        pool = await Pool.open("127.0.0.1", server.port, 1)
        async with pool.connection() as first, pool.connection() as second:
            assert first is not second
        async with pool.connection() as third:
            assert third in {first, second}
        with pytest.raises(BenchError):
            async with pool.connection() as fourth:
                raise BenchError("no")
        assert not fourth.usable
        pool.close()


def test_a_row_has_one_ratio_per_comparison_each_the_median_of_those_within_a_repeat(
    capsys: pytest.CaptureFixture[str],
):
    runs = {
        "server": [{"x": 10.0}, {"x": 2.0}, {"x": 6.0}],
        "bare": [{"x": 20.0}, {"x": 4.0}, {"x": 3.0}],
        "rust": [{"x": 40.0}, {"x": 2.0}, {"x": 6.0}],
    }
    row = row_of("one", runs)
    assert row.ratios == {"bare": {"x": 0.5}, "rust": {"x": 1.0}}
    assert row.ratio == {"x": 0.5}
    assert paired(row, "bare", "rust").ratios == {"rust": {"x": 0.5}}
    print_table("Title", [row], {"x": "X"})
    printed = [line.split("|") for line in capsys.readouterr().out.splitlines() if "server / " in line]
    assert [(line[2].strip(), line[3].strip()) for line in printed] == [
        ("server / bare", "0.50"),
        ("server / rust", "1.00"),
    ]


def test_rows_are_closed_and_open_loops_streamed_before_plain():
    rows = loads((1, 8), (2.5,), ("plain", "streamed"))
    assert [load.name for load in rows] == [
        *("streamed, 1", "streamed, 8", "plain, 1", "plain, 8"),
        *("streamed, 2.5/s", "plain, 2.5/s"),
    ]


class Steady:
    name = "steady"

    def __init__(self) -> None:
        self.jobs: list[ChatJob] = []

    async def measure(self, job: ChatJob) -> dict[str, float | None]:
        self.jobs.append(job)
        return {"requests_per_second": 20.0}


async def test_a_run_is_filled_in_whole_rounds_or_at_the_rate_asked_for():
    target, shape = Steady(), Shape("m", 64, 2.0)
    closed, opened = await cases_for(shape, [Load(True, streams=8), Load(True, rate=30.0)], [target])  # noqa: FBT003
    assert [(job.streams, job.rate) for job in target.jobs] == [(8, 0.0), (32, 0.0)]
    assert (closed.job(1).requests, closed.job(1).streams) == (40, 8)
    assert (opened.job(1).requests, opened.job(1).rate, opened.job(1).seed) == (60, 30.0, 1)
    assert opened.job(1).label != opened.job(2).label != closed.job(2).label


def test_points_of_a_plot_are_in_the_order_of_the_load_and_leave_out_other_rows():
    def row(name: str, speed: float, value: float | None):
        return row_of(name, {"server": [{"requests_per_second": speed, "y": value}]})

    rows = [
        (Load(True, streams=32), row("streamed, 32", 80.0, 5.0)),  # noqa: FBT003
        (Load(True, streams=8), row("streamed, 8", 90.0, 4.0)),  # noqa: FBT003
        (Load(False, streams=8), row("plain, 8", 10.0, 1.0)),  # noqa: FBT003
        (Load(True, rate=5.0), row("streamed, 5/s", 5.0, 2.0)),  # noqa: FBT003
        (Load(True, streams=128), row("streamed, 128", 90.0, None)),  # noqa: FBT003
    ]
    assert points(rows, "y", "server", "closed loop") == [(90.0, 4.0, "8"), (80.0, 5.0, "32")]
    assert points(rows, "y", "server", "open loop") == [(5.0, 2.0, "5/s")]


def test_vllm_serve_gets_the_settings_of_our_engine():
    assert _flags({"max_num_seqs": 4, "enforce_eager": True, "eager": False, "a": None, "b": ["x"], "c": {"d": 1}}) == [
        *("--max-num-seqs", "4", "--enforce-eager", "--no-eager", "--b", "x", "--c", '{"d": 1}')
    ]
    with open_workplace(ROOT / "models.yaml", "service-plus", None, engine={"max_num_seqs": 7}) as place:
        python = serve_arguments(place, rust=False)
        rust = serve_arguments(place, rust=True)
    assert Path(python[0]).is_dir()
    said = dict(pairwise(python))
    assert (said["--max-num-seqs"], said["--served-model-name"], said["--max-model-len"]) == (
        "7",
        "service-plus",
        "2048",
    )
    assert said["--tool-call-parser"] == "hermes"
    assert "--mm-processor-cache-gb" in python
    assert "--mm-processor-cache-gb" not in rust


def test_vllm_finds_its_own_name_where_only_the_wheel_for_cpus_is_installed():
    with open_workplace(ROOT / "models.yaml", "service-plus", None) as place:
        folder = _named_vllm(place)
        names = [file.read_text(encoding="utf-8") for file in folder.glob("vllm-*.dist-info/METADATA")]
    assert len(names) <= 1
    assert all("Name: vllm\n" in text and "+cpu\n" in text for text in names)


def test_the_rust_front_end_is_the_one_file_that_is_kept_of_a_wheel(tmp_path: Path):
    wheel, place = tmp_path / "vllm.whl", tmp_path / "vllm-rs-1"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/vllm-rs", "#!/bin/sh\necho front end\n")
    rust_frontend._take_out(wheel, place)
    assert subprocess.run([place], capture_output=True, text=True, check=True).stdout == "front end\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vllm-rs-1", "vllm.whl"]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    with pytest.raises(BenchError, match="holds no vllm/vllm-rs"):
        rust_frontend._take_out(wheel, place)


def test_what_benchmarks_fetch_is_kept_outside_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert rust_frontend.cache_folder() == tmp_path / "hearth-bench"
    assert rust_frontend.cache_folder().is_dir()


def test_a_front_end_in_a_process_of_its_own_counts_as_the_api(tmp_path: Path):
    sleep = shutil.which("sleep")
    assert sleep is not None
    binary = tmp_path / "vllm-rs"
    shutil.copy(sleep, binary)
    script = f"{binary} 60 & sleep 61 & echo started; wait"
    with subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "started\n"
            deadline = time.monotonic() + 10
            while True:  # both are forked before they become what they run
                api, others = family(parent.pid)
                names = [process.name() for process in (*api[1:], *others)]
                if names == ["vllm-rs", "sleep"] or time.monotonic() > deadline:
                    break
            assert (api[0].pid, names, len(api)) == (parent.pid, ["vllm-rs", "sleep"], 2)
            assert pss_bytes(parent.pid) > 0
        finally:
            for process in (*api[1:], *others):
                process.kill()
            parent.kill()
