"""An OpenTelemetry collector for tests: takes OTLP over HTTP, keeps what it got, and can be away for a while."""

import gzip
import ssl
import threading
import zlib
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from serving import async_poll_until

_UNPACK: dict[str | None, Callable[[bytes], bytes]] = {None: bytes, "gzip": gzip.decompress, "deflate": zlib.decompress}


class Collector:
    """`payloads` are the bodies, unpacked, and `headers` those of the last. `refusals` are its next answers.

    `answers` is cleared to take requests and leave them unanswered.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.payloads: list[bytes] = []
        self.headers: Mapping[str, str] = {}
        self.refusals: list[int] = []
        self._tls = tls
        self.answers = threading.Event()
        self.answers.set()
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.answers.set()
        self.stop()

    @property
    def endpoint(self) -> str:
        """For traces."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}/v1/traces"

    def start(self) -> None:
        """Listen, at the same port as before."""
        collector = self

        class Taking(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.answers.wait()
                status = collector.refusals.pop(0) if collector.refusals else 200
                if status == 200 and self.path == "/v1/traces":
                    collector.headers = dict(self.headers)
                    collector.payloads.append(_UNPACK[self.headers["content-encoding"]](body))
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its name there
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Taking)
        self._server.daemon_threads = True
        if self._tls:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        self._server.shutdown()
        self._server.server_close()

    def requests(self) -> list[ExportTraceServiceRequest]:
        """Every request, decoded."""
        return [ExportTraceServiceRequest.FromString(payload) for payload in [*self.payloads]]

    def spans(self) -> list[Span]:
        """Every span, in the order of their ends."""
        return [
            span
            for request in self.requests()
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def of(self, request_id: str) -> list[Span]:
        """The spans of one request."""
        return [span for span in self.spans() if attributes(span.attributes).get("hearth.request_id") == request_id]

    async def span(self, request_id: str, describe: Callable[[], str] = str) -> Span:
        """The one span of a request, once it has come."""
        await async_poll_until(lambda: bool(self.of(request_id)), 60, describe=describe)
        (span,) = self.of(request_id)
        return span


def attributes(pairs: Any) -> dict[str, Any]:
    """Attributes of a span, an event or a resource as plain values."""
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> Any:
    kind = pair.value.WhichOneof("value")
    if kind == "array_value":
        return [value.string_value for value in pair.value.array_value.values]
    return getattr(pair.value, kind)
