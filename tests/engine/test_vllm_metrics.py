"""A histogram that sorts later says the same as one that sorts at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from engine.backends.vllm_metrics import PatientHistogram

BOUNDS = (0.01, 0.1, 0.5, 2.0)


def page(kind: type[Histogram], looks: list[list[float]]) -> list[str]:
    registry = CollectorRegistry()
    one = kind("seconds", "How long", ["model"], registry=registry, buckets=BOUNDS).labels("a")
    lines = []
    for amounts in looks:
        for amount in amounts:
            one.observe(amount)
        lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(st.lists(st.lists(st.sampled_from([0.0, 0.01, 0.011, 0.1, 0.3, 0.5, 2.0, 2.5, 64.0])), min_size=1, max_size=4))
def test_what_was_observed_is_on_the_page_whenever_somebody_looks(looks: list[list[float]]) -> None:
    seen, wanted = page(PatientHistogram, looks), page(Histogram, looks)
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
