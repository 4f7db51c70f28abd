"""`bench tracing`: what a span per request costs the API process, with a collector and with one that is down."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated

import typer
from bench import report
from bench.servers import Server, running, start_hearth

OFF, TRACED, DOWN = "off", "collector", "collector down"
_TOKENS = 64
_NOWHERE = "http://127.0.0.1:9"  # the port of discard, where nothing listens


@dataclass(frozen=True, kw_only=True)
class Tracing(report.Benchmark):
    """Measure the processor time of the API process per request with every request traced, and with none."""

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
    """Take spans and forget them, on a free port."""

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
