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


# At every step vLLM sets, counts and observes some twenty times, under a lock each: two fifths of the calls that a step
# cost. These three only take note, on the one thread that vLLM does it on, and do the rest when somebody looks.


class PatientGauge(Gauge):
    """Knows its value."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._now = 0.0

    def set(self, value: float) -> None:
        """Keep it."""
        self._now = value

    def inc(self, amount: float = 1) -> None:
        """Add to it."""
        self._now += amount

    def dec(self, amount: float = 1) -> None:
        """Take from it."""
        self._now -= amount

    def _child_samples(self) -> Iterable[Sample]:
        self._value.set(float(self._now))
        return super()._child_samples()


class PatientCounter(Counter):
    """Knows its sum."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._total = 0.0

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:  # noqa: ARG002  # vLLM has none
        """Add to it."""
        self._total += amount

    def _child_samples(self) -> Iterable[Sample]:
        self._value.set(self._total)
        return super()._child_samples()


class PatientHistogram(Histogram):
    """Sorts what was observed into its buckets later."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._observed: list[float] = []

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:  # noqa: ARG002  # vLLM has none
        """Keep it."""
        self._observed.append(amount)
        if len(self._observed) >= _MOST_KEPT:
            self._sort()

    def observe_all(self, amounts: Iterable[float]) -> None:
        """Keep them."""
        self._observed.extend(amounts)
        if len(self._observed) >= _MOST_KEPT:
            self._sort()

    def _child_samples(self) -> Iterable[Sample]:
        self._sort()
        return super()._child_samples()

    def _sort(self) -> None:
        observed, self._observed = self._observed, []
        for place, times in Count(map(partial(bisect_left, self._upper_bounds), observed)).items():
            self._buckets[place].inc(times)
        self._sum.inc(sum(observed))


def stat_logger_into(registry: CollectorRegistry) -> type[Any]:
    """Return the class that vLLM is to make its logger of: it writes into `registry` and nowhere else."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.perf import PerfMetricsProm
    from vllm.v1.spec_decode.metrics import SpecDecodingProm

    # Static, since a newer Python would bind them to the object like methods
    counter = staticmethod(partial(PatientCounter, registry=registry))

    class SpecDecoding(SpecDecodingProm):  # type: ignore[misc]
        _counter_cls = counter

    class Performance(PerfMetricsProm):  # type: ignore[misc]
        _counter_cls = counter

    class StatLogger(PrometheusStatLogger):  # type: ignore[misc]
        _gauge_cls = staticmethod(partial(PatientGauge, registry=registry))
        _counter_cls = counter
        _histogram_cls = staticmethod(partial(PatientHistogram, registry=registry))
        _spec_decoding_cls = SpecDecoding
        _perf_metrics_cls = Performance

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            """Observe the one thing that there is of every token all at once, and the rest as ever."""
            if iteration_stats is None:
                super().record(scheduler_stats, None, mm_cache_stats, engine_idx)
                return
            latencies, iteration_stats.inter_token_latencies_iter = iteration_stats.inter_token_latencies_iter, []
            self.histogram_inter_token_latency[engine_idx].observe_all(latencies)
            try:
                super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
            finally:
                iteration_stats.inter_token_latencies_iter = latencies  # other loggers are told of the same object

    return StatLogger
