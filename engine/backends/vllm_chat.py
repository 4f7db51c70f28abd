"""A chat model on vLLM: one `AsyncLLM`, whose core is a child process, and vLLM's serving classes on top.

Owns the life of that engine. What an answer looks like is decided in vllm_serving.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.admission import Admission
from engine.backends.vllm_end import end_engine
from engine.backends.vllm_launch import runs_on_cpu
from engine.backends.vllm_sleep import fall_asleep, wake_up
from engine.backends.vllm_start import build_serving, room_of, start_engine
from engine.backends.vllm_watch import EngineWatch
from engine.chat_fold import fold
from engine.errors import LoadError, NotStartedError, engine_died
from engine.media.images import image_places
from engine.stall import Patience
from engine.stream import TokenStream
from engine.types import ChatRequest
from engine.weights.safety import check_folder

if TYPE_CHECKING:
    from engine.backends.vllm_serving import Prompt
    from engine.backends.vllm_start import Launch
    from engine.types import TextRequest

# A first prompt of fewer tokens ends in SIGILL on AMX machines; this one has more than 24 in any tokenizer.
_WARM_UP = "one two three four five six seven eight nine ten " * 4


class VllmChat:
    """One loaded chat model. Made by `load`, thrown away whole: a restart makes a new one."""

    def __init__(self, engine: Any, serving: Any, launch: Launch, watch: EngineWatch) -> None:
        self._engine = engine
        self._serving = serving
        self._spec = launch.spec
        self._starter = launch.starter
        self._pictures = launch.pictures
        self._sleep = launch.sleep
        self.admission = Admission(room_of(engine, launch.spec))
        self.metrics = launch.metrics
        self.compiled = launch.compiled
        self.context_length: int = engine.model_config.max_model_len
        self.died = asyncio.Event()
        self._watch = watch
        watch.call_when_gone(self._on_gone)

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
            engine._run_output_handler()  # noqa: SLF001  # built off the loop; nothing public starts it
            watch.kill_without(engine.output_handler)
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
        from engine.backends.vllm_errors import TranslatedErrors

        if self._serving.needs_parser(request) or request.logprobs or image_places(request):
            # Streamed and whole answers agree because one parser makes both, step by step; and the logprobs of a long
            # answer, put together at once, would hold up everybody for seconds.
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
        from engine.backends.vllm_errors import TranslatedErrors
        from engine.backends.vllm_text import TextAnswers

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
        from engine.backends.vllm_errors import TranslatedErrors

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
        """Return when no request runs or waits here any more."""
        await self.admission.idle()

    async def sleep(self) -> bool:
        """Leave its GPUs, if it was started so that it can; see vllm_sleep.py."""
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
        end_engine(self._engine, 0)  # its sockets; the processes are gone

    async def _rendered(self, request: ChatRequest) -> Prompt:
        """Have vLLM render it. Pixels live no longer than that: neither while it waits nor while it runs."""
        async with self._pictures.decoded(request, most=self._spec.engine.max_images) as seen:
            prompt: Prompt = await self._serving.render(request, self._translate(seen, stream=not request.whole))
            return prompt

    def _most_tokens(self, request: ChatRequest | TextRequest) -> int | None:
        """Of each answer; None: as many as fit."""
        return self._spec.engine.max_output_tokens if request.max_tokens is None else request.max_tokens

    def _translate(self, request: ChatRequest, *, stream: bool) -> Any:
        from engine.backends.vllm_request import translate

        return translate(
            request,
            stream=stream,
            context_length=self.context_length,
            max_output_tokens=self._spec.engine.max_output_tokens,
        )

    def _on_gone(self) -> None:
        """End whatever waits for the engine now. vLLM's own monitor may find its client already shut down."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self._engine.engine_core.resources.engine_dead = True  # refuses requests that are being tokenised
        self._engine.output_processor.propagate_error(EngineDeadError())
        self.admission.close(lambda: engine_died(NotStartedError))
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
