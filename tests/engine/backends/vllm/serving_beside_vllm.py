"""A program: asks one engine the same through our serving and through vLLM's own, and prints what its core was sent.

One JSON object per line: the request's name, whether its prompt is rendered here, and of each way what the core was
sent and what was answered. The last line is about streams that end early.
"""

import asyncio
import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import ChatRequest, ChatStep, Engine, EngineError, GenerationError, load_config
from engine.stream import TokenStream, fold

USER = {"role": "user", "content": "Say hello."}
MODEL = "service-plus"
# What differs between any two requests; the priority is the admission's, which vLLM's own way does not pass.
OWN = {"request_id", "external_req_id", "arrival_time", "priority"}

# Fields that both call the same.
SAME = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "n", "seed", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "ignore_eos", "logprobs", "top_logprobs", "cache_salt", "response_format"),
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort"),
)
CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at": "the sky"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I have to look."}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "Rain."}

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "greedy again, longer": {"temperature": 0.0, "max_tokens": 9},
    "no limit": {"temperature": 0.0, "max_tokens": None},
    "seeded": {"temperature": 1.5, "seed": 7},
    "seeded otherwise": {"temperature": 1.5, "seed": 8},
    "biased": {"temperature": 0.0, "logit_bias": {"300": 50.0, "17": -100.0}},
    "stopped": {"temperature": 0.0, "stop": ("e", "zz"), "max_tokens": 30},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": -0.5, "seed": 1},
    "nucleus": {"top_p": 0.4, "top_k": 5, "seed": 2},
    "past its end": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40},
    "salted": {"temperature": 0.0, "cache_salt": "somebody"},
    "batch": {"temperature": 0.0, "urgency": 1},
    "conversation": {
        "temperature": 0.0,
        "messages": [
            {"role": "system", "content": " Be brief.\n"},
            USER,
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "Gr\u00fc\u00dfe \U0001f30d\t <|im_end|> {{ 1 }}"},
        ],
    },
    # vLLM renders these.
    "header": {"messages": [{"role": "system", "content": "x-anthropic-billing-header: a\nRest"}, USER]},
    "named": {"messages": [{**USER, "name": "Kim"}]},
    "many": {"messages": [USER] * 40, "temperature": 0.0},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], "temperature": 0.0},
    "two": {"n": 2, "seed": 5},
    "logprobs": {"logprobs": True, "temperature": 0.0},
    "format": {"response_format": {"type": "json_object"}, "temperature": 0.0},
    "called": {"messages": [USER, CALLED, RESULT], "temperature": 0.0},
    "told later": {"messages": [USER, {"role": "developer", "content": "In French."}, USER], "temperature": 0.0},
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
        for name, fields in REQUESTS.items():
            asked = request_of(name, fields)
            taken = backend._serving.text_tokens(asked) is not None
            line = {"name": name, "taken": taken, "ours": await ours(engine, asked, sent)}
            theirs = await vllms(backend, request_of(name, fields), sent)
            sys.stdout.write(json.dumps(line | {"vllm": theirs}) + "\n")
        early = {"left": await left(engine, backend), "refused": await refused(engine, backend)}
        sys.stdout.write(json.dumps({"name": "early", **early, "lost": await lost(engine, backend)}) + "\n")
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
    return ChatRequest(**copy.deepcopy(usual | fields))  # vLLM reads the arguments of calls in place


async def ours(engine: Engine, request: ChatRequest, sent: list[Any]) -> dict[str, Any]:
    """Ask for the whole answer, for a stream, and for one whose steps are taken at the moment they are made."""
    sent.clear()
    whole = await fold(await engine.chat(replace(request, whole=True), TokenStream()))
    streamed = await fold(await engine.chat(replace(request, request_id=f"{request.request_id}-s"), TokenStream()))
    stream, steps = TokenStream(), list[ChatStep]()
    await engine.chat(replace(request, request_id=f"{request.request_id}-t"), stream)
    stream.sink = lambda step: steps.append(step) is None
    steps += [step async for step in stream]
    text = "".join(delta.content for step in steps for delta in step.deltas if delta.index == 0)
    core = [known(one) for one in sent]
    if request.seed is None and request.temperature != 0:  # random: nothing to compare
        return {"core": core, "said": []}
    assert [choice.content for choice in streamed.choices] == [choice.content for choice in whole.choices]
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    assert text == whole.choices[0].content
    reasons = [choice.finish_reason for choice in whole.choices]
    return {
        "core": core,
        "said": [[choice.content for choice in whole.choices], reasons, whole.usage.completion_tokens],
    }


async def vllms(backend: Any, request: ChatRequest, sent: list[Any]) -> dict[str, Any]:
    """Ask vLLM's serving classes for the same, in the words of a client of vLLM's server."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    sent.clear()
    serving, said = backend._serving, []
    for name, stream in (("v", backend._serving.needs_parser(request) or request.logprobs), ("w", True), ("x", True)):
        asked = replace(request, request_id=f"{request.request_id}-{name}")
        theirs = ChatCompletionRequest.model_validate(wire(asked, stream=bool(stream)))
        await serving.grammars.bind_format(theirs, "")
        made = await serving.vllm.create_chat_completion(theirs)
        if hasattr(made, "choices"):
            reasons = [choice.finish_reason for choice in made.choices]
            said = [[choice.message.content for choice in made.choices], reasons, made.usage.completion_tokens]
        else:
            async for _ in made:
                pass
    random = request.seed is None and request.temperature != 0
    return {"core": [known(one) for one in sent], "said": [] if random else said}


def wire(asked: ChatRequest, *, stream: bool) -> dict[str, Any]:
    """The body that asks vLLM's server for the same."""
    body: dict[str, Any] = {name: getattr(asked, name) for name in SAME if getattr(asked, name) is not None}
    if asked.continue_answer:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if not asked.logprobs:
        body.pop("top_logprobs", None)
    messages = json.loads(json.dumps(asked.messages))
    body |= {"messages": messages, "stop": list(asked.stop), "max_completion_tokens": asked.max_tokens}
    return body | {"stream": stream, "request_id": asked.request_id}


async def left(engine: Engine, backend: Any) -> list[int]:
    """Leave a stream behind its first step, when more have been made. Returns its tokens, those made, those charged."""
    charged: list[int] = []
    leave = backend.admission._leave

    def noting(claim: Any, answer_tokens: int, seconds: float) -> None:
        charged.append(answer_tokens)
        leave(claim, answer_tokens, seconds)

    backend.admission._leave = noting
    stream = await engine.chat(request_of("left", {"max_tokens": 20_000, "ignore_eos": True}), TokenStream())
    fetched = (await anext(stream)).usage.completion_tokens
    async with asyncio.timeout(60):
        while stream.completion_tokens < fetched + 5:  # noqa: ASYNC110  # the engine makes them
            await asyncio.sleep(0.01)  # the engine makes them
    made = stream.completion_tokens
    stream.close()
    return [fetched, made, *charged]


async def refused(engine: Engine, backend: Any) -> list[Any]:
    """Take steps with what raises an error of ours. Returns its kind, and how many requests vLLM still knows then."""

    def fails(_: ChatStep) -> bool:
        raise GenerationError("for a test")

    stream = TokenStream()
    stream.sink = fails
    became = ""
    try:
        await fold(await engine.chat(request_of("refused", {"max_tokens": 500, "ignore_eos": True}), stream))
    except EngineError as error:
        became = type(error).__name__
    await asyncio.sleep(0)  # the abort is a task
    return [became, len(backend._engine.output_processor.request_states)]


async def lost(engine: Engine, backend: Any) -> list[str]:
    """Have vLLM's loop over outputs fail once. Returns what became of a request, and of one when all is well again."""

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("for a test")

    became = ""
    backend._engine.output_processor.process_outputs = fails
    try:
        await fold(await engine.chat(request_of("lost", {}), TokenStream()))
    except EngineError as error:
        became = type(error).__name__
    async with asyncio.timeout(120):
        await backend.died.wait()
        while engine.health()[0].status == "ready":
            await engine.wait_for_change()
        while engine.health()[0].status != "ready":
            await engine.wait_for_change()
    found = await fold(await engine.chat(request_of("found", {}), TokenStream()))
    return [became, found.choices[0].finish_reason]


def known(request: Any) -> dict[str, Any]:
    """All fields that say what is to be done."""
    parameters = request.sampling_params
    fields = {name: repr(getattr(request, name)) for name in request.__struct_fields__ if name not in OWN}
    return fields | {name: repr(getattr(parameters, name)) for name in parameters.__struct_fields__}


if __name__ == "__main__":
    asyncio.run(main())
    sys.exit(0)
