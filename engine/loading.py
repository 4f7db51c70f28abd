"""Finds a model's files and loads it with the backend of its task; what backends share on this machine is kept here."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.config import ChatModelSpec, ImageModelSpec, SpeechModelSpec
from engine.errors import LoadError
from engine.holdings import Holdings
from engine.placement.hardware import GIB
from engine.slot import needs_another_engine
from engine.voices.catalogue import Voices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.backends import Backend
    from engine.backends.diffusers.model import ImageModel
    from engine.backends.tts.model import SpeechModel
    from engine.backends.vllm.engine import VllmChat
    from engine.backends.vllm.processes import StarterThread
    from engine.compiled import CompiledModels
    from engine.config import Config, ModelSpec
    from engine.media.images import Pictures
    from engine.planned import Planned
    from engine.residency import Residency
    from engine.types import Served

    Report = Callable[[str, float], None]


class Loader:
    """Loads models. Made in an event loop and used only from there; `prepare` before the first load."""

    def __init__(  # noqa: PLR0913  # the engine's
        self,
        config: Config,
        weights_dir: Path,
        pictures: Pictures,
        *,
        mark_files: bool,
        data_dir: Path | None = None,
        compiled: CompiledModels,
        ram_gib: float | None = None,
        vllm_metrics: bool = False,
    ) -> None:
        """`data_dir` keeps what models took when they were loaded, for the next plan; None: nothing is kept.

        `ram_gib` is all the RAM that models may take; None: what is free, less a margin.
        """
        from engine.planned import hardware_for

        self._weights_dir = weights_dir
        self._data_dir = data_dir
        # Read once: at a reload, what is taken is mostly taken by our own models
        self._hardware = hardware_for(on_cpu=self._on_cpu(), ram_gib=ram_gib)
        self.under_way = self.begun = 0
        self.holdings = Holdings()
        self._loaded_by: dict[str, tuple[ModelSpec, Planned]] = {}  # by which plan each model was last loaded
        self.served: dict[str, Served] = {}  # what each model was last loaded with
        self._pictures = pictures
        self._mark_files = mark_files
        self._compiled = compiled
        self._vllm_metrics = vllm_metrics
        self._starters: dict[str, StarterThread] = {}
        self._gpu_turn = asyncio.Lock()
        self.use(config, Voices(config, weights_dir))

    async def read_voices(self, config: Config) -> Voices:
        """Look on the disk for the voices of these models."""
        return await asyncio.to_thread(Voices, config, self._weights_dir, self.voices)

    def use(self, config: Config, voices: Voices) -> None:
        """From now on these are the models and their voices."""
        from engine.planned import Planned

        self._config = config
        self.planned = Planned(config, self._weights_dir, self._data_dir, self._hardware)
        self.holdings.plan(self.planned.shares(config))
        self.voices = voices
        self.voices.log_warnings()
        # Asked of the disk once, and again when a model loads: the list of models is part of every request.
        self.demos = {spec.id for spec in config.models.values() if self.planned.is_demo(spec)}

    def residency(self) -> Residency:
        """Return who takes turns on this machine, and on how much memory."""
        return self.planned.residency(self._config, self.holdings)

    def outdated(self) -> set[str]:
        """Return the models that have to be loaded anew, though what models.yaml says of them has not changed.

        Weights have come, or gone; or they hold memory that is now planned for others, who cannot be loaded without.
        """
        found = self._of_other_folders()
        self.holdings.forget(found)
        for name, (spec, _) in self._loaded_by.items():
            now = self._config.models.get(name)
            if now is None or needs_another_engine(spec, now):
                self.holdings.forget([name])
        late = self.holdings.too_much()
        self.holdings.forget(late)
        return found | late

    def _of_other_folders(self) -> set[str]:
        found = set()
        for name, served in self.served.items():
            spec = self._config.models.get(name)
            if spec is None or isinstance(spec, SpeechModelSpec):  # voices are taken over without a load
                continue
            with contextlib.suppress(LoadError):
                folder, is_demo = self.planned.folder(spec)
                now = self.planned.served(spec, folder, is_demo=is_demo)
                if (now.source, now.folder) != (served.source, served.folder):
                    found.add(name)
        return found

    def prepare(self) -> None:
        """Set up what all engines share."""
        from engine.backends.vllm import processes

        chats = [spec for spec in self._config.models.values() if isinstance(spec, ChatModelSpec)]
        processes.prepare(max((self._cpu_threads(spec) for spec in chats), default=1))

    def clean_up(self) -> None:
        """Remove what `prepare` made."""
        from engine.backends.vllm import processes

        processes.clean_up()

    async def load(self, spec: ModelSpec, report: Report) -> Backend:
        """Load a model. Raises `LoadError` when it can never be loaded as it is configured."""
        if isinstance(spec, SpeechModelSpec):
            return await self._load_speech(spec, report)
        planned = self._plan_for(spec)
        folder, is_demo = planned.folder(spec)
        self._serve(spec, planned, planned.served(spec, folder, is_demo=is_demo))
        (self.demos.add if is_demo else self.demos.discard)(spec.id)
        async with self._turn():
            alone = _Alone(self)
            before = await asyncio.to_thread(planned.taken, spec, is_demo=is_demo)
            with alone, planned.on_its_gpus(spec):
                backend = await self._load_real(planned, spec, folder, is_demo, report)
            if alone.throughout:
                try:
                    await asyncio.to_thread(planned.keep, spec, before)
                except BaseException:  # cancelled: nobody will ever know of it
                    backend.terminate()
                    raise
            return backend

    def _plan_for(self, spec: ModelSpec) -> Planned:
        """Return the plan that it is loaded by: of an earlier one, where others still hold what this one gives it."""
        if spec.id in self._loaded_by and not self.holdings.takes_what_is_planned(spec.id):
            return self._loaded_by[spec.id][1]
        return self.planned

    def _serve(self, spec: ModelSpec, planned: Planned, served: Served) -> None:
        self.served[spec.id] = served
        self._loaded_by[spec.id] = spec, planned
        self.holdings.took(spec.id, served.planned_bytes)

    async def _load_real(
        self,
        planned: Planned,
        spec: ChatModelSpec | ImageModelSpec,
        folder: Path,
        is_demo: bool,  # noqa: FBT001
        report: Report,
    ) -> Backend:
        if isinstance(spec, ChatModelSpec):
            leaves = planned.leaves_by_sleep(spec)
            return await self._load_chat(planned.chat_spec(spec, is_demo=is_demo), folder, is_demo, leaves, report)
        return await self._load_images(planned.image_spec(spec, is_demo=is_demo), folder, is_demo, report)

    async def _load_chat(
        self,
        spec: ChatModelSpec,
        folder: Path,
        is_demo: bool,  # noqa: FBT001
        leaves: tuple[tuple[int, ...], int] | None,
        report: Report,
    ) -> VllmChat:
        from prometheus_client import CollectorRegistry

        from engine.backends.vllm.engine import VllmChat
        from engine.backends.vllm.start import Launch, Sleep

        starter, grammar_starter = self._starter(spec), self._starter_named("grammars")
        metrics = CollectorRegistry() if self._vllm_metrics else None
        self._check_cache(spec)
        sleep = None if leaves is None else Sleep(*leaves, turn=self._turn)
        launch = Launch(spec, folder, is_demo, starter, grammar_starter, self._pictures, report, metrics, sleep)
        if not self._on_cpu():
            return await VllmChat.load(replace(launch, compiled=not spec.engine.enforce_eager))
        if not self._compiled.choose(spec, folder):
            return await VllmChat.load(replace(launch, compiled=False))
        with self._compiled.used(spec, folder):
            return await VllmChat.load(replace(launch, only_kept_code=spec.engine.enforce_eager is None))

    async def _load_images(self, spec: ImageModelSpec, folder: Path, is_demo: bool, report: Report) -> ImageModel:  # noqa: FBT001
        from engine.backends.diffusers.model import ImageModel

        profile = spec.profile_of(demo=is_demo)
        threads = self._cpu_threads(spec)
        return await ImageModel.load(
            spec, profile, folder, threads=threads, mark=self._mark_files, on_cpu=self._on_cpu(), report=report
        )

    async def _load_speech(self, spec: SpeechModelSpec, report: Report) -> SpeechModel:
        from engine.backends.tts.model import SpeechModel

        problem = self.voices.problem(spec.id)
        if problem is not None:
            raise problem
        folder = self._weights_dir / spec.weights
        served = self.planned.served(spec, folder, is_demo=self.voices.only_demos(spec.id))
        self._serve(spec, self.planned, served)
        threads = self._cpu_threads(spec)
        return await SpeechModel.load(
            spec, threads=threads, mark=self._mark_files, on_cpu=self._on_cpu(), report=report
        )

    def _check_cache(self, spec: ChatModelSpec) -> None:
        """Raise `LoadError` for a KV cache that this machine can never hold; vLLM's own error names no knob of ours."""
        cache_gib, ram_gib = spec.engine.kv_cache_gib or 0.0, self._hardware.ram_bytes / GIB
        if self._on_cpu() and cache_gib > ram_gib:
            raise LoadError(
                f"{spec.id}: `kv_cache_gib` is {cache_gib:g}, and this machine has {ram_gib:.1f} GiB of RAM in all. "
                "Lower it in models.yaml; null takes 1."
            )

    def _turn(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """On a CPU models load side by side; what shares a GPU loads one after the other, since it measures memory."""
        return contextlib.nullcontext() if self._on_cpu() else self._gpu_turn

    def _starter(self, spec: ModelSpec) -> StarterThread:
        return self._starter_named(f"cpu-{spec.id}" if self._on_cpu() else "gpu")

    def _starter_named(self, name: str) -> StarterThread:
        from engine.backends.vllm.processes import StarterThread

        if name not in self._starters:
            self._starters[name] = StarterThread(name)
        return self._starters[name]

    def _cpu_threads(self, spec: ModelSpec) -> int:
        """The demo models are too small to share among cores; real ones divide the cores among themselves."""
        share = max(1, (os.cpu_count() or 1) // len(self._config.models))
        return spec.engine.cpu_threads or (1 if self.planned.is_demo(spec) else share)

    @staticmethod
    def _on_cpu() -> bool:
        from engine.backends.vllm.processes import runs_on_cpu

        return runs_on_cpu()


class _Alone:
    """Notices whether any other model loaded during a load: then what was taken cannot be told apart."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.throughout = False

    def __enter__(self) -> None:
        self._alone = self._loader.under_way == 0
        self._loader.under_way += 1
        self._loader.begun += 1
        self._mine = self._loader.begun

    def __exit__(self, *_: object) -> None:
        self._loader.under_way -= 1
        self.throughout = self._alone and self._mine == self._loader.begun
