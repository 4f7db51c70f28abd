"""`bench speech`: how soon a page of text is heard, alone and among many."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer
from bench import report
from bench.report import listed, numbers
from bench.servers import HEARTH, Server

_PAGE = 4096  # characters, as many as a request may have
_TEXT = "The office opens at 8:30 on Monday, 24 November 2026, and 12 people come. "


@dataclass(frozen=True, kw_only=True)
class Speech(report.Benchmark):
    """Measure the first sound of pages, alone and many at once."""

    model: report.Model = "service-voice"
    voice: Annotated[str, typer.Option(help="A voice of GET /v1/audio/voices.")] = "emma"
    streams: Annotated[Sequence[int], listed(numbers, "Texts that are asked for at once; a row each.")] = (1, 50)
    requests: Annotated[int, typer.Option(min=1, help="Pages of a row with one at a time.")] = 10
    repeats: report.Repeats = 3
    method = "closed loop, MP3; first sound is the first byte of the body"

    async def measure(self) -> report.Report:
        async with self.one_server() as (whole, server):
            await self._pages(1, server, "warm")
            rows = [
                await report.in_turns(
                    f"page, {streams} at once",
                    {HEARTH: server},
                    partial(self._pages, streams),
                    self.repeats,
                    "first_sound_p50_ms",
                )
                for streams in self.streams
            ]
        whole.tables = [("Speech", rows)]
        return whole

    async def _pages(self, streams: int, server: Server, label: object) -> report.Figures:
        body = {"model": server.model, "voice": self.voice, "input": (_TEXT * _PAGE)[:_PAGE]}
        requests = self.requests if streams == 1 else streams
        how = {"path": "/v1/audio/speech", "streams": streams, "requests": requests}
        result, used = await server.measure(server.job(f"{streams} {label}", [body], **how))
        first = [one.first_piece - one.asked for one in result.answers]
        return {
            **report.percentiles_ms("first_sound", first, 50, 95),
            **report.percentiles_ms("whole", result.latencies, 50),
            "server_cpu_ms_per_text": used.api_cpu_seconds / len(result.answers) * 1000,
        }
