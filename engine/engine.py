"""The engine: every model of models.yaml behind one object that knows nothing of HTTP, keys or databases."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from engine import demo
from engine.background import BackgroundSlots
from engine.capabilities import check_request, check_text
from engine.chat_fold import fold
from engine.errors import EngineError, LoadError, NotStartedError
from engine.fair_queue import Urgency
from engine.pictures import ImageLimits, Pictures
from engine.pool import Pool
from engine.types import ModelInfo

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable
    from pathlib import Path

    from engine.backends import ChatBackend
    from engine.backends.vllm_launch import StarterThread
    from engine.config import Config, ModelSpec
    from engine.types import ChatRequest, ChatResult, ChatStep, ModelHealth, TextRequest


class Engine:
    """Every configured model. Made in an event loop and used only from there.

    `start` returns at once and loads in the background; requests raise `ModelLoadingError` until their model
    is ready. All methods that take a request raise `EngineError`s and nothing else on purpose.
    """

    def __init__(self, config: Config, *, weights_dir: Path, images: ImageLimits | None = None) -> None:
        self._config = config
        self._weights_dir = weights_dir
        self._created = int(time.time())
        self._pool = Pool(config.models.values(), self._load)
        # Asked of the disk once, and again when a model loads: the list of models is part of every request.
        self._demos = {spec.id for spec in config.models.values() if self._is_demo(spec)}
        self._pictures = Pictures(images or ImageLimits())
        self._starters: dict[str, StarterThread] = {}
        self._background: dict[str, BackgroundSlots] = {}
        self._size_background()

    async def start(self) -> None:
        """Begin to load all models."""
        from engine.backends import vllm_launch

        compiles = any(spec.engine.enforce_eager is False for spec in self._config.models.values())
        vllm_launch.prepare(self._cpu_threads(), compiles=compiles)
        self._pool.start()

    async def stop(self) -> None:
        """End all models gracefully (a few seconds); running requests fail."""
        await self._pool.stop()
        self._clean_up()

    async def terminate(self) -> None:
        """End all models now."""
        await self._pool.terminate()
        self._clean_up()

    async def chat(self, request: ChatRequest) -> ChatResult:
        """Return the whole answer. Cancelling the call aborts the generation.

        What is not interactive waits for its model, if that is being restarted, and for its turn.
        """
        if request.urgency == Urgency.INTERACTIVE:
            async with self._turn(request, request.n):
                return await self._admit(request).complete(request)
        while True:
            await self._pool.revived(request.model)  # before it waits: it is told at once if there is no such model
            async with self._background[request.model].take(request, request.n):
                await self._pool.revived(request.model)
                with contextlib.suppress(NotStartedError):  # an engine that dies costs what was running on it
                    return await self._admit(request).complete(request)

    async def chat_stream(self, request: ChatRequest) -> AsyncGenerator[ChatStep, None]:
        """Yield the answer, one `ChatStep` per engine step. Closing the generator aborts the generation.

        Await the first step before answering: everything that can be refused is refused until then.
        """
        async with (
            self._turn(request, request.n),
            contextlib.aclosing(self._admit(request).stream(request)) as steps,
        ):
            async for step in steps:
                yield step

    async def text(self, request: TextRequest) -> ChatResult:
        """Return whole continuations of plain texts, folded from the steps of `text_stream`. Cancelling aborts."""
        async with contextlib.aclosing(self.text_stream(request)) as steps:
            return await fold(steps)

    async def text_stream(self, request: TextRequest) -> AsyncGenerator[ChatStep, None]:
        """Go on with plain texts, like `chat_stream`. A background request waits for its turn first."""
        sequences = len(request.prompts) * request.n
        async with self._turn(request, sequences):
            backend = self._pool.get(request.model)
            check_text(self._config.models[request.model], request)
            async with contextlib.aclosing(backend.text_stream(request)) as steps:
                async for step in steps:
                    yield step

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return how many tokens the prompt has, template and tools included. Nothing is generated."""
        return await self._admit(request).count_tokens(request)

    def reload(self, config: Config) -> None:
        """Serve from now on what `config` says. Answers that are being given go on to their end."""
        self._config = config
        self._demos = {spec.id for spec in config.models.values() if self._is_demo(spec)}
        self._size_background()
        self._pool.update(config.models.values())

    def _size_background(self) -> None:
        for spec in self._config.models.values():
            size = spec.engine.max_num_seqs - spec.engine.places_for_people
            beside = max(1, size // 32)
            if spec.id in self._background:
                self._background[spec.id].resize(size, beside=beside)
            else:
                self._background[spec.id] = BackgroundSlots(size, beside=beside)

    def models(self) -> tuple[ModelInfo, ...]:
        """All models, in the order of models.yaml."""
        return tuple(self._info(health) for health in self._pool.health())

    def health(self) -> tuple[ModelHealth, ...]:
        """What each model is doing, in the order of models.yaml."""
        return self._pool.health()

    async def wait_for_change(self) -> None:
        """Return when a model's state or phase has changed since the last call. For one waiting task."""
        await self._pool.wait_for_change()

    @contextlib.asynccontextmanager
    async def _turn(self, request: ChatRequest | TextRequest, sequences: int) -> AsyncIterator[None]:
        """Hold background work back, or wait as background work. Refuses at once what no model can answer."""
        self._pool.get(request.model)
        slots = self._background[request.model]
        if request.urgency == Urgency.INTERACTIVE:
            with slots.interactive():
                yield
        else:
            async with slots.take(request, sequences):
                yield

    def _admit(self, request: ChatRequest) -> ChatBackend:
        backend = self._pool.get(request.model)
        check_request(self._config.models[request.model], request)
        return backend

    async def _load(self, spec: ModelSpec, report: Callable[[str, float], None]) -> ChatBackend:
        from engine.backends.vllm_chat import VllmChat
        from engine.backends.vllm_start import Launch

        weights, is_demo = self._weights(spec)
        (self._demos.add if is_demo else self._demos.discard)(spec.id)
        starter, grammar_starter = self._starter(spec), self._starter_named("grammars")
        return await VllmChat.load(Launch(spec, weights, is_demo, starter, grammar_starter, self._pictures, report))

    def _weights(self, spec: ModelSpec) -> tuple[Path, bool]:
        """Return the model's folder and whether it is the demo."""
        folder = self._weights_dir / spec.weights
        if folder.is_dir():
            return folder, False
        if spec.demo is None:
            raise LoadError(
                f"{spec.id}: there is no folder {spec.weights!r} in the weights directory. Pick one: 1. put the "
                "model's files there; 2. set `demo` in models.yaml; 3. take the model out of models.yaml."
            )
        return demo.weights_dir(spec.demo), True

    def _starter(self, spec: ModelSpec) -> StarterThread:
        """On a CPU models start side by side; engines that may share a GPU start one after the other."""
        from engine.backends.vllm_launch import runs_on_cpu

        return self._starter_named(f"cpu-{spec.id}" if runs_on_cpu() else "gpu")

    def _starter_named(self, name: str) -> StarterThread:
        from engine.backends.vllm_launch import StarterThread

        if name not in self._starters:
            self._starters[name] = StarterThread(name)
        return self._starters[name]

    def _cpu_threads(self) -> int:
        """The demo models are too small to share among cores; real ones divide the cores among themselves."""
        share = max(1, (os.cpu_count() or 1) // len(self._config.models))
        return max(
            spec.engine.cpu_threads or (1 if self._is_demo(spec) else share) for spec in self._config.models.values()
        )

    def _is_demo(self, spec: ModelSpec) -> bool:
        return spec.demo is not None and not (self._weights_dir / spec.weights).is_dir()

    def _info(self, health: ModelHealth) -> ModelInfo:
        spec = self._config.models[health.id]
        context_length = spec.engine.context_length
        with contextlib.suppress(EngineError):
            context_length = self._pool.get(spec.id).context_length
        return ModelInfo(
            id=spec.id,
            tier=spec.tier,
            owned_by=spec.owned_by,
            description=spec.description,
            capabilities=tuple(spec.capabilities),
            status=health.status,
            demo=spec.id in self._demos,
            created=self._created,
            context_length=context_length,
            max_output_tokens=spec.engine.max_output_tokens or context_length,
        )

    def _clean_up(self) -> None:
        from engine.backends import vllm_launch

        self._pictures.close()
        vllm_launch.clean_up()
