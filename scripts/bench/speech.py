"""`bench speech`: how soon a page of text is heard, what a second of sound costs, and how soon after a kill."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from bench import report
from bench.load import BenchError
from bench.report import listed, numbers
from bench.servers import HEARTH, Server, family
from bench.start import first_answer

from engine.pool.model_state import STEADY_SECONDS

_PATH = "/v1/audio/speech"
_PAGE = 4096  # characters, as many as a request may have
_TEXT = "The office opens at 8:30 on Monday, 24 November 2026, and 12 people come. "
_WORKER = "hearth-worker"
_SECONDS_OF_SOUND = "hearth_audio_seconds_total"


@dataclass(frozen=True, kw_only=True)
class Speech(report.Benchmark):
    """Measure the first sound of pages and of sentences, alone and many at once, and after kill -9 of the worker."""

    model: report.Model = "service-voice"
    voice: Annotated[str, typer.Option(help="A voice of GET /v1/audio/voices.")] = "emma"
    streams: Annotated[Sequence[int], listed(numbers, "Texts that are asked for at once; a row each.")] = (1, 50)
    requests: Annotated[int, typer.Option(min=1, help="Pages of a row with one at a time.")] = 10
    kills: Annotated[int, typer.Option(min=0, help="How often its worker is killed.")] = 3
    repeats: report.Repeats = 3
    method = "closed loop, MP3; first sound is the first byte of the body"

    async def measure(self) -> report.Report:
        async with self.one_server() as (whole, server):
            await self._measure(server, "warm", _TEXT, 1)
            page = (_TEXT * _PAGE)[:_PAGE]
            rows = []
            for streams in self.streams:
                for kind, text in (("sentence", _TEXT), ("page", page)):
                    run = partial(self._turn, kind, text, streams)
                    case = f"{kind}, {streams} at once"
                    rows.append(await report.in_turns(case, {HEARTH: server}, run, self.repeats, "first_sound_p50_ms"))
            whole.tables = [("Speech", rows)]
            if self.kills:
                back = await report.in_turns("kill", {HEARTH: server}, self._kill, self.kills, "spoken_again_seconds")
                whole.tables.append(("After kill -9 of the worker", [back]))
        return whole

    async def _turn(self, kind: str, text: str, streams: int, server: Server, repeat: int) -> report.Figures:
        return await self._measure(server, f"{kind} {streams} {repeat}", text, streams)

    async def _measure(self, server: Server, label: str, text: str, streams: int) -> report.Figures:
        requests = self.requests if streams == 1 else streams
        before = await server.counted(_SECONDS_OF_SOUND)
        result, used = await server.measure(
            server.job(label, [self._body(server, text)], path=_PATH, streams=streams, requests=requests)
        )
        sound = (await server.counted(_SECONDS_OF_SOUND))[0] - before[0]
        return {
            **report.percentiles_ms(
                "first_sound", [one.first_piece - one.asked for one in result.answers], 50, 95, 100
            ),
            **report.percentiles_ms("whole", result.latencies, 50),
            "sound_seconds_per_text": sound / len(result.answers),
            "real_time_factor": used.engine_cpu_seconds / sound,
            "server_cpu_ms_per_text": used.api_cpu_seconds / len(result.answers) * 1000,
            "texts": len(result.answers),
        }

    async def _kill(self, server: Server, repeat: int) -> report.Figures:
        workers = [process for process in family(server.pid)[1] if process.name() == _WORKER]
        if len(workers) != 1:
            raise BenchError(f"The server has {len(workers)} workers, not one: nothing is killed.")
        began = time.perf_counter()
        os.kill(workers[0].pid, signal.SIGKILL)
        body = self._body(server, f"Back again, {repeat}.")
        refused = await first_answer(server, f"kill {repeat}", began=began, path=_PATH, body=body)
        spoken = time.perf_counter() - began
        await asyncio.sleep(STEADY_SECONDS + 1)  # a model that dies sooner is loaded with a back-off
        return {"spoken_again_seconds": spoken, "refused_ms": refused}

    def _body(self, server: Server, text: str) -> dict[str, Any]:
        return {"model": server.model, "voice": self.voice, "input": text}
