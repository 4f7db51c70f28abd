"""vLLM's own metrics of one engine, under vLLM's own names, in a registry that lives and ends with the engine.

By itself vLLM registers them for the whole process and throws away those of other engines when it does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Count
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry
    from prometheus_client.samples import Sample

_MOST_KEPT = 4096


class PatientHistogram(Histogram):
    """Sorts what was observed into its buckets when somebody looks: there is something to observe for every token."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._observed: list[float] = []

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:  # noqa: ARG002  # vLLM has none
        """Keep it."""
        self._observed.append(amount)
        if len(self._observed) >= _MOST_KEPT:
            self._sort()

    def _child_samples(self) -> Iterable[Sample]:
        self._sort()
        return super()._child_samples()

    def _sort(self) -> None:
        observed, self._observed = self._observed, []
        for place, times in Count(bisect_left(self._upper_bounds, amount) for amount in observed).items():
            self._buckets[place].inc(times)
        self._sum.inc(sum(observed))


def stat_logger_into(registry: CollectorRegistry) -> type[Any]:
    """Return the class that vLLM is to make its logger of: it writes into `registry` and nowhere else."""
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
        _histogram_cls = staticmethod(partial(PatientHistogram, registry=registry))
        _spec_decoding_cls = SpecDecoding
        _perf_metrics_cls = Performance

    return StatLogger
