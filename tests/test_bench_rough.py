"""What the benchmarks of bursts, hours, starts and revisions compute."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from benchmarks import rough_load
from benchmarks.chat_cases import Load
from benchmarks.errors import BenchError
from benchmarks.guidellm import GuideJob, Plan, arguments, guide_figures
from benchmarks.hearth import states
from benchmarks.http_answers import Answer
from benchmarks.levels import Level, slope
from benchmarks.many import many_verdicts
from benchmarks.revisions import parsed, running, tree_of
from benchmarks.rough_job import RoughJob, RoughMeasurement, rough_figures
from benchmarks.soak import soak_verdicts
from benchmarks.start_targets import StartJob, first_answer
from benchmarks.vllm_server import free_port, status_of
from benchmarks.workplace import open_workplace, served_names
from test_bench_load import PLAIN, STREAM, answering, plain

ROOT = Path(__file__).parents[1]
REFUSAL = {"error": {"message": "full"}}


def answer(status: int, *, retry_after: bytes | None = None, body: bytes = b"") -> Answer:
    return Answer(1.0, finished=1.5, status=status, retry_after=retry_after, body=body)


def test_each_request_is_answered_refused_with_a_time_or_wrong():
    seen = RoughMeasurement()
    for one in (
        answer(200, body=b'{"usage":{"completion_tokens":2}}'),
        answer(503, retry_after=b"3"),
        answer(429, retry_after=b"1"),
        answer(503),
        answer(503, retry_after=b"soon"),
        answer(500, retry_after=b"1"),
        answer(200, body=b"{}"),
    ):
        seen.add(one)
    figures = rough_figures(seen)
    assert (figures["answered"], figures["refused"], figures["wrong"]) == (1, 2, 4)
    assert figures["refused_p99_ms"] == figures["answered_p50_ms"] == 500
    assert len(seen.what_was_wrong) == 3
    assert "status 503" in seen.what_was_wrong[0]


async def test_a_burst_sends_every_request_over_a_connection_of_its_own():
    job = RoughJob("m", streams=70, max_tokens=2, label="a")
    async with answering(STREAM) as server:
        seen = await rough_load.measure(job, host="127.0.0.1", port=server.port, key="k")
    assert (server.connections, len(server.requests), len(seen.answered_seconds)) == (70, 70, 70)
    assert len({request.split(b"\r\n\r\n")[1] for request in server.requests}) == 70
    assert {job.request(one, 0).sentences for one in range(70)} == {1}
    refusing = plain(REFUSAL, "503 Service Unavailable", "Retry-After: 2\r\n")
    async with answering(refusing) as server:
        seen = await rough_load.measure(job, host="127.0.0.1", port=server.port, key="k")
    assert (len(seen.refused_seconds), seen.wrong) == (70, 0)


async def test_clients_of_a_soak_hang_up_in_the_midst_and_come_back():
    async with answering(STREAM[:-10]) as server:  # an answer that never ends
        leaving = RoughJob("m", streams=2, max_tokens=2, label="a", seconds=1.2, leaving=1.0)
        seen = await rough_load.measure(leaving, host="127.0.0.1", port=server.port, key="k")
    assert seen.left == server.connections > 2
    assert not seen.wrong
    async with answering(PLAIN) as server:
        staying = RoughJob("m", streams=2, max_tokens=2, label="a", seconds=0.1)
        seen = await rough_load.measure(staying, host="127.0.0.1", port=server.port, key="k")
        assert (seen.left, server.connections) == (0, 2)
    # Every other request is streamed: this server answers none so.
    assert len(seen.answered_seconds) + seen.wrong == len(server.requests)


def test_lengths_and_who_hangs_up_are_decided_by_the_seed():
    job = RoughJob("m", 4, 64, "a", seconds=1, leaving=0.25, seed=1)
    leaves = [job.leaves_after_seconds(stream, number) for stream in range(20) for number in range(50)]
    assert leaves == [job.leaves_after_seconds(stream, number) for stream in range(20) for number in range(50)]
    assert sum(one is not None for one in leaves) == pytest.approx(250, rel=0.2)
    tokens = [job.request(0, number).max_tokens for number in range(1000)]
    assert (min(tokens), max(tokens)) == (1, 128)
    prompts = [job.request(0, number).messages(0)[0]["content"] for number in range(1000)]
    assert {prompt.count("the garden") for prompt in prompts} == set(range(1, 9))
    assert [job.request(0, number).streamed for number in range(3)] == [True, False, True]


def test_a_slope_has_an_interval_that_holds_the_truth():
    seconds = [float(number) for number in range(0, 3600, 2)]
    waves = [((number * 7919) % 101 - 50) / 10 for number in range(len(seconds))]
    steady = slope(seconds, [500 + wave for wave in waves])
    assert steady is not None
    assert abs(steady.per_hour) < steady.plus_minus < 2
    growing = slope(seconds, [500 + 10 * at / 3600 + wave for at, wave in zip(seconds, waves, strict=True)])
    assert growing is not None
    assert abs(growing.per_hour - 10) < growing.plus_minus
    assert growing.low > 8
    assert slope([0, 1, 2], [1, 2, 3]) is None


def test_a_level_counts_memory_and_open_files():
    before = Level.of(os.getpid())
    with Path(os.devnull).open(), Path(os.devnull).open():
        during = Level.of(os.getpid())
    assert during.api_files - before.api_files == 2
    assert before.api_rss_bytes > 2**20
    with pytest.raises(BenchError, match="ended"):
        Level.of(2**22 + 1)


def level(api: float, files: float = 10.0) -> dict[str, float | None]:
    return {"api_rss_mib": api, "engine_rss_mib": 100.0, "api_files": files, "engine_files": 5.0}


def test_bursts_are_judged_by_the_worst_of_them():
    answers: dict[str, float | None] = {"wrong": 0, "refused_p99_ms": 900.0}
    fine = many_verdicts(level(100), [level(104) | answers, level(104) | answers])
    assert [verdict.met for verdict in fine] == [True, True, True, True, True, None, True, True]
    worse = level(120, files=11) | {"wrong": 1, "refused_p99_ms": None}
    bad = many_verdicts(level(100), [level(100) | answers, worse])
    assert [verdict.met for verdict in bad] == [False, True, False, False, True, None, False, True]
    assert (bad[2].value, bad[5].value) == (pytest.approx(1.1), pytest.approx(1.2))


def test_a_soak_is_judged_without_its_first_quarter():
    settled = [level(100 + min(number, 25) * 4) | {"seconds": number * 60.0} for number in range(100)]
    assert all(verdict.met in {True, None} for verdict in soak_verdicts([{"wrong": 0}], settled))
    leaking = [level(100 + number) | {"seconds": number * 60.0} for number in range(100)]
    failed = [verdict.what for verdict in soak_verdicts([{"wrong": 2}], leaking) if verdict.met is False]
    assert failed == ["requests that failed", "API MiB more per hour, at the least (95 %)"]


class Address:
    key = "k"
    host = "127.0.0.1"
    pid = 0
    ended = False

    def __init__(self, port: int) -> None:
        self.port = port

    async def stop(self) -> None: ...


async def test_a_starting_server_is_asked_until_it_answers():
    address = Address(free_port())
    refusing = plain(REFUSAL, "503 Service Unavailable", "Retry-After: 2\r\n")
    assert await asyncio.to_thread(status_of, address.host, address.port, "/health/live") is None
    assert await asyncio.to_thread(states, address.host, address.port) == {}
    async with answering(refusing) as server:
        address.port = server.port
        asking = asyncio.create_task(first_answer(address, StartJob("m", 0)))
        async with asyncio.timeout(10):
            while len(server.requests) < 3:  # noqa: ASYNC110  # lets the others work
                await asyncio.sleep(0)
            server.pieces = [PLAIN]
            refused = await asking
        assert refused is not None
        assert refused > 0
        assert await first_answer(address, StartJob("m", 1)) is None
        server.pieces = [plain({"error": {"message": "no such model"}}, "404 Not Found")]
        with pytest.raises(BenchError, match="no such model"):
            await first_answer(address, StartJob("m", 2))
    address.ended = True
    with pytest.raises(BenchError, match="cannot connect"):
        await first_answer(address, StartJob("m", 3))


def test_rows_of_a_comparison_are_named_by_kind_and_load():
    assert parsed("streamed:32, plain:2.5/s") == [Load(True, streams=32), Load(False, rate=2.5)]  # noqa: FBT003
    for wrong in ("streamed", "streamed:0", "both:1", "plain:x/s", ""):
        with pytest.raises(Exception, match="is no row like"):
            parsed(wrong)


def test_a_revision_is_laid_into_a_folder_of_its_own_and_its_code_is_what_runs(tmp_path: Path):
    def git(*arguments: str) -> None:
        said = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *said, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--quiet")
    (tmp_path / "engine.py").write_text("old = True\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    (tmp_path / "engine.py").write_text("old = False\n")
    with tree_of("HEAD", tmp_path) as tree, open_workplace(ROOT / "models.yaml", "service-plus", None) as place:
        assert (tree / "engine.py").read_text() == "old = True\n"
        first, *_ = running(place, tree).environment["PYTHONPATH"].split(os.pathsep)
        assert first == str(tree)
    assert not tree.exists()
    with pytest.raises(BenchError, match="git archive"), tree_of("nothing", tmp_path):
        pass


def test_guidellm_is_told_the_load_and_its_report_read():
    plan = Plan("m", ("serve",), streams=8, requests=64, prompt_tokens=32, max_tokens=16, repeats=1)
    command = arguments(GuideJob(plan, 3), Address(8000), "/models/m", Path("a.json"))
    assert "kind=concurrent,streams=8" in command
    assert "kind=synthetic_text,prompt_tokens=32,output_tokens=16" in command
    spread = {"successful": {"mean": 5.0, "percentiles": {"p50": 1.0, "p95": 2.0, "p99": 3.0}}}
    names = ("requests_per_second", "output_tokens_per_second", "time_to_first_token_ms", "inter_token_latency_ms")
    metrics = dict.fromkeys(names, spread) | {"request_totals": {"errored": 0}}
    figures = guide_figures({"benchmarks": [{"metrics": metrics}]})
    assert (figures["requests_per_second"], figures["time_to_first_token_p99_ms"], figures["wrong"]) == (5.0, 3.0, 0)
    with pytest.raises(BenchError, match=r"version 0\.8"):
        guide_figures({"benchmarks": []})


def test_all_models_of_a_file_can_be_served_together():
    assert served_names(ROOT / "models.yaml")[:2] == ["service-plus", "service-pro"]
