"""vLLM's own metrics of an engine are in the registry of that engine, and in no other."""

import os
import warnings
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from engine.backends.vllm.outputs import stat_logger_into
from engine.demo import weights_dir

LATENCIES = "vllm:inter_token_latency_seconds_count"


@pytest.fixture(scope="module")
def config() -> Any:
    environment = dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are other people's, at import
            from vllm.engine.arg_utils import EngineArgs

            return EngineArgs(model=str(weights_dir("chat"))).create_engine_config()
    finally:  # vLLM changes it
        os.environ.clear()
        os.environ.update(environment)


def counted(registry: CollectorRegistry) -> list[float]:
    return [sample.value for metric in registry.collect() for sample in metric.samples if sample.name == LATENCIES]


def test_each_engine_counts_into_its_own_registry(config: Any) -> None:
    from vllm.v1.metrics.stats import IterationStats

    first, second = CollectorRegistry(), CollectorRegistry()
    loggers = [stat_logger_into(registry)(config, [0]) for registry in (first, second)]
    statistics = IterationStats()
    statistics.inter_token_latencies_iter += [0.1, 0.2, 0.3]
    loggers[0].record(None, statistics)
    assert (counted(first), counted(second), counted(REGISTRY)) == ([3], [0], [])


def test_times_between_tokens_are_counted_as_vllm_does(config: Any) -> None:
    from vllm.v1.metrics.stats import IterationStats

    def samples(*, at_once: bool) -> dict[tuple[str, str | None], float]:
        logger = stat_logger_into(registry := CollectorRegistry())
        record = logger.record if at_once else logger.__bases__[0].record
        made = logger(config, [0])
        for seconds in ([0.001, 0.01, 0.0100001, 0.3], [], [5.0, 1e9]):
            statistics = IterationStats()
            statistics.inter_token_latencies_iter += seconds
            record(made, None, statistics)
        every = (sample for metric in registry.collect() for sample in metric.samples)
        return {(each.name, each.labels.get("le")): each.value for each in every if "_created" not in each.name}

    assert samples(at_once=True) == samples(at_once=False)
    assert samples(at_once=True)[LATENCIES, None] == 6


def test_two_engines_register_the_same_metrics(config: Any) -> None:
    names = []
    for _ in range(2):
        registry = CollectorRegistry()
        stat_logger_into(registry)(config, [0])
        names.append({metric.name for metric in registry.collect()})
    assert names[0] == names[1]
    assert "vllm:num_requests_running" in names[0]
