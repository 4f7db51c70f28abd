"""A program: what our way through the queue costs beside a bare loop over `AsyncLLM.encode`. Prints inputs/s as JSON."""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from pooling_parts import EMBEDDING, EMBEDDING_ENTRY
from small_models import models_yaml
from vllm import PoolingParams
from vllm.inputs.engine import tokens_input

from engine import EmbeddingRequest, Engine, load_config
from engine.stream import PoolingStream

TEXTS = tuple(f"number {number} of a long list of short texts about an office" for number in range(2048))
ROUNDS = 5


async def ours(engine: Engine, name: str) -> float:
    began, stream = time.monotonic(), PoolingStream()
    await engine.embed(EmbeddingRequest(request_id=name, model=EMBEDDING, inputs=TEXTS), stream)
    async for _ in stream:
        pass
    return len(TEXTS) / (time.monotonic() - began)


async def bare(llm: Any, name: str) -> float:
    began = time.monotonic()
    rows = llm.renderer.tokenizer(list(TEXTS))["input_ids"]

    async def one(at: int) -> None:
        async for _ in llm.encode(tokens_input(rows[at]), PoolingParams(task="embed"), f"{name}-{at}"):
            pass

    await asyncio.gather(*(one(at) for at in range(len(rows))))
    return len(TEXTS) / (time.monotonic() - began)


def written(folder: Path) -> Path:
    path = folder / "models.yaml"
    path.write_text(models_yaml(EMBEDDING_ENTRY))
    return path


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(load_config(written(Path(folder))), weights_dir=Path(folder))
        await engine.start()
        while engine.health()[0].status not in {"ready", "failed"}:
            await engine.wait_for_change()
        try:
            llm = cast("Any", engine._pool.get(EMBEDDING))._engine
            found: dict[str, list[float]] = {"ours": [], "bare": []}
            for turn in range(ROUNDS):
                found["bare"].append(await bare(llm, f"bare-{turn}"))
                found["ours"].append(await ours(engine, f"ours-{turn}"))
            sys.stdout.write(json.dumps({name: max(rates) for name, rates in found.items()}) + "\n")
        finally:
            await engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
