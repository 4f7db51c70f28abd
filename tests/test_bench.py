"""The benchmarks' own arithmetic and order. The load generator has test_bench_load.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from benchmarks.chat import chosen, numbers
from benchmarks.chat_job import ChatJob, Measurement, chat_figures
from benchmarks.compare import Case, compare
from benchmarks.conditions import count_parameters
from benchmarks.errors import BenchError
from benchmarks.figures import medians, percentile, ratios
from benchmarks.footprint import Footprint, Meter
from benchmarks.report import document, shown
from benchmarks.workplace import TIER, open_workplace

from engine import load_config

ROOT = Path(__file__).parents[1]
JOB = ChatJob(model="m", streams=2, requests=5, streamed=True, max_tokens=2, label="a")


def test_percentiles_are_interpolated_between_neighbours():
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile(range(101), 99) == 99
    assert percentile(range(201), 99) == 198


def test_medians_and_ratios_leave_out_what_was_not_measured():
    middle = medians([{"a": 1.0, "b": None}, {"a": 9.0, "b": None}, {"a": 2.0, "b": None}])
    assert middle == {"a": 2.0, "b": None}
    assert ratios({"a": 3.0, "b": 1.0, "c": None, "d": 1.0}, {"a": 2.0, "b": 0.0, "c": 1.0, "d": None}) == {
        "a": 1.5,
        "b": None,
        "c": None,
        "d": None,
    }


def test_the_figures_of_a_run_have_the_units_that_their_names_say():
    seen = Measurement(wall_seconds=2.0)
    seen.add(10.0, [10.5, 10.6, 10.8], 11.0, 4)
    seen.add(10.0, [10.5, 10.6, 10.8], 11.0, 4)
    figures = chat_figures(seen, Footprint(0.4, 0.8, 2**20, 2**21), load_cpu_seconds=0.1)
    expected = {
        "requests_per_second": 1.0,
        "tokens_per_second": 4.0,
        "time_to_first_token_p50_ms": 500.0,
        "inter_token_latency_p50_ms": 150.0,
        "latency_p99_ms": 1000.0,
        "tokens_per_event": 8 / 6,
        "api_cpu_ms_per_request": 200.0,
        "api_cpu_ms_per_1000_tokens": 50_000.0,
        "engine_cpu_ms_per_request": 400.0,
        "load_cpu_ms_per_request": 50.0,
        "api_peak_rss_mib": 1.0,
        "engine_peak_rss_mib": 2.0,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_the_meter_sees_the_processor_time_and_the_memory_of_a_process():
    meter = Meter(os.getpid())
    block = bytearray(os.urandom(4 * 2**20) * 8)
    while (used := meter.stop()).api_cpu_seconds < 0.05:
        sorted(block[: 2**16])
    assert used.api_peak_rss_bytes > 32 * 2**20


class Counting:
    def __init__(self, name: str, order: list[str]) -> None:
        self.name = name
        self.order = order

    async def measure(self, job: int) -> dict[str, float | None]:
        self.order.append(f"{self.name}{job}")
        return {"speed": float(job)}


async def test_targets_take_turns_and_who_goes_first_changes(capsys: pytest.CaptureFixture[str]):
    order: list[str] = []
    targets = [Counting("x", order), Counting("y", order)]
    rows = await compare(targets, [Case("one", lambda n: n + 1)], repeats=3, headline="speed")
    assert order == ["x1", "y1", "y2", "x2", "x3", "y3"]
    assert rows[0].medians == {"x": {"speed": 2.0}, "y": {"speed": 2.0}}
    assert rows[0].ratio == {"speed": 1.0}
    assert "repeat 3 of 3, one: x 3.0, y 3.0 speed" in capsys.readouterr().err
    report = json.loads(document("chat", {"cores": 2}, {"repeats": 3}, rows))
    assert report["rows"][0]["runs"]["x"] == [{"speed": 1.0}, {"speed": 2.0}, {"speed": 3.0}]


def test_the_benchmarked_server_has_one_model_no_limits_and_none_of_our_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEARTH_HOST", "192.0.2.1")
    with open_workplace(ROOT / "models.yaml", "service-plus", None) as place:
        config = load_config(place.models)
        assert list(config.models) == ["service-plus"]
        assert list(config.tiers) == [TIER]
        assert config.models["service-plus"].engine == place.spec.engine
        assert not place.weights_dir.exists()
        assert "HEARTH_HOST" not in place.environment
    assert not place.folder.exists()
    with (
        pytest.raises(
            BenchError, match="no model 'nothing', only: service-plus, service-pro, service-image, service-voice"
        ),
        open_workplace(ROOT / "models.yaml", "nothing", tmp_path),
    ):
        pass


def test_parameters_are_counted_from_the_files_headers(tmp_path: Path):
    for name, shape in (("a", [2, 3]), ("b", [5])):
        header = json.dumps(
            {"__metadata__": {}, "w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
        ).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert count_parameters(tmp_path) == 11


def test_numbers_are_shown_with_three_figures_and_lists_of_streams_are_checked():
    assert [shown(value) for value in (0.1234, 12.34, 123.4, 1234.5, None)] == ["0.12", "12.3", "123", "1234", "-"]
    assert numbers("1,8, 32", int, "--streams") == (1, 8, 32)
    assert numbers("0.5,20", float, "--rate") == (0.5, 20.0)
    assert numbers("none", float, "--rate") == ()
    for wrong in ("", "0", "1,x"):
        with pytest.raises(Exception, match="no list of numbers"):
            numbers(wrong, int, "--streams")
    assert chosen("serve,bare", ("bare", "serve", "rust"), "--against") == ("bare", "serve")
    with pytest.raises(Exception, match="no list of bare, serve, rust"):
        chosen("served", ("bare", "serve", "rust"), "--against")
