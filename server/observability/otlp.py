"""Sends spans to a collector by OTLP over HTTP, as protobuf; the standard's environment variables say where and how.

OpenTelemetry's own exporter takes three times as long to encode a span: it makes an object for each part and copies it.
"""

import gzip
import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.util.re import parse_env_headers
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from server.observability.metrics import Metrics

_log = logging.getLogger("hearth.tracing")

_PACKINGS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "none": bytes}
_SECONDS = 10.0
_ASK_AGAIN = (429, 502, 503, 504)  # the statuses that the standard names
_LOCAL = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


def setting(name: str) -> str:
    """Return OTEL_EXPORTER_OTLP_TRACES_`name` or OTEL_EXPORTER_OTLP_`name` of the environment, or nothing."""
    return variable(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or variable(f"OTEL_EXPORTER_OTLP_{name}")


def variable(name: str) -> str:
    """Return a variable of the environment, or nothing."""
    return os.environ.get(name, "").strip()


class Exporter(SpanExporter):
    """Says once that spans cannot be sent, and once that they can be again."""

    def __init__(self, metrics: Metrics) -> None:
        """Raises `ValueError` if a variable is wrong."""
        self._metrics = metrics
        self._failing = False
        base = variable("OTEL_EXPORTER_OTLP_ENDPOINT").removesuffix("/")
        self._address = variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or f"{base}/v1/traces"
        self._seconds = float(setting("TIMEOUT") or _SECONDS)
        packing = setting("COMPRESSION").lower() or "none"
        if packing not in _PACKINGS:
            raise ValueError(f"compression {packing!r} is none of {', '.join(_PACKINGS)}")
        self._pack = _PACKINGS[packing]
        self._session = session = requests.Session()
        session.headers.update({"content-type": "application/x-protobuf"})
        session.headers.update({} if packing == "none" else {"content-encoding": packing})
        session.headers.update(parse_env_headers(setting("HEADERS"), liberal=True))
        self._verify = setting("CERTIFICATE") or True
        if certificate := setting("CLIENT_CERTIFICATE"):
            session.cert = (certificate, setting("CLIENT_KEY") or certificate)
        again = Retry(3, read=1, backoff_factor=0.5, status_forcelist=_ASK_AGAIN, allowed_methods=None)
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=again))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        sent = self._post(spans)
        if sent:
            self._metrics.spans_sent.inc(len(spans))
        if not sent and not self._failing:
            _log.warning(
                "Traces cannot be sent and are lost; requests go on. Does the collector run, and accept OTLP/HTTP? Are "
                "the variables OTEL_... right?"
            )
        if self._failing and sent:
            _log.warning("Traces are sent again.")
        self._failing = not sent
        return SpanExportResult.SUCCESS if sent else SpanExportResult.FAILURE

    def _post(self, spans: Sequence[ReadableSpan]) -> bool:
        # The session's own `verify` would give way to REQUESTS_CA_BUNDLE.
        post = partial(self._session.post, timeout=self._seconds, verify=self._verify, allow_redirects=False)
        # RequestException is an OSError, like a certificate that is not there; signs that a header or protobuf cannot
        # have, from a variable, are a ValueError.
        with suppress(OSError, ValueError):
            return post(self._address, self._pack(encoded(spans))).ok
        return False

    def shutdown(self) -> None:
        self._session.close()


def encoded(spans: Sequence[ReadableSpan]) -> bytes:
    """Return the body that sends spans of one resource and one scope."""
    request, first = ExportTraceServiceRequest(), spans[0]
    resource = request.resource_spans.add(schema_url=first.resource.schema_url)
    _add(resource.resource.attributes, first.resource.attributes)
    scope = resource.scope_spans.add()
    if first.instrumentation_scope:
        scope.scope.name = first.instrumentation_scope.name
    for span in spans:
        parent = span.parent
        made = scope.spans.add(
            trace_id=span.context.trace_id.to_bytes(16, "big"),
            span_id=span.context.span_id.to_bytes(8, "big"),
            parent_span_id=parent.span_id.to_bytes(8, "big") if parent else b"",
            name=span.name,
            kind=Span.SPAN_KIND_SERVER,
            start_time_unix_nano=span.start_time,
            end_time_unix_nano=span.end_time,
            flags=_REMOTE if parent and parent.is_remote else _LOCAL,
        )
        made.status.code = span.status.status_code.value
        _add(made.attributes, span.attributes)
        for event in span.events:
            made.events.add(name=event.name, time_unix_nano=event.timestamp)
    body: bytes = request.SerializeToString()
    return body


def _add(pairs: Any, attributes: Mapping[str, Any] | None) -> None:
    for name, value in (attributes or {}).items():
        _set(pairs.add(key=name).value, value)


def _set(into: AnyValue, value: Any) -> None:
    match value:
        case str():
            into.string_value = value
        case bool():
            into.bool_value = value
        case int():
            into.int_value = value
        case float():
            into.double_value = value
        case _:
            for one in value:
                _set(into.array_value.values.add(), one)
