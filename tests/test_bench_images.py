"""The arithmetic of `bench images`: when images are asked for, figures and aims, its runner and sender, its sources."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks.compare import paired, row_of
from benchmarks.errors import BenchError
from benchmarks.images import _numbers
from benchmarks.images_aims import chat_verdicts, joining_verdicts, short_verdicts
from benchmarks.images_chat_job import BESIDE, IDLE
from benchmarks.images_job import ImagesJob, ImagesMeasurement, at_once, images_figures, poisson
from benchmarks.images_run import run
from benchmarks.images_source import order_for, random_profile
from benchmarks.images_targets import ONE_BY_ONE, REQUESTS, STEPS, profiles
from benchmarks.workplace import TIER, open_workplace

from engine import GenerationError, load_config
from engine.config_profiles import SIZES, ImageProfile, profile_named

if TYPE_CHECKING:
    from benchmarks.figures import Figures

    from engine import ImageRequest

ROOT = Path(__file__).parents[1]
ARRIVALS = poisson(200.0, 12, hd_part=1 / 3, owners=3, seed=1)


def measurement(**known: object) -> ImagesMeasurement:
    return ImagesMeasurement("cpu", "steps", **known)


def test_arrivals_are_decided_by_the_seed_alone_and_come_at_the_rate_asked_for():
    arrivals = poisson(5.0, 2000, hd_part=0.25, owners=3, seed=7)
    assert arrivals == poisson(5.0, 2000, hd_part=0.25, owners=3, seed=7)
    assert arrivals != poisson(5.0, 2000, hd_part=0.25, owners=3, seed=8)
    moments = [arrival.moment for arrival in arrivals]
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(400, rel=0.1)
    assert len({arrival.owner for arrival in arrivals}) == 3


def test_every_run_of_a_case_has_the_same_work_in_another_order():
    orders = [[arrival.quality for arrival in poisson(1.0, 30, hd_part=1 / 3, owners=4, seed=seed)] for seed in (1, 2)]
    assert orders[0] != orders[1]
    assert [order.count("hd") for order in orders] == [10, 10]
    assert [arrival.quality for arrival in at_once(9, hd_part=1 / 3, owners=4)].count("hd") == 3
    assert {arrival.moment for arrival in at_once(9, hd_part=1 / 3, owners=4)} == {0.0}


def test_a_request_is_what_its_arrival_says():
    job = ImagesJob("m", 512, ARRIVALS)
    requests = [job.request(arrival) for arrival in ARRIVALS]
    assert [(request.size, request.n, request.model) for request in requests] == [(512, 1, "m")] * 12
    assert [request.quality for request in requests] == [arrival.quality for arrival in ARRIVALS]
    assert len({request.request_id for request in requests}) == 12


def test_the_figures_of_a_run_have_the_units_that_their_names_say():
    seen = measurement(
        wall_seconds=4.0, cpu_seconds=2.0, peak_rss_bytes=2**30, standard_seconds=[1.0, 2.0, 3.0], hd_seconds=[8.0]
    )
    figures = images_figures(ImagesJob("m", 256, ARRIVALS), seen)
    expected = {
        "images_per_second": 1.0,
        "latency_p50_ms": 2500.0,
        "standard_p50_ms": 2000.0,
        "hd_p95_ms": 8000.0,
        "worker_cpu_seconds_per_image": 0.5,
        "worker_peak_rss_mib": 1024.0,
        "long_beside_per_second": None,
        "asked_per_second": 12 / ARRIVALS[-1].moment,
        "images": 4.0,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_beside_long_images_the_speed_is_theirs():
    seen = measurement(wall_seconds=4.0, standard_seconds=[1.0], long_beside=2)
    figures = images_figures(ImagesJob("m", 256, ARRIVALS, long_beside=2), seen)
    assert figures["images_per_second"] is figures["worker_cpu_seconds_per_image"] is figures["hd_p50_ms"] is None
    assert figures["long_beside_per_second"] == 0.5


async def test_images_are_asked_for_at_their_moments_and_timed_from_them():
    asked: list[ImageRequest] = []
    cpu = iter((1.0, 3.5))

    async def make(request: ImageRequest) -> None:
        asked.append(request)
        await asyncio.sleep(0)

    seen = measurement()
    await run(ImagesJob("m", 256, ARRIVALS), make, seen, lambda: next(cpu))
    assert [request.seed for request in asked] == [arrival.seed for arrival in ARRIVALS]
    assert (len(seen.standard_seconds), len(seen.hd_seconds), seen.cpu_seconds) == (8, 4, 2.5)
    assert seen.wall_seconds >= ARRIVALS[-1].moment
    assert len(seen.late_seconds) == 12


async def test_long_images_are_always_in_the_making_and_given_up_in_the_end():
    owners: set[str] = set()
    given_up = 0

    async def make(request: ImageRequest) -> None:
        nonlocal given_up
        owners.add(request.owner)
        try:
            # The second of each owner is never done.
            await (asyncio.Event().wait() if request.quality == "hd" and request.seed else asyncio.sleep(0))
        except asyncio.CancelledError:
            given_up += 1
            raise

    arrivals = poisson(200.0, 5, hd_part=0, owners=1, seed=1)
    seen = measurement()
    await run(ImagesJob("m", 256, arrivals, long_beside=2, lead_seconds=0.0), make, seen, lambda: 0.0)
    assert owners == {"long-0", "long-1", "user-0"}
    assert given_up == 2
    assert len(seen.standard_seconds) == 5


@pytest.mark.parametrize("quality", ["standard", "hd"])
async def test_one_failed_image_ends_the_run(quality: str):
    async def make(request: ImageRequest) -> None:
        if request.quality == quality:
            raise GenerationError("it went wrong")
        await asyncio.sleep(0)

    job = ImagesJob("m", 256, poisson(200.0, 5, hd_part=0, owners=1, seed=1), long_beside=1, lead_seconds=0.0)
    with pytest.raises(BenchError, match="an image failed: it went wrong"):
        await run(job, make, measurement(), lambda: 0.0)


def test_the_three_ways_differ_in_nothing_but_how_images_are_joined():
    base = profile_named("demo")
    ways = profiles(base)
    assert {name: profile.batching for name, profile in ways.items()} == {
        STEPS: "steps",
        REQUESTS: "requests",
        ONE_BY_ONE: "requests",
    }
    assert [ways[ONE_BY_ONE].batch(size) for size in SIZES] == [1, 1, 1]
    for name, left_out in ((STEPS, {"batching"}), (REQUESTS, {"batching"}), (ONE_BY_ONE, {"batching", "max_batch"})):
        assert ways[name].model_dump(exclude=left_out) == base.model_dump(exclude=left_out)


def run_of(**known: float) -> Figures:
    return {**images_figures(ImagesJob("m", 256, ()), measurement(wall_seconds=1.0, standard_seconds=[1.0])), **known}


def test_joining_pays_where_it_is_as_fast_and_costs_no_more_than_one_by_one():
    one = run_of(images_per_second=1.0, latency_p95_ms=1000.0, worker_cpu_seconds_per_image=1.0)
    better = run_of(images_per_second=1.4, latency_p95_ms=500.0, worker_cpu_seconds_per_image=1.04)
    worse = run_of(images_per_second=0.9, latency_p95_ms=1100.0, worker_cpu_seconds_per_image=1.2)
    row = row_of("case", {STEPS: [worse], ONE_BY_ONE: [one], REQUESTS: [better]})
    judged = joining_verdicts(row, overloaded=True)
    assert [verdict.met for verdict in judged] == [True, True, True, False, False, False]
    assert judged[3].sentence().startswith(f"MISSED: images/s, {STEPS}, of that one by one (case), is 0.9")
    # Where all that is asked for is made, its speed is that of the arrivals.
    assert len(joining_verdicts(row, overloaded=False)) == 4


def test_short_images_should_wait_less_where_steps_are_joined():
    def ran(p95: float, long: float) -> Figures:
        return run_of(standard_p95_ms=p95, long_beside_per_second=long)

    row = row_of("case", {STEPS: [ran(500, 1.0)], ONE_BY_ONE: [ran(400, 1.0)], REQUESTS: [ran(1000, 2.0)]})
    judged = short_verdicts(row)
    assert [(verdict.value, verdict.met) for verdict in judged] == [(0.5, True), (1.25, False), (0.5, None)]


def test_chat_may_take_half_as_long_again_beside_images_by_the_ratios_within_each_repeat():
    def ran(p99: float, images: float = 1.0) -> Figures:
        return {"inter_token_latency_p99_ms": p99, "tokens_per_second": 100.0, "images_per_second": images}

    row = row_of("case", {BESIDE: [ran(15), ran(28), ran(14)], IDLE: [ran(10), ran(20), ran(10)]})
    assert [(verdict.value, verdict.met) for verdict in chat_verdicts(row)] == [(1.4, True), (1.0, None)]
    row = row_of("case", {BESIDE: [ran(15.1)], IDLE: [ran(10)]})
    assert chat_verdicts(row)[0].met is False
    assert paired(row, IDLE, BESIDE).ratio["inter_token_latency_p99_ms"] == pytest.approx(10 / 15.1)
    # Without images made, chat had nothing beside it.
    row = row_of("case", {BESIDE: [ran(10), ran(10, images=0.0)], IDLE: [ran(10), ran(10)]})
    assert [verdict.met for verdict in chat_verdicts(row)] == [None, None]


def test_a_workplace_serves_several_models_and_only_the_first_is_changed():
    models = ROOT / "models.yaml"
    with open_workplace(models, "service-image", None, engine={"max_seconds": 9.0}, beside=["service-plus"]) as place:
        config = load_config(place.models)
        assert list(config.models) == ["service-image", "service-plus"]
        assert {spec.tier for spec in config.models.values()} == {TIER}
        assert config.models["service-image"].engine.max_seconds == 9.0
        assert config.models["service-plus"].engine == load_config(models).models["service-plus"].engine
        assert [spec.id for spec in place.beside] == ["service-plus"]
    with (
        pytest.raises(BenchError, match="no model 'nothing'"),
        open_workplace(models, "service-image", None, beside=["nothing"]),
    ):
        pass


def test_random_weights_are_rendered_at_the_size_asked_for_and_found_in_the_weights_folder():
    profile = random_profile("sd3", "full", 8)
    assert [profile.render_edge(size) for size in SIZES] == [256, 512, 1024]
    assert [profile.batch(size) for size in SIZES] == [8, 8, 8]
    assert (profile.steps.standard, profile.steps.hd, profile.dtype) == (28, 56, "float16")
    assert random_profile("sdxl", "tiny", 2).dtype == "float32"
    with open_workplace(ROOT / "models.yaml", "service-image", None) as place:
        (place.weights_dir / place.spec.weights).mkdir(parents=True)
        order = order_for(place, profile, threads=3)
        assert order.folder == str(place.weights_dir / place.spec.weights)
        assert ImageProfile.model_validate_json(order.profile) == profile
        assert order.threads == 3


def test_a_chat_model_is_no_image_model():
    with (
        open_workplace(ROOT / "models.yaml", "service-plus", None) as place,
        pytest.raises(BenchError, match="service-plus makes no images"),
    ):
        order_for(place, None, threads=None)


def test_lists_of_loads_are_checked():
    assert _numbers("0.7, 1.5", "--loads") == (0.7, 1.5)
    for wrong in ("", "0", "1,x"):
        with pytest.raises(Exception, match="no list of numbers"):
            _numbers(wrong, "--loads")
