"""A program: asks one engine the same on the short way and on the long one, and prints what vLLM's core was sent.

One JSON object per line: the request's name, whether the short way is one for it, and of each way what the core was
sent, what was answered, and the text of steps that were taken at once. The last line is about the engine itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import ChatRequest, ChatStep, Engine, EngineError, GenerationError, load_config

USER = {"role": "user", "content": "Say hello."}
MODEL = "service-plus"
# What differs between any two requests.
OWN = {"request_id", "external_req_id", "arrival_time"}

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "greedy again, longer": {"temperature": 0, "max_tokens": 9},
    "no limit": {"temperature": 0, "max_tokens": None},
    "seeded": {"temperature": 1.5, "seed": 7},
    "seeded otherwise": {"temperature": 1.5, "seed": 8},
    "biased": {"temperature": 0, "logit_bias": {"300": 50.0, "17": -100.0}},
    "stopped": {"temperature": 0, "stop": ("e", "zz"), "max_tokens": 30},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": -0.5, "seed": 1},
    "nucleus": {"top_p": 0.4, "top_k": 5, "seed": 2},
    "past its end": {"temperature": 0, "ignore_eos": True, "max_tokens": 40},
    "salted": {"temperature": 0, "cache_salt": "somebody"},
    "batch": {"temperature": 0, "urgency": 1},
    "conversation": {
        "temperature": 0,
        "messages": [
            {"role": "system", "content": " Be brief.\n"},
            USER,
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "Gr\u00fc\u00dfe \U0001f30d\t <|im_end|> {{ 1 }}"},
        ],
    },
    # No short way leads here.
    "header": {"messages": [{"role": "system", "content": "x-anthropic-billing-header: a\nRest"}, USER]},
    "named": {"messages": [{**USER, "name": "Kim"}]},
    "many": {"messages": [USER] * 40, "temperature": 0},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], "temperature": 0},
    "two": {"n": 2, "seed": 5},
    "logprobs": {"logprobs": True, "temperature": 0},
    "format": {"response_format": {"type": "json_object"}, "temperature": 0},
    "continued": {"messages": [USER, {"role": "assistant", "content": "Hel"}], "continue_answer": True},
}


async def main() -> None:
    """Load the demo model, ask, print."""
    config = load_config(Path("models.yaml"))
    engine = Engine(replace(config, models={MODEL: config.models[MODEL]}), weights_dir=Path("nowhere"))
    await engine.start()
    while engine.health()[0].status != "ready":
        await engine.wait_for_change()
    try:
        backend: Any = engine._pool.get(MODEL)
        sent = record(backend._engine.engine_core)
        short_way = backend._plain
        for name, fields in REQUESTS.items():
            asked = request_of(name, fields)
            line: dict[str, Any] = {"name": name, "taken": short_way.prompt(asked, asked.max_tokens) is not None}
            for way, plain in (("short", short_way), ("long", None)):
                backend._plain = plain
                line[way] = await answers(engine, asked, sent)
            sys.stdout.write(json.dumps(line) + "\n")
        backend._plain = short_way
        line = {
            "outputs": type(backend._engine.output_processor).__name__,
            "left": await left(engine, backend),
            "refused": await refused(engine, backend),
        }
        sys.stdout.write(json.dumps({"name": "engine", **line, "lost": await lost(engine, backend)}) + "\n")
    finally:
        await engine.stop()


def record(core: Any) -> list[Any]:
    """Note what is sent to the core, and send it."""
    sent: list[Any] = []
    send = core.add_request_async

    async def noting(request: Any) -> None:
        sent.append(request)
        await send(request)

    core.add_request_async = noting
    return sent


def request_of(name: str, fields: dict[str, Any]) -> ChatRequest:
    """Make one of the table."""
    usual = {"request_id": name.replace(" ", "-"), "model": MODEL, "messages": [USER], "max_tokens": 6}
    return ChatRequest(**usual | fields)


async def answers(engine: Engine, request: ChatRequest, sent: list[Any]) -> dict[str, Any]:
    """Ask plain and streamed; what random numbers without a seed say is left out."""
    sent.clear()
    at_once: list[str] = []
    whole = await engine.chat(request)
    steps = [step async for step in engine.chat_stream(replace(request, request_id=f"{request.request_id}-s"))]
    taken = await taken_at_once(engine, replace(request, request_id=f"{request.request_id}-t"), at_once)
    (*_, last) = (delta for step in steps for delta in step.deltas)
    said: list[Any] = [[usage.prompt_tokens, usage.reasoning_tokens] for usage in (steps[-1].usage, whole.usage)]
    if request.seed is not None or request.temperature == 0:
        said += [choice.content for choice in whole.choices]
        said += [steps[-1].usage.completion_tokens, whole.usage.completion_tokens]
        said += ["".join(delta.content for step in steps for delta in step.deltas if delta.index == 0), *taken]
        said += [whole.choices[0].finish_reason, whole.choices[0].stop_text, last.finish_reason, last.stop_text]
    return {"core": [known(one) for one in sent], "said": said, "at_once": "".join(at_once)}


async def taken_at_once(engine: Engine, request: ChatRequest, at_once: list[str]) -> list[Any]:
    """Ask for a stream whose steps are taken when they are made, where the way has that, and note what was."""
    all_steps: list[ChatStep] = []

    def take(step: ChatStep) -> bool:
        all_steps.append(step)
        at_once.append(step.deltas[0].content)
        return True

    async for step in engine.chat_stream(replace(request, on_step=take)):
        all_steps.append(step)  # noqa: PERF401  # in the order in which they come
    text = "".join(delta.content for step in all_steps for delta in step.deltas if delta.index == 0)
    return [text, all_steps[-1].usage.completion_tokens]


async def left(engine: Engine, backend: Any) -> list[int]:
    """Leave a stream behind its first step, when more have been made. Returns its tokens, those made, those charged."""
    charged: list[int] = []
    leave = backend.admission._leave

    def noting(claim: Any, answer_tokens: int, seconds: float) -> None:
        charged.append(answer_tokens)
        leave(claim, answer_tokens, seconds)

    backend.admission._leave = noting
    stream = engine.chat_stream(request_of("left", {"max_tokens": 500, "ignore_eos": True}))
    fetched = (await anext(stream)).usage.completion_tokens
    (state,) = backend._engine.output_processor.request_states.values()
    made = 0
    async with asyncio.timeout(60):
        while made < fetched + 5:
            await asyncio.sleep(0.01)
            made = state.detokenizer.num_output_tokens()
    await stream.aclose()
    return [fetched, made, *charged]


async def refused(engine: Engine, backend: Any) -> list[Any]:
    """Take steps with what raises an error of ours. Returns its kind, and how many requests vLLM still knows then."""

    def fails(_: ChatStep) -> bool:
        raise GenerationError("for a test")

    became = ""
    try:
        asked = request_of("refused", {"max_tokens": 500, "ignore_eos": True})
        async for _ in engine.chat_stream(replace(asked, on_step=fails)):
            pass
    except EngineError as error:
        became = type(error).__name__
    return [became, len(backend._engine.output_processor.request_states)]


async def lost(engine: Engine, backend: Any) -> list[str]:
    """Have vLLM's loop over outputs fail once. Returns what became of a request, and of one when all is well again."""

    def fails(*_: Any) -> None:
        raise RuntimeError("for a test")

    became = ""
    backend._engine.output_processor.process_outputs = fails
    try:
        await engine.chat(request_of("lost", {}))
    except EngineError as error:
        became = type(error).__name__
    async with asyncio.timeout(120):
        await backend.died.wait()
        while engine.health()[0].status == "ready":
            await engine.wait_for_change()
        while engine.health()[0].status != "ready":
            await engine.wait_for_change()
    return [became, (await engine.chat(request_of("found", {}))).choices[0].finish_reason]


def known(request: Any) -> dict[str, Any]:
    """All fields that say what is to be done."""
    parameters = request.sampling_params
    fields = {name: repr(getattr(request, name)) for name in request.__struct_fields__ if name not in OWN}
    return fields | {name: repr(getattr(parameters, name)) for name in parameters.__struct_fields__}


if __name__ == "__main__":
    asyncio.run(main())
    sys.exit(0)
