"""Metrics that take note first and do the rest when somebody looks say the same as those that do it at once."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.backends.vllm.metrics import PatientCounter, PatientGauge, PatientHistogram, stat_logger_into
from engine.demo import weights_dir

if TYPE_CHECKING:
    from collections.abc import Callable

BOUNDS = (0.01, 0.1, 0.5, 2.0)


def one_by_one(histogram: Histogram, amounts: list[float]) -> None:
    for amount in amounts:
        histogram.observe(amount)


def page(kind: type[Histogram], observe: Callable[[Any, list[float]], None], looks: list[list[float]]) -> list[str]:
    registry = CollectorRegistry()
    one = kind("seconds", "How long", ["model"], registry=registry, buckets=BOUNDS).labels("a")
    lines = []
    for amounts in looks:
        observe(one, amounts)
        lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@pytest.mark.parametrize("observe", [one_by_one, PatientHistogram.observe_all])
@given(
    looks=st.lists(st.lists(st.sampled_from([0.0, 0.01, 0.011, 0.1, 0.3, 0.5, 2.0, 2.5, 64.0])), min_size=1, max_size=4)
)
def test_what_was_observed_is_on_the_page_whenever_somebody_looks(
    observe: Callable[[Any, list[float]], None], looks: list[list[float]]
) -> None:
    seen, wanted = page(PatientHistogram, observe, looks), page(Histogram, one_by_one, looks)
    assert [line for line in seen if "_sum" not in line] == [line for line in wanted if "_sum" not in line]
    (mine,) = [float(line.split()[-1]) for line in seen if "_sum{" in line]
    assert abs(mine - sum(map(sum, looks))) < 1e-9 * (1 + mine)


def test_it_does_not_keep_more_and_more() -> None:
    one = PatientHistogram("seconds", "How long", registry=CollectorRegistry(), buckets=BOUNDS)
    for _ in range(10_000):
        one.observe(0.2)
    assert len(one._observed) < 5000
    samples = {sample.name: sample.value for sample in next(iter(one.collect())).samples}
    assert samples["seconds_count"] == 10_000


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 1.0, 2.5])), max_size=8))
def test_counters_and_gauges_of_each_label_say_the_same(done: list[tuple[str, float]]) -> None:
    pages = []
    for counter_class, gauge_class in ((Counter, Gauge), (PatientCounter, PatientGauge)):
        registry = CollectorRegistry()
        counter = counter_class("sent", "How many", ["model"], registry=registry)
        gauge = gauge_class("running", "How many now", ["model"], registry=registry)
        for label, amount in done:
            counter.labels(label).inc(amount)
            gauge.labels(label).set(amount)
            gauge.labels(label).inc()
            gauge.labels(label).dec(0.5)
        text = generate_latest(registry).decode().splitlines()
        pages.append([line for line in text if "_created" not in line])
    assert pages[0] == pages[1]


def test_vllms_logger_counts_each_latency_once_and_leaves_the_list_to_other_loggers() -> None:
    environment = dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are other people's, at import
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.metrics.stats import IterationStats

            config = EngineArgs(model=str(weights_dir("chat"))).create_engine_config()
    finally:  # vLLM changes it
        os.environ.clear()
        os.environ.update(environment)
    registry = CollectorRegistry()
    logger = stat_logger_into(registry)(config, [0])
    statistics = IterationStats()
    statistics.inter_token_latencies_iter += [0.1, 0.2, 0.3]
    logger.record(None, statistics)
    logger.record(None, None)
    assert statistics.inter_token_latencies_iter == [0.1, 0.2, 0.3]
    counted = [
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "vllm:inter_token_latency_seconds_count"
    ]
    assert counted == [3]
