"""One OpenTelemetry span per request, made from its record when it has ended: never the prompt or the answer.

Off unless an OTLP endpoint is configured. A thread sends the spans of a bounded queue by OTLP over HTTP: a collector
that is down or slow costs spans and nothing else. The standard's environment variables configure it.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Self
from urllib.parse import urlsplit

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.http.middleware import HEALTH_PATHS
from server.observability.access_log import RequestRecord
from server.observability.metrics import METHODS, Metrics, versions

_log = logging.getLogger("hearth.tracing")

_FLUSH_SECONDS = 2.0
_NOT_TRACED = HEALTH_PATHS | {"/metrics"}  # requested every few seconds, forever

# All names of attributes and events. Those of `gen_ai` are still in development and may change.
_FIELDS = {
    "request_id": "hearth.request_id",
    "route": "http.route",
    "status": "http.response.status_code",
    "error_code": "error.type",
    "stream": "gen_ai.request.stream",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "time_to_first_token_seconds": "gen_ai.response.time_to_first_chunk",
    "items": "hearth.batch.items",
    "failed_items": "hearth.batch.failed_items",
    "images": "hearth.images",
    "audio_seconds": "hearth.audio_seconds",
}
_METHOD, _OTHER_METHOD = "http.request.method", "_OTHER"
_PROVIDER = {"gen_ai.provider.name": "hearth"}
_OPERATION, _OUTPUT, _MODEL = "gen_ai.operation.name", "gen_ai.output.type", "gen_ai.request.model"
_FINISH_REASONS = "gen_ai.response.finish_reasons"
_KEY = "hearth.key_id"
_QUEUED, _DISPATCHED, _FIRST_TOKEN = "hearth.queued", "hearth.dispatched", "hearth.first_token"
_MAKES_IMAGES = {_OPERATION: "generate_content", _OUTPUT: "image"}
_TRANSCRIBES = {_OPERATION: "generate_content", _OUTPUT: "text"}
_OPERATIONS = {
    "/v1/chat/completions": {_OPERATION: "chat"},
    "/v1/chat/completions/batch": {_OPERATION: "chat"},
    "/v1/responses": {_OPERATION: "chat"},
    "/v1/messages": {_OPERATION: "chat"},
    "/v1/completions": {_OPERATION: "text_completion"},
    "/v1/embeddings": {_OPERATION: "embeddings"},
    "/v1/rerank": {_OPERATION: "rerank"},
    "/v1/images/generations": _MAKES_IMAGES,
    "/v1/images/edits": _MAKES_IMAGES,
    "/v1/images/variations": _MAKES_IMAGES,
    "/v1/audio/speech": {_OPERATION: "generate_content", _OUTPUT: "speech"},
    "/v1/audio/transcriptions": _TRANSCRIBES,
    "/v1/audio/translations": _TRANSCRIBES,
}
_values_of = attrgetter(*_FIELDS)


class Tracing:
    """The spans of one app, and of no other code: OpenTelemetry's global provider stays unset."""

    def __init__(self, metrics: Metrics, *, key_ids: bool) -> None:
        self._metrics = metrics
        self._key_ids = key_ids
        defaults = {"service.name": "hearth", "service.version": versions().get("version", "")}
        resource = Resource.create(defaults).merge(OTELResourceDetector().detect())  # the environment wins
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(Exporter(metrics)))
        self._tracer = self._provider.get_tracer("hearth")
        self.collector = urlsplit(_setting("ENDPOINT")).netloc.rpartition("@")[2]  # without a user and a password
        self._caller = TraceContextTextMapPropagator()
        # Wrong variables have been logged by now. From here on there would be endless lines, with traces, while a
        # collector is down, or for what clients send as `traceparent`.
        for library in ("opentelemetry", "urllib3"):
            logging.getLogger(library).setLevel(logging.CRITICAL)

    @classmethod
    def open(cls, metrics: Metrics, *, key_ids: bool) -> Self | None:
        """Return a `Tracing` if the environment names an endpoint, else None; also, with a log line, if it is wrong."""
        off = _variable("OTEL_TRACES_EXPORTER") == "none" or _variable("OTEL_SDK_DISABLED").lower() == "true"
        if off or not _setting("ENDPOINT"):
            return None
        if (protocol := _setting("PROTOCOL")) not in {"", "http/protobuf"}:
            _log.error(
                "No traces are sent: %s is not supported. Set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf.", protocol
            )
            return None
        try:
            return cls(metrics, key_ids=key_ids)
        except ValueError as error:
            _log.error("No traces are sent: a variable OTEL_... is wrong: %s", error)
            return None

    def finished(self, record: RequestRecord, traceparent: str | None) -> None:
        """Make the span of a request that has ended, if it is sampled. Never waits or fails."""
        if record.route in _NOT_TRACED:
            return
        caller = self._caller.extract({"traceparent": traceparent} if traceparent else {}, Context())
        attributes, epoch = self._attributes(record), time.time_ns() - time.monotonic_ns()
        begun = epoch + int(record.started * 1e9)
        span = self._tracer.start_span(_name(attributes), caller, SpanKind.SERVER, attributes, start_time=begun)
        if not span.is_recording():
            return
        first_token = record.time_to_first_token_seconds
        moments = {
            _QUEUED: record.queued_at,
            _DISPATCHED: record.dispatched_at,
            _FIRST_TOKEN: None if first_token is None else record.started + first_token,
        }
        for event, at in moments.items():
            if at is not None:
                span.add_event(event, timestamp=epoch + int(at * 1e9))
        if _failed(record):
            span.set_status(StatusCode.ERROR)
        self._metrics.spans_made.inc()
        span.end()

    def close(self) -> None:
        """Send what is left, for two seconds at most. Blocks."""
        # On a thread of ours: the library waits up to 30 s for its thread, which may be waiting for the collector.
        ending = threading.Thread(target=self._provider.shutdown, name="tracing-end", daemon=True)
        ending.start()
        ending.join(_FLUSH_SECONDS)

    def _attributes(self, record: RequestRecord) -> dict[str, Any]:
        known = zip(_FIELDS.values(), _values_of(record), strict=True)
        attributes: dict[str, Any] = {name: value for name, value in known if value is not None}
        attributes[_METHOD] = record.method if record.method in METHODS else _OTHER_METHOD
        if operation := _OPERATIONS.get(record.route or ""):
            attributes |= _PROVIDER | operation
        if model := self._metrics.known_model(record.model):
            attributes[_MODEL] = model
        if record.finish_reason is not None:
            attributes[_FINISH_REASONS] = (record.finish_reason,)
        if self._key_ids and record.key is not None:
            attributes[_KEY] = record.key
        return attributes


def _name(attributes: dict[str, Any]) -> str:
    first = attributes.get(_OPERATION, attributes[_METHOD])
    second = attributes.get(_MODEL, "") if _OPERATION in attributes else attributes.get("http.route", "")
    return f"{first} {second}".rstrip()


def _failed(record: RequestRecord) -> bool:
    """Whether the server failed: by its status, or after it. A client's mistake is no error of the server."""
    status = record.error_status or record.status or 0
    return status >= 500 or (status < 400 and record.error_code is not None)


def _setting(name: str) -> str:
    """Return OTEL_EXPORTER_OTLP_TRACES_`name` or OTEL_EXPORTER_OTLP_`name` of the environment, or nothing."""
    return _variable(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or _variable(f"OTEL_EXPORTER_OTLP_{name}")


def _variable(name: str) -> str:
    """Return a variable of the environment, or nothing."""
    return os.environ.get(name, "").strip()


class _Session(requests.Session):
    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        """Have OTEL_EXPORTER_OTLP_CERTIFICATE go before REQUESTS_CA_BUNDLE."""
        return super().merge_environment_settings(url, proxies, stream, verify or self.verify, cert)


class Exporter(OTLPSpanExporter):
    """Logs once that spans cannot be sent, and once that they can be again."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(session=_Session())
        self._sent = metrics.spans_sent
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        failing = result is not SpanExportResult.SUCCESS
        if not failing:
            self._sent.inc(len(spans))
        if failing and not self._failing:
            _log.warning(
                "Traces cannot be sent and are lost; requests go on. Does the collector run, and accept OTLP/HTTP? Are "
                "the variables OTEL_... right?"
            )
        if self._failing and not failing:
            _log.warning("Traces are sent again.")
        self._failing = failing
        return result
