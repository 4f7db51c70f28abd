"""`bench tracing`, `bench vectors`: the cost of a span per request, and of our queue for a request for vectors.

Requests are traced with a collector, and with one that is down. Vectors are made on one engine in this process, through
our queue and by a bare loop over `AsyncLLM.encode`.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any

import typer
from bench import report
from bench.load import BenchError
from bench.servers import HEARTH, Server, Workspace, running, say, start_hearth

from engine import SETTLED, EmbeddingRequest, Engine, load_config
from engine.stream import PoolingStream

OFF, TRACED, DOWN = "off", "collector", "collector down"
_TOKENS = 64
_NOWHERE = "http://127.0.0.1:9"  # the port of discard, where nothing listens
BARE = "bare encode"
_TEXTS = 2048


@dataclass(frozen=True, kw_only=True)
class Tracing(report.Benchmark):
    """Measure the CPU time of the API process per request with every request traced, and with none."""

    streams: Annotated[int, typer.Option(min=1, help="Streams at a time.")] = 8
    repeats: report.Repeats = 15
    seconds: Annotated[float, typer.Option(min=1, help="How long each run is.")] = 4.0
    method = "closed loop of streams of 64 tokens; three servers in turns; CPU of the API process, its threads included"

    async def measure(self) -> report.Report:
        with ExitStack() as stack:
            collector = stack.enter_context(_collector())
            places = {name: stack.enter_context(self.workspace()) for name in (OFF, TRACED, DOWN)}
            whole = self.begin(places[OFF])
            for name, endpoint in ((TRACED, collector), (DOWN, _NOWHERE)):
                variables = places[name].environment | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
                places[name] = replace(places[name], environment=variables)
            starts = {name: partial(start_hearth, place) for name, place in places.items()}
            async with running(places[OFF], starts) as servers:
                for server in servers.values():
                    await self._run(server, "warm")
                # The first of a row is compared with each of the others.
                runs = {name: partial(self._run, servers[name]) for name in (OFF, TRACED, DOWN)}
                row = await report.in_turns(
                    f"{self.streams} streams of {_TOKENS} tokens",
                    runs,
                    lambda run, repeat: run(str(repeat)),
                    self.repeats,
                    "api_cpu_ms_per_request",
                )
        whole.tables = [("What tracing costs: ratios are of no tracing to tracing", [row])]
        return whole

    async def _run(self, server: Server, label: str) -> report.Figures:
        job = server.chat(label, _TOKENS, streams=self.streams, seconds=self.seconds)
        result, used = await server.measure(job)
        return {
            "api_cpu_ms_per_request": 1000 * used.api_cpu_seconds / len(result.answers),
            "requests_per_second": len(result.answers) / result.wall_seconds,
            **report.percentiles_ms("first_token", result.first_texts, 50),
        }


@contextmanager
def _collector() -> Iterator[str]:
    """Receive spans and drop them, on a free port."""

    class Taking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass(frozen=True, kw_only=True)
class Vectors(report.Benchmark):
    """Measure texts per second of one request for embeddings, beside a bare loop over the engine's `encode`."""

    model: report.Model = "service-embedding"
    repeats: report.Repeats = 5
    method = "one request with all texts, tokenised each time; both on the same engine in this process, in turns"

    async def measure(self) -> report.Report:
        texts = tuple(f"number {number} of a long list of short texts about an office" for number in range(_TEXTS))
        with self.workspace() as place:
            whole = self.begin(place)
            os.environ["OMP_NUM_THREADS"] = place.environment["OMP_NUM_THREADS"]
            async with _loaded(place) as engine:
                # The only place outside the engine that speaks to vLLM: that is what is compared.
                llm: Any = engine._pool.get(place.model)._engine  # type: ignore[attr-defined]  # noqa: SLF001
                ways = {HEARTH: partial(_ours, engine, place.model, texts), BARE: partial(_bare, llm, texts)}
                for way in ways.values():
                    await way("warm")
                row = await report.in_turns(
                    f"{_TEXTS} texts", ways, lambda way, repeat: way(str(repeat)), self.repeats, "texts_per_second"
                )
        whole.tables = [("Vectors", [row])]
        return whole


@asynccontextmanager
async def _loaded(place: Workspace) -> AsyncIterator[Engine]:
    say(f"Loading {place.model}:")
    engine = Engine(load_config(place.models), weights_dir=place.weights_dir, data_dir=place.folder)
    await engine.start()
    try:
        while (health := engine.health()[0]).status not in SETTLED:
            await engine.wait_for_change()
        if health.error is not None:
            raise BenchError(f"{place.model} was not loaded: {health.error}")
        yield engine
    finally:
        await engine.stop()


async def _ours(engine: Engine, model: str, texts: tuple[str, ...], name: str) -> report.Figures:
    began, stream = time.perf_counter(), PoolingStream()
    asked = EmbeddingRequest(request_id=f"ours-{name}", model=model, inputs=texts)
    async with await engine.embed(asked, stream) as found:
        async for _ in found:
            pass
    return {"texts_per_second": len(texts) / (time.perf_counter() - began)}


async def _bare(llm: Any, texts: tuple[str, ...], name: str) -> report.Figures:
    from vllm import PoolingParams
    from vllm.inputs.engine import tokens_input

    began = time.perf_counter()
    rows = llm.renderer.tokenizer(list(texts))["input_ids"]

    async def one(at: int) -> None:
        async for _ in llm.encode(tokens_input(rows[at]), PoolingParams(task="embed"), f"bare-{name}-{at}"):
            pass

    await asyncio.gather(*(one(at) for at in range(len(rows))))
    return {"texts_per_second": len(texts) / (time.perf_counter() - began)}
