"""What is sent to a collector: as the standard's variables say, and again when it asks for that."""

import ssl
from pathlib import Path

import pytest
from collector import Collector
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext
from tls_pair import make_pair

from server.observability.metrics import Metrics
from server.observability.tracing import Exporter


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    return monkeypatch


def send(environment: pytest.MonkeyPatch, collector: Collector | None = None) -> SpanExportResult:
    """Send one span, as a server does that starts now."""
    if collector is not None:
        environment.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.endpoint)
    exporter, context = Exporter(Metrics(())), SpanContext(1, 1, is_remote=False)
    try:
        return exporter.export([ReadableSpan("one", context, start_time=1, end_time=2)])
    finally:
        exporter.shutdown()


@pytest.mark.parametrize("packing", ["", "none", "gzip", "deflate"])
def test_the_standards_variables_say_how(environment: pytest.MonkeyPatch, packing: str):
    environment.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", packing)
    environment.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc,x-of-all=1")
    with Collector() as collector:
        assert send(environment, collector) is SpanExportResult.SUCCESS
        assert {"authorization": "Basic abc", "x-of-all": "1"}.items() <= collector.headers.items()
        assert collector.headers.get("Content-Encoding", "none") == (packing or "none")
        environment.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-of-traces=2")
        assert send(environment, collector) is SpanExportResult.SUCCESS
        assert "x-of-all" not in collector.headers
        assert collector.headers["x-of-traces"] == "2"
    assert [span.name for span in collector.spans()] == ["one", "one"]


@pytest.mark.parametrize("ending", ["", "/"])
def test_the_address_of_all_signals_gets_the_path(environment: pytest.MonkeyPatch, ending: str):
    with Collector() as collector:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint.removesuffix("/v1/traces") + ending)
        assert send(environment) is SpanExportResult.SUCCESS
    assert [span.name for span in collector.spans()] == ["one"]


def test_signs_that_cannot_be_sent_are_told_and_not_raised(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    environment.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-of-all=%E2%82%AC")
    with Collector() as collector:
        assert send(environment, collector) is SpanExportResult.FAILURE
    assert "Are the variables OTEL_... right?" in caplog.text


def test_a_collector_may_ask_for_certificates(environment: pytest.MonkeyPatch, tmp_path: Path):
    pair = make_pair(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(pair.cert))
    tls.load_cert_chain(pair.cert, pair.key)
    tls.verify_mode = ssl.CERT_REQUIRED
    with Collector(tls) as collector:
        assert send(environment, collector) is SpanExportResult.FAILURE
        environment.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(pair.cert))
        environment.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(pair.cert))
        environment.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(pair.key))
        assert send(environment, collector) is SpanExportResult.SUCCESS
        environment.delenv("OTEL_EXPORTER_OTLP_CLIENT_KEY")
        environment.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(pair.both))
        assert send(environment, collector) is SpanExportResult.SUCCESS
        environment.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(tmp_path / "missing"))
        assert send(environment, collector) is SpanExportResult.FAILURE


def test_a_collector_that_is_busy_is_asked_again_and_one_that_refuses_is_not(environment: pytest.MonkeyPatch):
    with Collector() as collector:
        collector.refusals[:] = [503, 429]
        assert send(environment, collector) is SpanExportResult.SUCCESS
        collector.refusals[:] = [400, 200]
        assert send(environment, collector) is SpanExportResult.FAILURE
        assert collector.refusals == [200]
    assert len(collector.payloads) == 1
