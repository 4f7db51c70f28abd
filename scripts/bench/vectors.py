"""`bench vectors`: what our way through the queue costs beside a bare loop over `AsyncLLM.encode`, in this process."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench import report
from bench.load import BenchError
from bench.servers import HEARTH, Workspace, say

from engine import SETTLED, EmbeddingRequest, Engine, load_config
from engine.stream import PoolingStream

BARE = "bare encode"
_TEXTS = 2048


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
