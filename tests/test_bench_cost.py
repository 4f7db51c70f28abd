"""What `bench cost` counts, and how it is shown beside an earlier run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from benchmarks import load
from benchmarks.chat_job import ChatJob
from benchmarks.children import Child
from benchmarks.compare import Row, row_of
from benchmarks.cost import beside, read_earlier, unlike
from benchmarks.cost_cases import CostJob, loads, singles
from benchmarks.cost_server import COUNTS_VARIABLE, SIGNAL, CallCounter, Counts
from benchmarks.cost_targets import Counter
from benchmarks.errors import BenchError
from benchmarks.report import document
from test_bench_load import PLAIN, STREAM, answering

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]


@pytest.fixture
def counts_file(tmp_path: Path) -> Iterator[Path]:
    """This process counts its calls, as the server of the benchmark does."""
    file = tmp_path / "counts.json"
    before = signal.signal(SIGNAL, CallCounter(file).on_signal)
    try:
        yield file
    finally:
        sys.setprofile(None)
        signal.signal(SIGNAL, before)


def counts_in(file: Path) -> Counts:
    return msgspec.json.decode(file.read_bytes(), type=Counts)


def test_calls_are_counted_between_two_signals(counts_file: Path):
    def one() -> None:
        len("")

    counts = []
    for times in (10, 110):
        signal.raise_signal(SIGNAL)
        for _ in range(times):
            one()
        signal.raise_signal(SIGNAL)
        one()
        counts.append(counts_in(counts_file))
    assert [count.signals for count in counts] == [2, 4]
    assert (counts[1].python - counts[0].python, counts[1].native - counts[0].native) == (100, 100)
    assert counts[0].python < 15
    assert sys.getprofile() is None


async def test_requests_are_counted_in_the_process_that_answers_them(counts_file: Path, tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts"), load.KEY_VARIABLE: "k"}
    async with answering(PLAIN) as server:
        arguments = ("benchmarks.load", "127.0.0.1", str(server.port))
        asks = await Child.start("load", *arguments, environment=environment, log=tmp_path / "load.log")
        try:
            counter = Counter(os.getpid(), asks, counts_file)
            answers = await counter.measure(CostJob(ChatJob("m", 1, 8, streamed=False, max_tokens=1, label="a")))
            assert answers["python_calls"] is not None
            assert answers["native_calls"] is not None
            assert answers["python_calls"] > 10 < answers["native_calls"]
            server.pieces = [STREAM]
            further = CostJob(ChatJob("m", 1, 8, streamed=True, max_tokens=9, label="b"), further=True)
            tokens = await counter.measure(further)
        finally:
            await asks.stop()
    # This server says the same, however many tokens are asked for: they cost it nothing.
    assert tokens["python_calls"] is not None
    assert abs(tokens["python_calls"]) < answers["python_calls"] / 8
    assert tokens["tokens_per_event"] == 1
    assert len(server.requests) == 24
    with pytest.raises(BenchError, match="The server ended"):
        await Counter(2**22 + 1, asks, counts_file).measure(further)


def test_the_server_that_counts_is_hearth_itself():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cost_server", "--version"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "scripts"), COUNTS_VARIABLE: "/nonexistent/counts.json"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    hearth = subprocess.run(
        [Path(sys.executable).with_name("hearth"), "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == hearth.stdout != ""


def test_no_two_runs_share_a_prompt_and_all_prompts_are_of_one_length():
    jobs = [case.job(repeat).chat for case in loads("m") + singles("m") for repeat in range(-1, 3)]
    prompts = [job.messages(0)[0]["content"] for job in jobs]
    assert len({*prompts}) == len(prompts)
    assert len({*map(len, prompts)}) == 1


def report(calls: float, benchmark: str = "cost") -> tuple[bytes, Row]:
    row = row_of("plain", {"now": [{"python_calls": calls, "write_calls": None}] * 3})
    return document(benchmark, {"cores": 2, "python": "3.11"}, {}, [row]), row


def test_an_earlier_run_stands_beside_with_the_ratio_of_the_medians(tmp_path: Path):
    (tmp_path / "earlier.json").write_bytes(report(200)[0])
    earlier = read_earlier(tmp_path / "earlier.json")
    row = beside(report(300)[1], earlier.rows)
    assert [*row.medians] == ["now", "before"]
    assert row.ratios == {"before": {"python_calls": 1.5, "write_calls": None}}
    new = row_of("new", {"now": [{"python_calls": 1.0}]})
    assert beside(new, earlier.rows) == new
    # What was compared itself can be compared with.
    (tmp_path / "compared.json").write_bytes(document("cost", {}, {}, [row]))
    assert beside(row, read_earlier(tmp_path / "compared.json").rows).ratio["python_calls"] == 1
    assert unlike({"cores": 2, "python": "3.12"}, earlier.conditions) == [
        "The earlier run had another python: 3.11, now 3.12."
    ]


def test_what_is_no_earlier_run_is_refused_in_words(tmp_path: Path):
    file = tmp_path / "other.json"
    file.write_bytes(report(1, "chat")[0])
    with pytest.raises(BenchError, match="report of `bench chat`, not of `bench cost`"):
        read_earlier(file)
    file.write_text("{")
    with pytest.raises(BenchError, match="is no report of an earlier run"):
        read_earlier(file)
    with pytest.raises(BenchError, match="is no report of an earlier run"):
        read_earlier(tmp_path / "none.json")
