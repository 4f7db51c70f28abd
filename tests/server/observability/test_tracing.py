"""Traces: one span per request at a real collector, in its caller's trace; nothing that a client wrote is in it."""

import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator

import httpx2
import pytest
from chat_parts import CHAT, HELLO, HELLO_ANSWER, MODEL, events
from collector import Collector, attributes
from key_clients import client_with
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from serving import CANARY, ROOT, Server

from server.app import _ROUTES
from server.observability.access_log import RequestRecord
from server.observability.metrics import Metrics
from server.observability.tracing import _FIELDS, _OPERATIONS, Tracing


@pytest.fixture
async def http(chat_server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    assert chat_server.admin_key is not None
    async with client_with(chat_server, chat_server.admin_key.text) as client:
        yield client


def new_id() -> str:
    return f"trace-{secrets.token_hex(8)}"


async def ask(http: httpx2.AsyncClient, *, stream: bool = False, **headers: str) -> str:
    """Have a promised answer; return the request's id."""
    request_id = new_id()
    body = {"model": MODEL, "messages": HELLO, "temperature": 0, "stream": stream}
    answer = await http.post(CHAT, json=body, headers={"x-request-id": request_id, **headers})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == request_id
    if stream:
        pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in events(answer.content)]
        assert "".join(pieces) == HELLO_ANSWER
    return request_id


@pytest.mark.engine
async def test_a_stream_is_one_span(http: httpx2.AsyncClient, collector: Collector):
    before = time.time_ns()
    request_id = await ask(http, stream=True)
    await collector.span(await ask(http))  # what ends later comes later, so there was no other span of the first
    (span,) = collector.of(request_id)
    assert (span.name, span.kind, span.status.code) == (
        f"chat {MODEL}",
        Span.SPAN_KIND_SERVER,
        Status.STATUS_CODE_UNSET,
    )
    assert not span.parent_span_id
    found = attributes(span.attributes)
    assert found.pop("gen_ai.usage.input_tokens") > 5
    assert found.pop("gen_ai.usage.output_tokens") > 5
    assert 0 < found.pop("gen_ai.response.time_to_first_chunk") < 20
    assert found == {
        "hearth.request_id": request_id,
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.provider.name": "hearth",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert [event.name for event in span.events] == ["hearth.queued", "hearth.dispatched", "hearth.first_token"]
    times = [span.start_time_unix_nano, *(event.time_unix_nano for event in span.events), span.end_time_unix_nano]
    assert times == sorted(times)
    assert before - 1e7 < times[0] < times[-1] < time.time_ns() + 1e7


@pytest.mark.engine
async def test_a_span_joins_its_callers_trace(http: httpx2.AsyncClient, collector: Collector):
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    span = await collector.span(await ask(http, traceparent=f"00-{trace}-{parent}-01"))
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, parent)
    left_out = await ask(http, traceparent=f"00-{trace}-{parent}-00")
    for wrong in ("no-trace", f"00-{'0' * 32}-{parent}-01", f"00-{trace}-{parent}-01-more", f"ff-{trace}-{parent}-01"):
        span = await collector.span(await ask(http, traceparent=wrong))
        assert span.trace_id.hex() != trace
        assert not span.parent_span_id
    assert collector.of(left_out) == [], "the caller's trace is not sampled"


@pytest.mark.engine
async def test_errors_are_told_and_those_of_clients_are_not_the_servers(http: httpx2.AsyncClient, collector: Collector):
    request_id = new_id()
    headers = {"x-request-id": request_id}
    await http.post(CHAT, json={"model": "unknown", "messages": HELLO}, headers=headers)
    span = await collector.span(request_id)
    assert (span.name, span.status.code) == ("chat", Status.STATUS_CODE_UNSET)
    found = attributes(span.attributes)
    assert (found["http.response.status_code"], found["error.type"]) == (404, "model_not_found")


@pytest.mark.engine
async def test_nothing_that_a_client_wrote_is_sent(http: httpx2.AsyncClient, chat_server: Server, collector: Collector):
    body = {"model": MODEL, "messages": [{"role": "user", "content": CANARY}], "user": CANARY, "max_tokens": 5}
    odd = {"user-agent": CANARY, "tracestate": f"vendor={CANARY}", "baggage": f"a={CANARY}"}
    trace = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    await http.post(CHAT, json=body, headers={**odd, "traceparent": trace})
    await http.post(CHAT, json={**body, "model": CANARY})
    await http.request("PROPFIND", f"/{CANARY}?{CANARY}=1")
    await http.get(f"/v1/models/{CANARY}", headers={"traceparent": CANARY})
    await http.get("/v1/models", headers={"authorization": f"Bearer {CANARY}"})
    await collector.span(await ask(http))
    sent = b"".join(collector.payloads).lower()
    assert CANARY.lower().encode() not in sent
    assert HELLO_ANSWER.lower().encode() not in sent
    keys = [key for key in [chat_server.admin_key, *chat_server.made_keys] if key is not None]
    assert not any(word.lower().encode() in sent for key in keys for word in (key.secret, key.public_id))
    names = {span.name for span in collector.spans()}
    assert names >= {"chat", "_OTHER", "GET", "GET /v1/models/{model:path}"}


@pytest.mark.engine
async def test_probes_make_no_span_and_vllm_sends_none_of_its_own(http: httpx2.AsyncClient, collector: Collector):
    """The server has the variable by which vLLM's engines would send theirs to the same collector."""
    paths = ("/health", "/health/live", "/health/ready", "/ping", "/metrics")
    probes = [new_id() for _ in paths]
    for request_id, path in zip(probes, paths, strict=True):
        assert (await http.get(path, headers={"x-request-id": request_id})).status_code == 200
    await collector.span(await ask(http))
    assert [collector.of(request_id) for request_id in probes] == [[] for _ in paths]
    resources = [resource for request in collector.requests() for resource in request.resource_spans]
    assert {attributes(one.resource.attributes)["service.name"] for one in resources} == {"hearth-test"}
    assert {scope.scope.name for one in resources for scope in one.scope_spans} == {"hearth"}


@pytest.mark.engine
async def test_without_the_collector_requests_are_answered_as_ever(
    http: httpx2.AsyncClient, chat_server: Server, collector: Collector
):
    await collector.span(await ask(http))
    collector.stop()
    try:
        await ask(http, stream=True)
        chat_server.wait_for_line("Traces cannot be sent")
        for _ in range(5):
            await ask(http, stream=True)
    finally:
        collector.start()
    await collector.span(await ask(http), chat_server.log)
    chat_server.wait_for_line("Traces are sent again")
    assert chat_server.log().count("Traces cannot be sent") == 1
    assert "Traceback" not in chat_server.log()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """With an endpoint where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
    return monkeypatch


def opened(*, key_ids: bool = False) -> Tracing:
    tracing = Tracing.open(Metrics({MODEL}), key_ids=key_ids)
    assert tracing is not None
    return tracing


def ended(number: int = 0, **fields: object) -> RequestRecord:
    known = {"model": MODEL, "route": CHAT, "status": 200, "key": "publicid"} | fields
    return RequestRecord(str(number), "POST", None, **known)


def test_the_collector_is_told_without_the_password_of_its_address(environment: pytest.MonkeyPatch):
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:secret@localhost:4318/otlp")
    tracing = opened()
    assert tracing.collector == "localhost:4318"
    tracing.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
        ("OTEL_TRACES_EXPORTER", "none"),
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
    ],
)
def test_it_is_off(environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str):
    environment.setenv(name, value)
    assert Tracing.open(Metrics(()), key_ids=False) is None
    said = [record.getMessage() for record in caplog.records if record.name == "hearth.tracing"]
    assert len(said) == (value in {"grpc", "0"})


def test_a_collector_that_never_answers_costs_no_time_and_bounded_memory(environment: pytest.MonkeyPatch):
    environment.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    environment.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "50")
    with Collector() as collector:
        environment.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.endpoint)
        collector.answers.clear()
        tracing = opened()
        began = time.monotonic()
        for number in range(2000):
            tracing.finished(ended(number), None)
        assert time.monotonic() - began < 5
        collector.answers.set()
        tracing.close()
        got = [attributes(span.attributes)["hearth.request_id"] for span in collector.spans()]
    assert got[-1] == "1999", "the oldest are dropped"
    assert len(got) <= 200


def test_the_end_waits_two_seconds_at_most(environment: pytest.MonkeyPatch):
    with Collector() as collector:
        environment.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.endpoint)
        collector.answers.clear()
        tracing = opened()
        tracing.finished(ended(), None)
        began = time.monotonic()
        tracing.close()
        assert 1.9 < time.monotonic() - began < 4


def test_sampling_errors_and_key_ids_are_as_asked(environment: pytest.MonkeyPatch):
    with Collector() as collector:
        environment.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.endpoint)
        environment.setenv("OTEL_TRACES_SAMPLER", "always_off")
        silent = opened()
        silent.finished(ended(), None)
        silent.close()
        assert collector.payloads == []
        environment.setenv("OTEL_TRACES_SAMPLER", "always_on")
        tracing = opened(key_ids=True)
        tracing.finished(ended(1, status=500, error_code="internal_error"), None)
        tracing.finished(ended(2, error_code="engine_unavailable"), None)
        tracing.finished(ended(3, status=499), None)
        tracing.close()
        failed, cut_off, left = collector.spans()
    assert attributes(failed.attributes)["hearth.key_id"] == "publicid"
    codes = [span.status.code for span in (failed, cut_off, left)]
    assert codes == [Status.STATUS_CODE_ERROR, Status.STATUS_CODE_ERROR, Status.STATUS_CODE_UNSET]


def test_a_traceparent_of_any_size_reaches_no_log(
    environment: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    environment.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracing = opened()
    with caplog.at_level(logging.DEBUG):
        tracing.finished(ended(), "0" * 10_000)
        tracing.close()
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


_NO_ANSWERS = ("/admin/", "/count_tokens", "tokenize", "{stored", "/v1/files", "/v1/batches")


def test_every_route_that_asks_a_model_has_an_operation():
    posts = {
        route.path
        for router in _ROUTES
        for route in router.routes
        if "POST" in route.methods and not any(part in route.path for part in _NO_ANSWERS)
    }
    assert posts == {*_OPERATIONS}


def test_the_documentation_names_what_a_span_holds():
    told = (ROOT / "docs" / "operations.md").read_text()
    names = {
        *_FIELDS.values(),
        *(name for one in _OPERATIONS.values() for name in one),
        "hearth.queued",
        "hearth.key_id",
    }
    assert [name for name in names if f"`{name}`" not in told] == []
