"""The benchmarks' own arithmetic, arguments and tables, their load generator, and one real run."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from bench.batch import Batch
from bench.chat import answer_figures, usage_figures
from bench.load import NUMBER, Answer, BenchError, LoadJob, LoadResult, beats, load_generator, run_load
from bench.media import poisson
from bench.overload import outcome
from bench.report import Report, in_turns, medians, numbers, paired_ratios, percentiles_ms, print_table, row_of, shown
from bench.servers import TIER, Usage, cpu_seconds, family, flags, open_workspace, pss_bytes, serve_arguments

from engine import load_config

ROOT = Path(__file__).parents[2]
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}}\n\n'
DONE = b"data: [DONE]\n\n"


def text(content: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": content}}], "usage": None}).encode() + b"\n\n"


def chunked(*writes: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(write), write) for write in writes) + b"0\r\n\r\n"


def plain(body: object, status: str = "200 OK", extra: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nContent-Length: {len(content)}\r\n{extra}\r\n"
    return head.encode() + content


STREAM = chunked(text(""), text("Hi"), b": keep-alive\n\n", text('"') + USAGE + DONE)
PLAIN = plain({"choices": [{"message": {"content": "Hi"}}], "usage": {"completion_tokens": 2}})
BUSY = plain({"error": {"message": "busy"}}, "503 Service Unavailable", "Retry-After: 1\r\n")


class Answering:
    """A real server that answers every request with the same bytes, in the pieces given."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.requests: list[bytes] = []
        self.connections = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)  # lets the other side read what it has


@contextlib.asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[Answering]:
    parts = Answering(pieces)
    async with await asyncio.start_server(parts.serve, "127.0.0.1", 0) as server:
        parts.port = server.sockets[0].getsockname()[1]
        yield parts


def job(server: Answering, **how: object) -> LoadJob:
    return LoadJob("127.0.0.1", server.port, "k", "a", [{"prompt": NUMBER}], **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 3, 40, 10_000])
async def test_a_stream_is_read_the_same_however_it_is_cut(size: int):
    async with answering(*(STREAM[start : start + size] for start in range(0, len(STREAM), size))) as server:
        result = await run_load(job(server, streams=2, requests=5))
    assert sorted(answer.number for answer in result.answers) == [0, 1, 2, 3, 4]
    assert len({request.rpartition(b"\r\n")[2] for request in server.requests}) == 5
    for answer in result.answers:
        assert (answer.status, answer.tokens, len(answer.text_times), answer.problem) == (200, 2, 2, "")
        assert 0 <= answer.started <= answer.text_times[0] <= answer.text_times[1] <= answer.finished


async def test_plain_answers_have_their_tokens_and_refusals_end_only_a_strict_job():
    async with answering(PLAIN) as server:
        result = await run_load(job(server, streams=1, requests=2, keep_bodies=True))
    assert [(answer.tokens, answer.text_times) for answer in result.answers] == [(2, []), (2, [])]
    assert '"Hi"' in result.answers[0].body
    async with answering(BUSY) as server:
        with pytest.raises(BenchError, match="status 503"):
            await run_load(job(server, streams=2, requests=2))
        figures = outcome(await run_load(job(server, streams=2, requests=2, strict=False)))
    assert (figures["answered"], figures["refused"], figures["wrong"]) == (0, 2, 0)


async def test_the_load_generator_is_a_process_whose_end_or_refusal_is_told(tmp_path: Path):
    environment, log = {"PATH": os.environ["PATH"]}, tmp_path / "load.log"
    async with answering(STREAM) as server:
        with load_generator(environment, log) as generator:
            result = await generator(job(server, streams=1, requests=2))
            assert [answer.tokens for answer in result.answers] == [2, 2]
            with pytest.raises(BenchError, match="reports: cannot connect"):
                await generator(LoadJob("127.0.0.1", 1, "k", "a", [{}], streams=1, requests=1))
            assert len((await generator(job(server, streams=1, requests=1))).answers) == 1
            multiprocessing.active_children()[0].kill()
            with pytest.raises(BenchError, match=r"reports: .*process"):
                await generator(job(server, streams=1, requests=1))


async def test_an_answer_that_breaks_off_is_no_success():
    async with answering(chunked(text("Hi"))) as server:
        with pytest.raises(BenchError, match="not a success"):
            await run_load(job(server, streams=1, requests=1))
    with pytest.raises(BenchError, match="cannot connect"):
        await run_load(job(server, streams=1, requests=1))


async def test_a_load_of_several_keys_uses_them_in_turns():
    async with answering(PLAIN) as server:
        await run_load(job(server, streams=1, requests=5, more_keys=["second", "third"]))
    keys = [line for request in server.requests for line in request.decode().split("\r\n") if "Bearer" in line]
    assert [key.split()[-1] for key in keys][1:] == ["second", "third", keys[0].split()[-1], "second"]


async def test_an_open_loop_sends_at_its_moments_beside_a_closed_loop_that_is_aborted():
    async with answering(STREAM) as server:
        beside = job(server, streams=2)
        result = await run_load(job(server, moments=[0.0, 0.05, 0.1], beside=beside, lead_seconds=0.5))
    assert [answer.asked for answer in sorted(result.answers, key=lambda one: one.number)] == [0.0, 0.05, 0.1]
    assert all(answer.started >= answer.asked for answer in result.answers)
    assert result.beside is not None
    assert result.beside.answers
    assert result.beside.wall_seconds == result.wall_seconds >= 0.1


async def test_clients_may_disconnect_and_a_closed_loop_ends_after_its_seconds():
    async with answering(STREAM[:-5]) as server:  # its end never comes
        result = await run_load(job(server, streams=3, seconds=1.0, leave_after_seconds=0.05, strict=False))
    assert result.answers
    assert all(answer.left for answer in result.answers)
    assert result.wall_seconds >= 1.0


async def test_a_connection_whose_client_left_is_not_used_again():
    async with answering(STREAM[:-5]) as server:
        leaving = job(server, streams=1, requests=4, leave_after_seconds=0.05, strict=False)
        assert [answer.left for answer in (await run_load(leaving)).answers] == [True] * 4
    assert server.connections == 4


def test_percentiles_medians_and_ratios():
    assert percentiles_ms("a", [], 50) == {"a_p50_ms": None}
    assert percentiles_ms("a", [3.0], 50, 99) == {"a_p50_ms": 3000, "a_p99_ms": 3000}
    assert percentiles_ms("a", [4, 1, 3, 2], 50) == {"a_p50_ms": 2500}
    assert percentiles_ms("a", range(201), 99) == {"a_p99_ms": 198_000}
    assert medians([{"a": 1.0, "b": None}, {"a": 9.0, "b": None}, {"a": 2.0, "b": None}]) == {"a": 2.0, "b": None}
    ours, theirs = [{"a": 10.0}, {"a": 2.0}, {"a": None}], [{"a": 20.0}, {"a": 2.0}, {"a": 1.0}]
    assert paired_ratios(ours, theirs) == {"a": 0.75}
    assert paired_ratios([{"a": 1.0}], [{"a": 0.0}]) == {"a": None}


def test_the_figures_of_a_run_have_the_units_that_their_names_say():
    answer = Answer(0, 10.0, 10.1, 11.0, 200, text_times=[10.5, 10.6, 10.8], tokens=4)
    figures = answer_figures(LoadResult(2.0, 0.1, [answer, answer]))
    figures |= usage_figures(Usage(0.4, 0.8, 2**20, 2**21), 8, 0.1)
    expected = {
        "requests_per_second": 1.0,
        "tokens_per_second": 4.0,
        "time_to_first_token_p50_ms": 500.0,
        "inter_token_latency_p50_ms": 150.0,
        "latency_p99_ms": 1000.0,
        "api_cpu_seconds_per_1000_tokens": 50.0,
        "engine_cpu_seconds_per_1000_tokens": 100.0,
        "api_pss_mib": 1.0,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


async def test_targets_take_turns_and_the_first_changes(capsys: pytest.CaptureFixture[str]):
    order: list[str] = []

    async def measure(target: str, repeat: int) -> dict[str, float | None]:
        order.append(f"{target}{repeat}")
        return {"speed": float(repeat + 1)}

    row = await in_turns("one", {"x": "x", "y": "y"}, measure, 3, "speed")
    assert order == ["x0", "y0", "y1", "x1", "x2", "y2"]
    assert (row.medians["x"], row.ratios) == ({"speed": 2.0}, {"y": {"speed": 1.0}})
    assert "one, repeat 3 of 3: x 3.00, y 3.00 speed" in capsys.readouterr().err


def test_a_report_has_a_table_with_ratios_and_a_json_document(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    row = row_of("one", {"hearth": [{"x": 10.0}, {"x": 2.0}], "serve": [{"x": 20.0}, {"x": 4.0}]})
    print_table("Title", [row])
    assert "hearth / serve" in (printed := capsys.readouterr().out)
    assert "0.50" in printed
    report = Report("chat", {"repeats": 2}, {"cores": 2}, [("Title", [row])])
    report.deliver(tmp_path / "new" / "a.json")
    document = json.loads((tmp_path / "new" / "a.json").read_bytes())
    assert document["rows"][0]["runs"]["hearth"] == [{"x": 10.0}, {"x": 2.0}]
    assert [shown(value) for value in (0.1234, 12.34, 1234.5, None)] == ["0.12", "12.3", "1234", "-"]


def test_lists_of_numbers_are_checked():
    assert numbers("1,8, 32") == (1, 8, 32)
    assert numbers("none") == ()
    for wrong in ("", "0", "1,x"):
        with pytest.raises(Exception, match="not a list of numbers"):
            numbers(wrong)


def test_the_benchmarked_server_has_one_model_no_limits_and_none_of_our_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEARTH_HOST", "192.0.2.1")
    with open_workspace(ROOT / "models.yaml", "service-plus", None) as place:
        config = load_config(place.models)
        assert (list(config.models), list(config.tiers)) == (["service-plus"], [TIER])
        assert not place.weights_dir.exists()
        assert "HEARTH_HOST" not in place.environment
    assert not place.folder.exists()
    (tmp_path / "real").mkdir()
    with open_workspace(ROOT / "models.yaml", str(tmp_path / "real"), None) as place:
        spec = load_config(place.models).models[place.model]
        assert (spec.weights, spec.demo, place.weights_dir) == ("real", None, tmp_path)
    with pytest.raises(BenchError, match="no model 'nothing', only: service-plus"):
        open_workspace(ROOT / "models.yaml", "nothing", tmp_path).__enter__()


def test_another_checkout_is_served_by_its_own_command(tmp_path: Path):
    (tmp_path / "models.yaml").write_text((ROOT / "models.yaml").read_text())
    with pytest.raises(BenchError, match="scripts/setup in that checkout"):
        open_workspace(ROOT / "models.yaml", "service-plus", None, checkout=tmp_path).__enter__()
    command = tmp_path / ".venv" / "bin" / "hearth"
    command.parent.mkdir(parents=True)
    command.touch()
    with open_workspace(ROOT / "models.yaml", "service-plus", None, checkout=tmp_path) as place:
        assert place.hearth == command


def test_vllm_serve_gets_the_settings_of_our_engine():
    assert flags({"max_num_seqs": 4, "enforce_eager": True, "eager": False, "a": None, "b": ["x"], "c": {"d": 1}}) == [
        *("--max-num-seqs", "4", "--enforce-eager", "--no-eager", "--b", "x", "--c", '{"d": 1}')
    ]
    with open_workspace(ROOT / "models.yaml", "service-plus", None, engine={"max_num_seqs": 7}) as place:
        python, rust = serve_arguments(place, rust=False), serve_arguments(place, rust=True)
    said = dict(pairwise(python))
    assert Path(python[0]).is_dir()
    assert (said["--max-num-seqs"], said["--max-model-len"]) == ("7", "32768")
    assert "--mm-processor-cache-gb" in python
    assert "--mm-processor-cache-gb" not in rust


def test_the_meter_sees_the_processor_time_of_a_process():
    api, _ = family(os.getpid())
    before, block = cpu_seconds(api), bytearray(os.urandom(2**16))
    while cpu_seconds(api) < before + 0.05:
        sorted(block)
    assert pss_bytes(api) > 2**20


def test_moments_are_the_same_for_every_target_and_have_the_rate_asked_for():
    assert beats(20.0, 1.0, 3) == beats(20.0, 1.0, 3) != beats(20.0, 1.0, 4)
    assert all(number <= at <= number + 0.2 for number, at in enumerate(beats(20.0, 1.0, 3, jitter=0.2)))
    assert poisson(50.0, 400, seed=3)[-1] == pytest.approx(8.0, rel=0.15)


def test_a_batch_has_its_bad_items_in_places_that_are_always_the_same_and_every_answer_is_checked():
    batch = Batch(items=20)
    bad = batch.bad_places()
    bodies = batch.bodies("m")
    assert len(bad) == 2
    assert {place for place, body in enumerate(bodies) if body["max_tokens"] == "many" or body["model"] != "m"} == bad
    responses = [
        {"index": place, "custom_id": f"item-{place}"}
        | ({"error": {}} if place in bad else {"usage": {"completion_tokens": 3}})
        for place in range(20)
    ]
    answer = Answer(0, 0.0, 0.0, body=json.dumps({"responses": responses}))
    batch.check(answer)
    responses[min(bad)].pop("error")
    answer.body = json.dumps({"responses": responses})
    with pytest.raises(BenchError, match="should have failed"):
        batch.check(answer)


@pytest.mark.engine
@pytest.mark.rounds
def test_bench_chat_measures_a_real_server_with_both_load_generators(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    for load in ("vllm", "light"):
        file = tmp_path / f"{load}.json"
        command = [sys.executable, "-m", "bench", "chat", "--against", "none", "--streams", "2", "--repeats", "1"]
        command += ["--seconds", "0.2", "--max-tokens", "8", "--load", load, "--json", str(file)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        rows = json.loads(file.read_bytes())["rows"]
        assert [row["case"] for row in rows] == ["streamed, 2", "plain, 2"]
        assert all(row["medians"]["hearth"]["tokens_per_second"] > 0 for row in rows)
        assert "tokens per second" in done.stdout
