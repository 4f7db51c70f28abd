"""The engine: every model of models.yaml behind one object that knows nothing of HTTP, keys or databases."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from engine import demo
from engine.background import BackgroundSlots
from engine.capabilities import check_request
from engine.errors import EngineError, LoadError
from engine.pool import Pool
from engine.types import ModelInfo

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from engine.backends import ChatBackend
    from engine.backends.vllm_launch import StarterThread
    from engine.config import Config, ModelSpec
    from engine.types import ChatRequest, ChatResult, ChatStep, ModelHealth


class Engine:
    """Every configured model. Made in an event loop and used only from there.

    `start` returns at once and loads in the background; requests raise `ModelLoadingError` until their model
    is ready. All methods that take a request raise `EngineError`s and nothing else on purpose.
    """

    def __init__(self, config: Config, *, weights_dir: Path) -> None:
        self._config = config
        self._weights_dir = weights_dir
        self._created = int(time.time())
        self._pool = Pool(config.models.values(), self._load)
        # Asked of the disk once, and again when a model loads: the list of models is part of every request.
        self._demos = {spec.id for spec in config.models.values() if self._is_demo(spec)}
        self._starters: dict[str, StarterThread] = {}
        self._background = {
            spec.id: BackgroundSlots(min(spec.engine.max_num_seqs, max(1, spec.engine.max_queued_requests // 2)))
            for spec in config.models.values()
        }

    async def start(self) -> None:
        """Begin to load all models."""
        from engine.backends import vllm_launch

        compiles = any(spec.engine.enforce_eager is False for spec in self._config.models.values())
        vllm_launch.prepare(self._cpu_threads(), compiles=compiles)
        self._pool.start()

    async def stop(self) -> None:
        """End all models gracefully (a few seconds); running requests fail."""
        await self._pool.stop()
        _clean_up()

    async def terminate(self) -> None:
        """End all models now."""
        await self._pool.terminate()
        _clean_up()

    async def chat(self, request: ChatRequest) -> ChatResult:
        """Return the whole answer. Cancelling the call aborts the generation."""
        if not request.background:
            return await self._admit(request).complete(request)
        async with self._background[request.model].take(request.n):
            return await self._admit(request).complete(request)

    async def chat_stream(self, request: ChatRequest) -> AsyncGenerator[ChatStep, None]:
        """Yield the answer, one `ChatStep` per engine step. Closing the generator aborts the generation.

        Await the first step before answering: everything that can be refused is refused until then.
        """
        async with contextlib.aclosing(self._admit(request).stream(request)) as steps:
            async for step in steps:
                yield step

    def models(self) -> tuple[ModelInfo, ...]:
        """All models, in the order of models.yaml."""
        return tuple(self._info(health) for health in self._pool.health())

    def health(self) -> tuple[ModelHealth, ...]:
        """What each model is doing, in the order of models.yaml."""
        return self._pool.health()

    async def wait_for_change(self) -> None:
        """Return when a model's state or phase has changed since the last call. For one waiting task."""
        await self._pool.wait_for_change()

    def _admit(self, request: ChatRequest) -> ChatBackend:
        backend = self._pool.get(request.model)
        check_request(self._config.models[request.model], request)
        return backend

    async def _load(self, spec: ModelSpec, report: Callable[[str, float], None]) -> ChatBackend:
        from engine.backends.vllm_chat import Launch, VllmChat

        weights, is_demo = self._weights(spec)
        (self._demos.add if is_demo else self._demos.discard)(spec.id)
        starter = self._starter(spec)
        return await VllmChat.load(Launch(spec, weights, is_demo, starter, report))

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
        from engine.backends.vllm_launch import StarterThread, runs_on_cpu

        device = f"cpu-{spec.id}" if runs_on_cpu() else "gpu"
        if device not in self._starters:
            self._starters[device] = StarterThread(device)
        return self._starters[device]

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


def _clean_up() -> None:
    from engine.backends import vllm_launch

    vllm_launch.clean_up()
