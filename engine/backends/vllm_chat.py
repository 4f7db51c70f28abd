"""A chat model on vLLM: one `AsyncLLM`, whose core is a child process, and vLLM's serving classes on top.

Owns the life of that engine. What an answer looks like is decided in vllm_serving.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.backends import vllm_launch
from engine.errors import LoadError
from engine.types import ChatRequest
from engine.weights import check_folder

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from engine.config import ModelSpec
    from engine.types import ChatResult, ChatStep

# A first prompt of fewer tokens ends in SIGILL on AMX machines; this one has more than 24 in any tokenizer.
_WARM_UP = "one two three four five six seven eight nine ten " * 4
_DEMO_KV_CACHE_GIB = 0.0625
_CPU_KV_CACHE_GIB = 1.0


@dataclass(frozen=True, slots=True)
class Launch:
    """What `VllmChat` needs to start: the model's entry, its folder, and where blocking starts run."""

    spec: ModelSpec
    weights: Path
    demo: bool
    starter: vllm_launch.StarterThread
    report: Callable[[str, float], None]


class VllmChat:
    """One loaded chat model. Made by `load`, thrown away whole: a restart makes a new one."""

    def __init__(self, engine: Any, serving: Any, launch: Launch) -> None:
        self._engine = engine
        self._serving = serving
        self._spec = launch.spec
        self._starter = launch.starter
        self.context_length: int = engine.model_config.max_model_len
        self.died = asyncio.Event()
        self._sentinels: list[int] = []
        self._watch_processes()

    @classmethod
    async def load(cls, launch: Launch) -> VllmChat:
        """Start the engine, check what models.yaml claims, and answer one warm-up prompt.

        Raises `LoadError` when the model can never be loaded as configured; other exceptions may pass with time.
        """
        await asyncio.to_thread(check_folder, launch.weights)
        engine = await launch.starter.run(lambda: _start_engine(launch))
        try:
            engine._run_output_handler()  # noqa: SLF001  # built off the loop; nothing public starts it
            await engine.reset_mm_cache()
            launch.report("checking the chat template", 0.8)
            serving = await launch.starter.run(lambda: _build_serving(engine, launch.spec))
            model = cls(engine, serving, launch)
            await model._check_capabilities()
            launch.report("answering a warm-up prompt", 0.9)
            await model._warm_up()
        except BaseException:
            _kill_processes(engine)
            await launch.starter.run(lambda: engine.shutdown(timeout=0))
            raise
        return model

    async def stream(self, request: ChatRequest) -> AsyncGenerator[ChatStep, None]:
        """Yield the answer step by step; closing the generator aborts it. Raises `EngineError`s."""
        from engine.backends.vllm_errors import translated_errors

        with translated_errors(self.context_length, _grammar_field(request)):
            steps = await self._serving.create_chat_completion(self._translate(request, stream=True))
            try:
                async for step in steps:
                    yield step
            finally:
                await steps.aclose()

    async def complete(self, request: ChatRequest) -> ChatResult:
        """Return the whole answer; cancelling aborts it. Raises `EngineError`s."""
        from engine.backends.vllm_errors import translated_errors
        from engine.chat_fold import fold

        plain = self._translate(request, stream=False)
        if self._serving.needs_parser(plain) or request.logprobs:
            # Streamed and plain answers agree because they are made by the same parser, step by step; and the
            # logprobs of a long answer, put together at once, would hold up everybody for seconds.
            async with contextlib.aclosing(self.stream(request)) as steps:
                return await fold(steps)
        with translated_errors(self.context_length, _grammar_field(request)):
            result: ChatResult = await self._serving.create_chat_completion(plain)
            return result

    async def shutdown(self) -> None:
        """End the engine process; whatever still runs fails. Takes up to 3 s."""
        self._unwatch_processes()
        await self._starter.run(lambda: self._engine.shutdown(timeout=5))

    def terminate(self) -> None:
        """End the engine process at once."""
        self._unwatch_processes()
        _kill_processes(self._engine)
        self._engine.shutdown(timeout=0)  # its sockets; the processes are gone

    def _translate(self, request: ChatRequest, *, stream: bool) -> Any:
        from engine.backends.vllm_request import translate

        return translate(
            request,
            stream=stream,
            context_length=self.context_length,
            max_output_tokens=self._spec.engine.max_output_tokens,
        )

    def _watch_processes(self) -> None:
        """Set `died` the moment the kernel says that a process of the engine is gone."""
        loop = asyncio.get_running_loop()
        for process in _processes(self._engine):
            sentinel = os.dup(process.sentinel)  # vLLM closes its own while we still watch
            self._sentinels.append(sentinel)
            loop.add_reader(sentinel, self._process_gone)

    def _process_gone(self) -> None:
        """End whatever waits for the engine now. vLLM's own monitor may find its client already shut down."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self._unwatch_processes()
        self._engine.engine_core.resources.engine_dead = True  # refuses requests that are being tokenised
        self._engine.output_processor.propagate_error(EngineDeadError())
        self.died.set()

    def _unwatch_processes(self) -> None:
        loop = asyncio.get_running_loop()
        for sentinel in self._sentinels:
            loop.remove_reader(sentinel)
            os.close(sentinel)
        self._sentinels.clear()

    async def _check_capabilities(self) -> None:
        if "function_calling" not in self._spec.capabilities:
            return
        tool = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
        plain = ChatRequest(request_id="probe", model=self._spec.id, messages=[{"role": "user", "content": "?"}])
        offered = ChatRequest(request_id="probe", model=self._spec.id, messages=plain.messages, tools=[tool])
        lengths = [await self._prompt_tokens(request) for request in (plain, offered)]
        if lengths[0] == lengths[1]:
            raise LoadError(
                f"{self._spec.id}: models.yaml claims `function_calling`, but the model's chat template takes no "
                "tools. Pick one: 1. take `function_calling` out of its capabilities; 2. use a model that was "
                "trained for tools."
            )

    async def _prompt_tokens(self, request: ChatRequest) -> int:
        _, inputs = await self._serving.render_chat_request(self._translate(request, stream=False))
        return sum(len(item["prompt_token_ids"]) for item in inputs)

    async def _warm_up(self) -> None:
        await self.complete(
            ChatRequest(
                request_id="warm-up",
                model=self._spec.id,
                messages=[{"role": "user", "content": _WARM_UP}],
                temperature=0,
                max_tokens=8,
                ignore_eos=True,
                logprobs=True,  # compiled on first use on a GPU
            )
        )


def _grammar_field(request: ChatRequest) -> str | None:
    return "response_format" if request.response_format else "tools" if request.tools else None


def _start_engine(launch: Launch) -> Any:
    """Blocking, 4 to 40 s. Returns the `AsyncLLM` when its core is ready."""
    launch.report("importing vLLM", 0.1)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    with vllm_launch.CONFIG_LOCK:
        launch.report("reading the model's configuration", 0.4)
        arguments = AsyncEngineArgs(**_engine_arguments(launch))
        config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        vllm_launch.start_engines_our_way()
    launch.report("starting the engine process", 0.5)
    return AsyncLLM.from_vllm_config(
        vllm_config=config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=False,
        disable_log_stats=True,
    )


def _engine_arguments(launch: Launch) -> dict[str, Any]:
    spec, engine = launch.spec, launch.spec.engine
    arguments: dict[str, Any] = {
        "model": str(launch.weights),
        "served_model_name": [spec.id],
        "load_format": "safetensors",
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        "dtype": engine.dtype,
        "max_model_len": engine.context_length,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_queued_reqs": engine.max_queued_requests,
        "max_logprobs": 20,
        "scheduling_policy": "priority",
        "tensor_parallel_size": engine.tensor_parallel_size,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "enforce_eager": bool(engine.enforce_eager),
    }
    cache_gib = engine.kv_cache_gib
    if vllm_launch.runs_on_cpu():
        # By class path: the short name "uni" is turned into a process of its own on a CPU.
        arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        if engine.enforce_eager is None:
            arguments["enforce_eager"] = True
        cache_gib = cache_gib or (_DEMO_KV_CACHE_GIB if launch.demo else _CPU_KV_CACHE_GIB)
    if cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(cache_gib * 2**30)
    return arguments


def _build_serving(engine: Any, spec: ModelSpec) -> Any:
    from engine.backends.vllm_parsers import parsers_for
    from engine.backends.vllm_serving import build_chat

    template = getattr(engine.renderer.tokenizer, "chat_template", None)
    tool_parser, reasoning_parser = parsers_for(engine.model_config.hf_config.model_type, str(template), spec)
    try:
        return build_chat(engine, name=spec.id, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise LoadError(
            f"{spec.id}: the tool parser {tool_parser!r} or the reasoning parser {reasoning_parser!r} does not fit "
            "this model. Set `tool_parser` and `reasoning_parser` of its `engine` section in models.yaml to the "
            "ones of its family."
        ) from error


def _processes(engine: Any) -> list[Any]:
    manager = engine.engine_core.resources.engine_manager
    return [] if manager is None else list(manager.processes)


def _kill_processes(engine: Any) -> None:
    for process in _processes(engine):
        with contextlib.suppress(ValueError):  # already closed
            process.kill()
