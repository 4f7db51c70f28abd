"""Finds a model's files and loads it with the backend of its task; what backends share on this machine is kept here."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

from engine import demo
from engine.config import ChatModelSpec, ImageModelSpec, SpeechModelSpec
from engine.errors import LoadError
from engine.voices.offered import Voices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.backends import Backend
    from engine.backends.image_model import ImageModel
    from engine.backends.speech_model import SpeechModel
    from engine.backends.vllm_chat import VllmChat
    from engine.backends.vllm_launch import StarterThread
    from engine.config import Config, ModelSpec
    from engine.pictures import Pictures

    Report = Callable[[str, float], None]


class Loader:
    """Loads models. Made in an event loop and used only from there; `prepare` before the first load."""

    def __init__(self, config: Config, weights_dir: Path, pictures: Pictures, *, mark_files: bool) -> None:
        self._weights_dir = weights_dir
        self._pictures = pictures
        self._mark_files = mark_files
        self._starters: dict[str, StarterThread] = {}
        self._gpu_turn = asyncio.Lock()
        self.use(config, Voices(config, weights_dir))

    async def read_voices(self, config: Config) -> Voices:
        """Look on the disk for the voices of these models."""
        return await asyncio.to_thread(Voices, config, self._weights_dir, self.voices)

    def use(self, config: Config, voices: Voices) -> None:
        """From now on these are the models and their voices."""
        self._config = config
        self.voices = voices
        self.voices.log_warnings()
        # Asked of the disk once, and again when a model loads: the list of models is part of every request.
        self.demos = {spec.id for spec in config.models.values() if self._is_demo(spec)}

    def prepare(self) -> None:
        """Set up what all engines share."""
        from engine.backends import vllm_launch

        chats = [spec for spec in self._config.models.values() if isinstance(spec, ChatModelSpec)]
        compiles = any(spec.engine.enforce_eager is False for spec in chats)
        vllm_launch.prepare(max((self._cpu_threads(spec) for spec in chats), default=1), compiles=compiles)

    def clean_up(self) -> None:
        """Remove what `prepare` made."""
        from engine.backends import vllm_launch

        vllm_launch.clean_up()

    async def load(self, spec: ModelSpec, report: Report) -> Backend:
        """Load a model. Raises `LoadError` when it can never be loaded as it is configured."""
        if isinstance(spec, SpeechModelSpec):
            return await self._load_speech(spec, report)
        folder, is_demo = self._weights(spec)
        (self.demos.add if is_demo else self.demos.discard)(spec.id)
        if isinstance(spec, ChatModelSpec):
            return await self._load_chat(spec, folder, is_demo, report)
        return await self._load_images(spec, folder, is_demo, report)

    async def _load_chat(self, spec: ChatModelSpec, folder: Path, is_demo: bool, report: Report) -> VllmChat:  # noqa: FBT001
        from engine.backends.vllm_chat import VllmChat
        from engine.backends.vllm_start import Launch

        starter, grammar_starter = self._starter(spec), self._starter_named("grammars")
        launch = Launch(spec, folder, is_demo, starter, grammar_starter, self._pictures, report)
        async with self._turn():
            return await VllmChat.load(launch)

    async def _load_images(self, spec: ImageModelSpec, folder: Path, is_demo: bool, report: Report) -> ImageModel:  # noqa: FBT001
        from engine.backends.image_model import ImageModel

        profile = spec.profile_of(demo=is_demo)
        threads = self._cpu_threads(spec)
        async with self._turn():
            return await ImageModel.load(
                spec, profile, folder, threads=threads, mark=self._mark_files, on_cpu=self._on_cpu(), report=report
            )

    async def _load_speech(self, spec: SpeechModelSpec, report: Report) -> SpeechModel:
        from engine.backends.speech_model import SpeechModel

        problem = self.voices.problem(spec.id)
        if problem is not None:
            raise problem
        threads = self._cpu_threads(spec)
        return await SpeechModel.load(
            spec, threads=threads, mark=self._mark_files, on_cpu=self._on_cpu(), report=report
        )

    def _turn(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """On a CPU models load side by side; what shares a GPU loads one after the other, since it measures memory."""
        return contextlib.nullcontext() if self._on_cpu() else self._gpu_turn

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
        return self._starter_named(f"cpu-{spec.id}" if self._on_cpu() else "gpu")

    def _starter_named(self, name: str) -> StarterThread:
        from engine.backends.vllm_launch import StarterThread

        if name not in self._starters:
            self._starters[name] = StarterThread(name)
        return self._starters[name]

    def _cpu_threads(self, spec: ModelSpec) -> int:
        """The demo models are too small to share among cores; real ones divide the cores among themselves."""
        share = max(1, (os.cpu_count() or 1) // len(self._config.models))
        return spec.engine.cpu_threads or (1 if self._is_demo(spec) else share)

    def _is_demo(self, spec: ModelSpec) -> bool:
        return spec.demo is not None and not (self._weights_dir / spec.weights).is_dir()

    @staticmethod
    def _on_cpu() -> bool:
        from engine.backends.vllm_launch import runs_on_cpu

        return runs_on_cpu()
