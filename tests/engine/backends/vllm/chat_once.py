"""A program: loads the demo chat model, asks it a promised prompt plain, as a stream and with a schema, prints JSON."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

from engine import ChatRequest, Engine, load_config
from engine.stream import TokenStream, fold

MODEL = "service-plus"
# One answer only: what a small model says otherwise hangs on last digits, which its kernels round differently.
SCHEMA = {
    "type": "object",
    "properties": {"greeting": {"const": "hello"}},
    "required": ["greeting"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "greeting", "schema": SCHEMA}}


async def main() -> None:
    """Load, ask, end."""
    config = load_config(Path("models.yaml"))
    engine = Engine(
        replace(config, models={MODEL: config.models[MODEL]}), weights_dir=Path("nowhere"), vllm_metrics=True
    )
    await engine.start()
    while engine.health()[0].status not in {"ready", "failed"}:
        await engine.wait_for_change()
    try:
        asked = ChatRequest(
            request_id="once",
            model=MODEL,
            messages=[{"role": "user", "content": "Say hello."}],
            temperature=0,
            max_tokens=6,
        )
        whole = await fold(await engine.chat(replace(asked, whole=True), TokenStream()))
        streamed = [step async for step in await engine.chat(replace(asked, request_id="stream"), TokenStream())]
        with_schema = replace(asked, request_id="schema", response_format=FORMAT, max_tokens=40)
        schema = await fold(await engine.chat(with_schema, TokenStream()))
        said = {
            "plain": whole.choices[0].content,
            "streamed": "".join(delta.content for step in streamed for delta in step.deltas),
            "schema": json.loads(schema.choices[0].content),
        }
        sys.stdout.write(json.dumps(said) + "\n")
    finally:
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
