"""vLLM's own metrics of one engine, under vLLM's own names, in a registry that lives and ends with the engine.

By itself vLLM registers them for the whole process and throws away those of other engines when it does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


def stat_logger_into(registry: CollectorRegistry) -> type[Any]:
    """Return the class that vLLM is to make its logger of: it writes into `registry` and nowhere else."""
    from prometheus_client import Counter, Gauge, Histogram
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.perf import PerfMetricsProm
    from vllm.v1.spec_decode.metrics import SpecDecodingProm

    # Static, since a newer Python would bind them to the object like methods
    counter = staticmethod(partial(Counter, registry=registry))

    class SpecDecoding(SpecDecodingProm):  # type: ignore[misc]
        _counter_cls = counter

    class Performance(PerfMetricsProm):  # type: ignore[misc]
        _counter_cls = counter

    class StatLogger(PrometheusStatLogger):  # type: ignore[misc]
        _gauge_cls = staticmethod(partial(Gauge, registry=registry))
        _counter_cls = counter
        _histogram_cls = staticmethod(partial(Histogram, registry=registry))
        _spec_decoding_cls = SpecDecoding
        _perf_metrics_cls = Performance

    return StatLogger
