"""A chat model on vLLM: one `AsyncLLM`, whose core is a child process. Owns its life, from the load to its end.

How it is started is in start.py, and how a request is answered in serving.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from engine.admission import Admission
from engine.backends.vllm import compat
from engine.backends.vllm.processes import runs_on_cpu
from engine.backends.vllm.start import Launch, build_serving, capacity_of, fall_asleep, start_engine, wake_up
from engine.errors import LoadError
from engine.media.images import image_places
from engine.process.watchdog import Guard, Patience
from engine.stream import TokenStream, fold
from engine.types import ChatRequest, TextRequest
from engine.weights.safety import check_folder

if TYPE_CHECKING:
    from engine.backends.vllm.serving import Prompt


_log = logging.getLogger("hearth.vllm")

# vLLM closes its sockets on the event loop, sometimes by way of a thread of its own.
_CLOSING_SECONDS = 30.0
_POLL_SECONDS = 0.02
# Its thread that watches the processes checks every second whether it is to end, and their descriptors meanwhile.
_WATCHED_SECONDS = 2.0
# A first prompt of fewer tokens ends in SIGILL on AMX machines; this one has more than 24 in any tokenizer.
_WARM_UP = "one two three four five six seven eight nine ten " * 4


class VllmChat:
    """One loaded chat model. Created by `load`; a restart creates a new one."""

    def __init__(self, engine: Any, serving: Any, launch: Launch, watch: EngineWatch) -> None:
        self._engine = engine
        self._serving = serving
        self._spec = launch.spec
        self._starter = launch.starter
        self._pictures = launch.pictures
        self._sleep = launch.sleep
        self.admission = Admission(capacity_of(engine, launch.spec))
        self.metrics = launch.metrics
        self.compiled = launch.compiled
        self.context_length: int = engine.model_config.max_model_len
        self.died = asyncio.Event()
        self._watch = watch
        watch.on_exit(self._on_exit)

    @classmethod
    async def load(cls, launch: Launch) -> VllmChat:
        """Start the engine, check what models.yaml claims, and answer one warm-up prompt.

        Raises `LoadError` when the model can never be loaded as configured; other exceptions may pass with time.
        """
        await asyncio.to_thread(check_folder, launch.weights)
        patience = Patience.of(launch.spec.engine.stall_seconds, on_cpu=runs_on_cpu())
        watch = EngineWatch(launch.spec.id, patience)
        async with contextlib.AsyncExitStack() as undo:
            undo.callback(watch.end)
            engine = await launch.starter.run(lambda: start_engine(launch), watch.started)
            undo.push_async_callback(launch.starter.run, lambda: end_engine(engine, 0))
            undo.callback(watch.kill)
            if not watch.pids():  # vLLM started them itself (`start_own_processes`)
                for process in processes_of(engine):
                    watch.started(process)
            engine._run_output_handler()  # noqa: SLF001  # built off the loop; nothing public starts it
            watch.kill_after(engine.output_handler)
            watch.expect(engine.is_sleeping)  # a question that costs nothing
            await engine.reset_mm_cache()
            launch.report("checking the chat template", 0.8)
            serving = await launch.starter.run(lambda: build_serving(engine, launch))
            model = cls(engine, serving, launch, watch)
            await model._check_capabilities()
            await serving.prepare()
            launch.report("answering a warm-up prompt", 0.9)
            await model._warm_up()
            undo.pop_all()
        return model

    async def chat(self, request: ChatRequest, stream: TokenStream) -> None:
        """Wait for its turn and give it to the engine; the answer's steps go into `stream`. Raises `EngineError`s."""
        from engine.backends.vllm.errors import TranslatedErrors

        if self._serving.needs_parser(request) or request.logprobs or image_places(request):
            # Streamed and whole answers agree because both are parsed step by step; and the logprobs of a long answer,
            # put together at once, would block the event loop for seconds.
            request = replace(request, whole=False)
        errors = TranslatedErrors(self.context_length, _grammar_field(request))
        ticket = self.admission.ticket(request, request.n, stream)
        try:
            with errors:
                prompt = self._serving.render_text(request, self._most_tokens(request)) or await self._rendered(request)
                longest = prompt.max_tokens or self.context_length - len(prompt.token_ids)
                await ticket.enter(len(prompt.token_ids), longest * request.n)
                await self._serving.submit(prompt, stream, errors.translated)
        except BaseException as error:
            ticket.leave(error)
            raise
        stream.on_end(ticket.leave)

    async def text(self, request: TextRequest, stream: TokenStream) -> None:
        """Go on with plain texts, like `chat`."""
        from engine.backends.vllm.completions import TextAnswers
        from engine.backends.vllm.errors import TranslatedErrors

        errors = TranslatedErrors(self.context_length, None, "prompt")
        sequences = len(request.prompts) * request.n
        ticket = self.admission.ticket(request, sequences, stream)
        try:
            with errors:
                answers = await TextAnswers.of(self._serving, request, self._most_tokens(request))
                await ticket.enter(answers.prompt_tokens, answers.longest_tokens)
                await answers.submit(stream, errors.translated)
        except BaseException as error:
            ticket.leave(error)
            raise
        stream.on_end(ticket.leave)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return how many tokens the prompt has; one that leaves no room for an answer is refused as ever."""
        from engine.backends.vllm.errors import TranslatedErrors

        shortest = replace(request, max_tokens=1)
        with TranslatedErrors(self.context_length, _grammar_field(request)):
            async with self._pictures.decoded(shortest, most=self._spec.engine.max_images) as seen:
                tokens: int = await self._serving.count_prompt(self._translate(seen, stream=False))
                return tokens

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes."""
        return tuple(self._watch.pids())

    async def idle(self) -> None:
        """Return when no request runs or waits."""
        await self.admission.idle()

    async def sleep(self) -> bool:
        """Free its GPUs, if it was started so that it can. False: it did not, and has to be ended."""
        return self._sleep is not None and await fall_asleep(self._engine, self._sleep, self._spec.id)

    async def wake(self) -> None:
        """Take its GPUs again."""
        if self._sleep is not None:
            await wake_up(self._engine, self._sleep)

    async def shutdown(self) -> None:
        """End the engine process; whatever still runs fails. Takes up to 3 s."""
        self._watch.end()
        self._serving.grammars.close()
        await self._starter.run(lambda: end_engine(self._engine, 5))

    def terminate(self) -> None:
        """End the engine process at once."""
        self._watch.end()
        self._serving.grammars.close()
        self._watch.kill()
        end_engine(self._engine, 0)  # its sockets; the processes have been killed

    async def _rendered(self, request: ChatRequest) -> Prompt:
        """Have vLLM render it. Pixels live no longer than that: neither while it waits nor while it runs."""
        async with self._pictures.decoded(request, most=self._spec.engine.max_images) as seen:
            prompt: Prompt = await self._serving.render(request, self._translate(seen, stream=not request.whole))
            return prompt

    def _most_tokens(self, request: ChatRequest | TextRequest) -> int | None:
        """Of each answer; None: as many as fit."""
        return self._spec.engine.max_output_tokens if request.max_tokens is None else request.max_tokens

    def _translate(self, request: ChatRequest, *, stream: bool) -> Any:
        from engine.backends.vllm.request import translate

        return translate(
            request,
            stream=stream,
            context_length=self.context_length,
            max_output_tokens=self._spec.engine.max_output_tokens,
        )

    def _on_exit(self) -> None:
        """End whatever waits for the engine now. vLLM's own monitor may find its client already shut down."""
        from vllm.v1.engine.exceptions import EngineDeadError

        # First: as requests end below, others would be dispatched to the dead engine.
        self.admission.close()
        try:
            with compat.guarded("death"):
                self._engine.engine_core.resources.engine_dead = True  # refuses requests that are being tokenised
                self._engine.output_processor.propagate_error(EngineDeadError())
        finally:
            self.died.set()

    async def _check_capabilities(self) -> None:
        if "vision" in self._spec.capabilities and not self._engine.model_config.is_multimodal_model:
            raise LoadError(
                f"{self._spec.id}: models.yaml claims `vision`, but the model takes no pictures. Pick one: 1. take "
                "`vision` out of its capabilities; 2. use a model that sees."
            )
        if "function_calling" not in self._spec.capabilities:
            return
        tool = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
        plain = ChatRequest(request_id="probe", model=self._spec.id, messages=[{"role": "user", "content": "?"}])
        offered = ChatRequest(request_id="probe", model=self._spec.id, messages=plain.messages, tools=[tool])
        lengths = [await self.count_tokens(request) for request in (plain, offered)]
        if lengths[0] == lengths[1]:
            raise LoadError(
                f"{self._spec.id}: models.yaml claims `function_calling`, but the model's chat template takes no "
                "tools. Pick one: 1. take `function_calling` out of its capabilities; 2. use a model that was "
                "trained for tools."
            )

    def _warm_up_content(self) -> str | list[dict[str, Any]]:
        if "vision" not in self._spec.capabilities:
            return _WARM_UP
        picture = {"type": "image_url", "image_url": {"url": _white_picture()}}
        return [picture, {"type": "text", "text": _WARM_UP}]

    async def _warm_up(self) -> None:
        stream = TokenStream()
        await self.chat(
            ChatRequest(
                request_id="warm-up",
                model=self._spec.id,
                messages=[{"role": "user", "content": self._warm_up_content()}],
                temperature=0,
                max_tokens=8,
                ignore_eos=True,
                logprobs=True,  # compiled on first use on a GPU
            ),
            stream,
        )
        await fold(stream)


def _white_picture() -> str:
    """A small picture as a `data:` URI."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64), "white").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _grammar_field(request: ChatRequest) -> str | None:
    return "response_format" if request.response_format else "tools" if request.tools else None


class EngineWatch:
    """For one engine, from before its start to its end. Belongs to the event loop, but for `started`."""

    def __init__(self, model: str, patience: Patience | None) -> None:
        self._model = model
        self._processes: list[BaseProcess] = []
        self._sentinels: list[int] = []
        self._call: Callable[[], None] | None = None
        self._ended = False
        self._guard = Guard(patience, self.pids, self._on_hang)
        self._guard.begin()

    def started(self, process: BaseProcess) -> None:
        """Take on a process that is loading. From any thread."""
        self._processes.append(process)

    def expect(self, ping: Callable[[], Awaitable[object]]) -> None:
        """It has started: from now on it has to answer between two steps, also when it has nothing to do."""
        self._guard.expect(ping)

    def on_exit(self, call: Callable[[], None]) -> None:
        """Call this once, at the moment at which a process exits, or hangs and was killed for it."""
        self._call = call
        loop = asyncio.get_running_loop()
        for process in self._processes:
            sentinel = os.dup(process.sentinel)  # vLLM closes its own while we still watch
            self._sentinels.append(sentinel)
            loop.add_reader(sentinel, self._exited)

    def kill_after(self, reader: asyncio.Task[None]) -> None:
        """Kill the processes if `reader`, the task that reads from them, ends first: no output would arrive after that.

        vLLM catches and logs whatever its own half raises, and refuses every request from then on.
        """
        reader.add_done_callback(lambda _: None if self._ended else self.kill())

    def end(self) -> None:
        """Watch no more. Safe to call twice."""
        self._ended = True
        self._guard.end()
        loop = asyncio.get_running_loop()
        for sentinel in self._sentinels:
            loop.remove_reader(sentinel)
            os.close(sentinel)
        self._sentinels.clear()

    def kill(self) -> None:
        """End the processes now."""
        self._guard.end()
        for process in self._processes:
            with contextlib.suppress(ValueError):  # already closed
                process.kill()

    def pids(self) -> list[int]:
        """Return the processes there are of it, without their children."""
        found = []
        for process in list(self._processes):
            with contextlib.suppress(ValueError):  # it has ended, and is closed
                found.append(process.pid)
        return [pid for pid in found if pid is not None]

    def _on_hang(self, how: str) -> None:
        _log.error("%s: its engine process hangs and is killed: %s.", self._model, how)
        self.kill()
        if self._call is not None:
            self._exited()  # not left to the kernel: a process whose driver hangs does not even die of a kill

    def _exited(self) -> None:
        self.end()
        if self._call is not None:
            self._call()


def end_engine(engine: Any, timeout_seconds: float) -> None:
    """Blocking. End the processes within that time; what the client of an `AsyncLLM` has open is closed soon after.

    vLLM leaves its ZeroMQ context and its processes' pipes to the garbage collector: eleven descriptors and three
    threads of every engine, until that runs; and those of the first engine for ever, because it is frozen and no longer
    collected (server/heap.py).
    """
    engine.shutdown(timeout=timeout_seconds)
    processes = processes_of(engine)
    with compat.guarded("end"):
        resources = engine.engine_core.resources
        # By their ending: releases of vLLM have called them differently.
        sockets = [each for name, each in vars(resources).items() if name.endswith("_socket") and each is not None]
        # A daemon that is not joined: ZeroMQ waits for ever where a socket is open, and the event loop closes them.
        threading.Thread(target=_close, args=(resources.ctx, sockets, processes), name="vllm-end", daemon=True).start()


def processes_of(engine: Any) -> list[BaseProcess]:
    """Return those that vLLM's client knows."""
    with compat.guarded("end"):
        manager = engine.engine_core.resources.engine_manager
        return [] if manager is None else list(manager.processes)
    return []


def _close(context: Any, sockets: Iterable[Any], processes: Iterable[BaseProcess]) -> None:
    time.sleep(_WATCHED_SECONDS)
    for process in processes:
        with contextlib.suppress(ValueError):  # it still runs, or vLLM has closed it
            process.close()
    deadline = time.monotonic() + _CLOSING_SECONDS
    for socket in sockets:
        while not socket.closed:
            if time.monotonic() > deadline:
                return  # left to the garbage collector, like vLLM does
            time.sleep(_POLL_SECONDS)
    context.destroy(linger=0)
