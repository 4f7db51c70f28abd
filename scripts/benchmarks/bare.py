"""The bare engine: a process that owns the same engine as the server and drives its `AsyncLLM` without HTTP.

It is loaded by the same code with the same settings. Templates and tokenising are done before the clock starts,
so what is measured is what vLLM alone can do for whoever embeds it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.chat_job import ChatJob, Measurement
from benchmarks.children import serve_jobs
from benchmarks.errors import BenchError
from benchmarks.open_loop import at_moments
from engine import ChatRequest, Engine, load_config

if TYPE_CHECKING:
    from collections.abc import Iterator


class BareEngine:
    """One loaded model, used below everything that Hearth adds to it."""

    def __init__(self, models: Path, weights_dir: Path) -> None:
        config = load_config(models)
        (self._model,) = config.models
        self._engine = Engine(config, weights_dir=weights_dir)
        self._backend: Any = None

    async def start(self) -> None:
        """Load the model. Raises `BenchError`."""
        await self._engine.start()
        while True:
            await self._engine.wait_for_change()
            (health,) = self._engine.health()
            if health.status == "failed":
                raise BenchError(health.error or "the model cannot be loaded")
            if health.status == "ready":
                break
        self._backend = self._engine._pool.get(self._model)  # noqa: SLF001  # below the front door on purpose

    async def stop(self) -> None:
        """End the engine process."""
        await self._engine.stop()

    async def measure(self, job: ChatJob) -> Measurement:
        """Do one run."""
        prepared = [await self._prepare(job, index) for index in range(job.requests)]
        seen = Measurement()
        cpu, start = time.process_time(), time.perf_counter()
        if job.rate:
            await at_moments(job.moments(), lambda index, moment: self._ask(*prepared[index], seen, moment))
        else:
            left = iter(prepared)
            await asyncio.gather(*(self._stream(left, seen) for _ in range(job.streams)))
        seen.wall_seconds, seen.cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        return seen

    async def _prepare(self, job: ChatJob, index: int) -> tuple[Any, Any, str]:
        request_id = f"{job.label}-{index}"
        request = self._backend._translate(  # noqa: SLF001
            ChatRequest(
                request_id=request_id,
                model=self._model,
                messages=job.messages(index),
                temperature=0,
                max_tokens=job.max_tokens,
                ignore_eos=True,
            ),
            stream=job.streamed,
        )
        serving = self._backend._serving  # noqa: SLF001
        vllms: Any = type(serving).__base__  # ours would wait for its turn in a queue that it is not in
        _, (engine_input,) = await vllms.render_chat_request(serving, request)
        return engine_input, request.to_sampling_params(job.max_tokens, serving.default_sampling_params), request_id

    async def _stream(self, prepared: Iterator[tuple[Any, Any, str]], seen: Measurement) -> None:
        for engine_input, sampling, request_id in prepared:
            await self._ask(engine_input, sampling, request_id, seen)

    async def _ask(
        self, engine_input: Any, sampling: Any, request_id: str, seen: Measurement, moment: float | None = None
    ) -> None:
        generate = self._backend._engine.generate  # noqa: SLF001
        text_times: list[float] = []
        tokens = 0
        started = now = time.perf_counter()
        async for output in generate(engine_input, sampling, request_id):
            now = time.perf_counter()
            (piece,) = output.outputs
            tokens += len(piece.token_ids)
            if piece.text:
                text_times.append(now)
        if moment is not None:
            seen.late_seconds.append(started - moment)
            started = moment
        # A plain answer comes whole, as over HTTP.
        whole = sampling.output_kind.name == "FINAL_ONLY"
        seen.add(started, [] if whole else text_times, now, tokens)


async def _serve(models: Path, weights_dir: Path) -> None:
    bare = BareEngine(models, weights_dir)
    try:
        await serve_jobs(ChatJob, bare.measure, prepare=bare.start)
    finally:
        await bare.stop()


def main() -> None:
    """Take jobs from stdin. Arguments: a models.yaml with one model, and the weights directory."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(Path(sys.argv[1]), Path(sys.argv[2])))


if __name__ == "__main__":
    main()
