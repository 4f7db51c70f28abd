"""Finds a model's files and loads it with the backend of its task; keeps what backends share on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import psutil
from prometheus_client import CollectorRegistry

from engine.backends import Backend
from engine.backends.diffusers.model import ImageModel
from engine.backends.tts.model import SpeechModel
from engine.backends.vllm import processes
from engine.backends.vllm.engine import Launch, Sleep, VllmChat
from engine.backends.vllm.pooling import VllmPooling
from engine.backends.vllm.transcription import VllmTranscription
from engine.config import (
    AuxiliaryModelSpec,
    ChatModelSpec,
    Config,
    EmbeddingModelSpec,
    ImageModelSpec,
    ModelSpec,
    PoolingModelSpec,
    SpeechModelSpec,
)
from engine.config.models import model_of
from engine.demo import weights_dir
from engine.errors import LoadError, StartError
from engine.media import Pictures
from engine.placement.hardware import GIB, Hardware, Prefer, meant_for, read_hardware
from engine.placement.needs import ContextNeeds, Footprints, demo_need, own_folders, variants_here
from engine.placement.packing import ASLEEP_BYTES, asleep_bytes
from engine.placement.plan import plan
from engine.placement.types import CPU_CACHE_GIB, Placed, Plan, Refusal
from engine.pool.memory import Ledger, MemoryPlan, Share
from engine.pool.model_state import needs_another_engine
from engine.pool.records import CompiledModels, keep_source_of_vectors
from engine.types import Report, Served
from engine.voices.catalogue import Voices
from engine.weights.manifest import is_complete

_log = logging.getLogger("hearth.plan")
_Spec = TypeVar("_Spec", ChatModelSpec, AuxiliaryModelSpec, ImageModelSpec)


class Loader:
    """Loads models. Made in an event loop and used only from there; `prepare` before the first load."""

    def __init__(  # noqa: PLR0913  # `Engine` explains them
        self,
        config: Config,
        weights_dir: Path,
        pictures: Pictures,
        compiled: CompiledModels,
        *,
        mark_files: bool,
        data_dir: Path | None = None,
        ram_gib: float | None = None,
        prefer: Prefer = "resident",
        vllm_metrics: bool = False,
    ) -> None:
        self._weights_dir, self._data_dir = weights_dir, data_dir
        # Read once: at a reload most of what is taken belongs to our own models
        hardware = meant_for(read_hardware(), ram_gib, prefer)
        self.on_cpu = processes.runs_on_cpu()
        self._hardware = replace(hardware, gpus=()) if self.on_cpu else hardware
        self._under_way = self._begun = 0  # loads
        self.ledger = Ledger()
        self._loads: dict[str, _Load] = {}  # the last load of each model
        self._outgrown: Counter[str] = Counter()  # loads of each model that failed for lack of a GPU's memory
        self.lacks: dict[str, frozenset[str]] = {}  # capabilities that models.yaml claims and a model does not have
        self._pictures = pictures
        self.compiled = compiled
        self._mark_files = mark_files
        self._vllm_metrics = vllm_metrics
        self._starter = functools.cache(processes.StarterThread)
        # On a CPU models load side by side; models that share a GPU one after the other, since each measures memory
        self._turn: contextlib.AbstractAsyncContextManager[Any] = (
            contextlib.nullcontext() if self.on_cpu else asyncio.Lock()
        )
        self.use(config, Voices(config, weights_dir))

    async def read_voices(self, config: Config) -> Voices:
        return await asyncio.to_thread(Voices, config, self._weights_dir, self.voices)

    def use(self, config: Config, voices: Voices) -> None:
        """Use this configuration and these voices from now on."""
        self._config = config
        self._outgrown.clear()
        self.planned = Planned(config, self._weights_dir, self._data_dir, self._hardware)
        self.ledger.plan(self.planned.memory_plan())
        self.voices = voices
        self.voices.log_warnings()
        # Read from the disk once, and again when a model loads: every request reads the list of models.
        self.demos = {spec.id for spec in self.planned.engines.values() if self.planned.is_demo(spec)}

    def outdated(self) -> set[str]:
        """Return the models that have to be loaded again, though their entries have not changed.

        Their weights came, went or changed; or they have memory that is now planned for others, which cannot be loaded
        without it.
        """
        found = set()
        for name, load in self._loads.items():
            spec = self.planned.engines.get(name)
            if spec is not None and self._moved(spec, load):
                found.add(name)
            if spec is None or name in found or needs_another_engine(load.spec, spec):
                self.ledger.forget([name])
        late = self.ledger.too_much()
        self.ledger.forget(late)
        return found | late

    def _moved(self, spec: ModelSpec, before: _Load) -> bool:
        """Whether a model would now be loaded from another folder, or from other files."""
        if isinstance(spec, SpeechModelSpec):  # new voices need no load
            return False
        with contextlib.suppress(LoadError):
            folder, is_demo = self.planned.folder(spec)
            now = self.planned.served(spec, folder, is_demo=is_demo)
            was = before.served
            files = self._files(spec, folder, is_demo=is_demo)
            return (now.source, now.folder) != (was.source, was.folder) or files != before.files
        return False

    def _files(self, spec: ModelSpec, folder: Path, *, is_demo: bool) -> Files:
        """Return the files that a load reads: of the model and of its adapters, which are loaded with it."""
        files = files_in(folder)
        for name, adapter in self._adapters(spec, is_demo=is_demo).items():
            files |= {(f"{name}: {file}", size, changed) for file, size, changed in files_in(adapter) | {("", 0, 0)}}
        return files

    def _adapters(self, spec: ModelSpec, *, is_demo: bool) -> dict[str, Path]:
        """Return the folders of a model's adapters; a demo has none."""
        adapters = () if is_demo else self._config.adapters_of(model_of(spec.id))
        return {adapter.id: self._weights_dir / adapter.weights for adapter in adapters}

    def prepare(self) -> None:
        specs = self._config.models.values()
        on_vllm = [self._cpu_threads(spec) for spec in specs if isinstance(spec, ChatModelSpec | AuxiliaryModelSpec)]
        processes.prepare(max(on_vllm, default=1))

    def clean_up(self) -> None:
        self._pictures.close()
        processes.clean_up()

    async def load(self, spec: ModelSpec, report: Report) -> Backend:
        """Load a model. Raises `LoadError` when it can never be loaded as it is configured."""
        if isinstance(spec, SpeechModelSpec):
            return await self._load_speech(spec, report)
        planned = self._plan_for(spec)
        folder, is_demo = planned.folder(spec)
        files = await asyncio.to_thread(self._files, spec, folder, is_demo=is_demo)
        self._serve(spec, planned, planned.served(spec, folder, is_demo=is_demo), files)
        (self.demos.add if is_demo else self.demos.discard)(spec.id)
        async with self._turn:
            before = await asyncio.to_thread(planned.taken, spec, is_demo=is_demo)
            of_kv = self.part_of_kv(spec)
            alone = self._under_way == 0
            self._under_way += 1
            begun = self._begun = self._begun + 1
            try:
                with planned.on_its_gpus(spec):
                    if isinstance(spec, ChatModelSpec):
                        chat = await self._load_chat(spec, planned, folder, report, is_demo=is_demo)
                        backend: Backend = chat
                        self.lacks[spec.id] = chat.lacks
                    elif isinstance(spec, AuxiliaryModelSpec):
                        backend = await self._load_auxiliary(spec, planned, folder, report, is_demo=is_demo)
                    else:
                        backend = await self._load_images(spec, planned, folder, report, is_demo=is_demo)
            except StartError as error:
                self.note_failure(spec, error)
                raise
            finally:
                self._under_way -= 1
            if alone and begun == self._begun:  # else the memory of several loads is not separable
                try:
                    await asyncio.to_thread(planned.keep, spec, before, of_kv=of_kv)
                except BaseException:  # cancelled: nothing else refers to it
                    backend.terminate()
                    raise
            return backend

    def note_failure(self, spec: ModelSpec, error: StartError) -> None:
        """Have the next load take a smaller KV cache, if this one failed for lack of a GPU's memory.

        What a model takes while it starts is an estimate until a load has succeeded.
        """
        if self.on_cpu or not isinstance(spec, ChatModelSpec) or _NO_MEMORY.search(str(error)) is None:
            return
        self._outgrown[spec.id] += 1
        _log.warning(
            "%s: the GPU's memory was not enough to load it as planned. Its next load takes %.0f %% of the planned KV "
            "cache. If that keeps happening, raise `activations_gib` of its variant in models.yaml.",
            *(spec.id, 100 * self.part_of_kv(spec)),
        )

    def part_of_kv(self, spec: ModelSpec) -> float:
        """Return the part of its planned KV cache that a model's next load takes."""
        return _KEPT_OF_KV ** self._outgrown[spec.id]

    def _plan_for(self, spec: ModelSpec) -> Planned:
        """Return the plan for its next load: the old one while others still have the memory of the new one."""
        if spec.id in self._loads and not self.ledger.takes_what_is_planned(spec.id):
            return self._loads[spec.id].planned
        return self.planned

    def served(self, model: str) -> Served | None:
        load = self._loads.get(model)
        return None if load is None else load.served

    def _serve(self, spec: ModelSpec, planned: Planned, served: Served, files: Files = frozenset()) -> None:
        self._loads[spec.id] = _Load(spec, planned, served, files)
        self.ledger.take(spec.id, served.planned_bytes)

    async def _load_chat(
        self, spec: ChatModelSpec, planned: Planned, folder: Path, report: Report, *, is_demo: bool
    ) -> VllmChat:
        sleep = planned.sleep(spec, self._turn)
        said = spec.engine.context_length
        spec = planned.chat_spec(spec, is_demo=is_demo, of_kv=self.part_of_kv(spec))
        self._check_cache(spec)
        spec = await asyncio.to_thread(with_fitting_context, spec, folder, self._hardware, chosen=said is None)
        tools = (self._starter("grammars"), self._pictures)
        adapters = self._adapters(spec, is_demo=is_demo)
        launch = Launch(spec, folder, self._starter_of(spec), report, self._metrics(), sleep, adapters=adapters)
        if not self.on_cpu:
            return await VllmChat.load(replace(launch, compiled=not spec.engine.enforce_eager), *tools)
        if adapters or not self.compiled.choose(spec, folder):
            return await VllmChat.load(replace(launch, compiled=False), *tools)
        with self.compiled.used(spec, folder):
            return await VllmChat.load(replace(launch, only_kept_code=spec.engine.enforce_eager is None), *tools)

    async def _load_auxiliary(
        self, spec: AuxiliaryModelSpec, planned: Planned, folder: Path, report: Report, *, is_demo: bool
    ) -> Backend:
        compiled = not self.on_cpu and not spec.engine.enforce_eager
        spec, sleep = planned.auxiliary_spec(spec, is_demo=is_demo), planned.sleep(spec, self._turn)
        how = (folder, self._starter_of(spec), report, self._metrics(), sleep, compiled)
        if not isinstance(spec, PoolingModelSpec):
            variant = planned.of(spec.id).variant
            lacks = self.lacks[spec.id] = frozenset(variant.lacks if variant is not None and not is_demo else ())
            spec = spec.model_copy(update={"capabilities": tuple(set(spec.capabilities) - lacks)})
            return await VllmTranscription.load(Launch(spec, *how))
        loaded = await VllmPooling.load(Launch(spec, *how))
        if isinstance(spec, EmbeddingModelSpec):
            await asyncio.to_thread(keep_source_of_vectors, self._data_dir, spec.id, folder)
        return loaded

    def _starter_of(self, spec: ModelSpec) -> processes.StarterThread:
        return self._starter(f"cpu-{spec.id}" if self.on_cpu else "gpu")

    def _metrics(self) -> CollectorRegistry | None:
        return CollectorRegistry() if self._vllm_metrics else None

    async def _load_images(
        self, spec: ImageModelSpec, planned: Planned, folder: Path, report: Report, *, is_demo: bool
    ) -> Backend:
        spec = planned.image_spec(spec, is_demo=is_demo)
        profile, threads, mark = spec.profile_of(demo=is_demo), self._cpu_threads(spec), self._mark_files
        return await ImageModel.load(
            spec, profile, folder, self._pictures, threads=threads, mark=mark, on_cpu=self.on_cpu, report=report
        )

    async def _load_speech(self, spec: SpeechModelSpec, report: Report) -> Backend:
        voices = self.voices.of(spec.id)
        if voices.problem is not None:
            raise voices.problem
        folder = self._weights_dir / spec.weights
        served = self.planned.served(spec, folder, is_demo=voices.only_demos)
        if voices.only_shipped and not voices.only_demos:
            served = replace(served, source="shipped", folder="")
        self._serve(spec, self.planned, served)
        threads = self._cpu_threads(spec)
        return await SpeechModel.load(
            spec, voices.voices, threads=threads, mark=self._mark_files, on_cpu=self.on_cpu, report=report
        )

    def _check_cache(self, spec: ChatModelSpec) -> None:
        """Raise `LoadError` for a KV cache that this machine can never hold: vLLM's error names none of our options."""
        cache_gib, ram_gib = spec.engine.kv_cache_gib or 0.0, self._hardware.ram_bytes / GIB
        if self.on_cpu and cache_gib > ram_gib:
            raise LoadError(
                f"{spec.id}: `kv_cache_gib` is {cache_gib:g}, and this machine has {ram_gib:.1f} GiB of RAM in all. "
                "Lower it in models.yaml; null takes 1."
            )

    def _cpu_threads(self, spec: ModelSpec) -> int:
        """Return a model's CPU threads: as models.yaml says, else one for a demo, else an equal share of the cores."""
        share = max(1, (os.cpu_count() or 1) // len(self.planned.engines))
        return spec.engine.cpu_threads or (1 if self.planned.is_demo(spec) else share)


Files: TypeAlias = frozenset[tuple[str, int, int]]
_LOADED = {".json", ".jinja", ".model", ".safetensors", ".tiktoken", ".txt"}


def files_in(folder: Path) -> Files:
    """Return name, size and time of change of each file that a load may read, to tell whether any has changed."""
    found = set()
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if file.suffix in _LOADED:
                known = file.stat()
                found.add((file.relative_to(folder).as_posix(), known.st_size, known.st_mtime_ns))
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _Load:
    spec: ModelSpec
    planned: Planned
    served: Served
    files: Files


# Enough for the first message of a coding agent: its instructions and tools are up to some 20,000 tokens.
_DEMO_CONTEXT = 32768
_DEMO_KV_GIB = 0.0625
_DEMO_SHARE = 0.1
_NO_MEMORY = re.compile(r"(?i)out of memory|free memory on device")
_KEPT_OF_KV = 0.7  # of a KV cache, each time that a load fails for lack of memory
_LEAST_CONTEXT = 256  # tokens: with less no conversation is possible


class Planned:
    """The plan for one models.yaml on this machine. Made at the start and at every reload."""

    def __init__(self, config: Config, weights_dir: Path, data_dir: Path | None, hardware: Hardware) -> None:
        self._weights_dir = weights_dir
        self._data_dir = data_dir
        self._on_gpu = bool(hardware.gpus)
        footprints = Footprints() if data_dir is None else Footprints.read(data_dir)
        self._own = own_folders(config, weights_dir)
        here = variants_here(config, weights_dir)
        self.plan: Plan | Refusal = plan(config, hardware, footprints, self._own, here)
        """The plan of what is served: from weights on the disk only."""
        self._best = plan(config, hardware, footprints, self._own)
        self.engines: dict[str, ModelSpec] = {engine.id: engine for engine in self._each_engine(config)}
        """The entry of each engine, of all models and replicas, by its name."""
        uses = self.plan.devices if isinstance(self.plan, Plan) else ()
        self._devices = {use.device.index: use.device for use in uses}
        self._tell(config)

    def _each_engine(self, config: Config) -> Iterator[ModelSpec]:
        for spec in config.models.values():
            yield spec
            for replica in self.of(spec.id).replicas:
                yield spec.model_copy(update={"id": replica.id})

    def _tell(self, config: Config) -> None:
        refused = next((found for found in (self.plan, self._best) if isinstance(found, Refusal)), None)
        if refused is not None:
            _log.error("%s. Smallest change: %s.", refused.message, refused.change)
        best = {} if isinstance(self._best, Refusal) else self._best.chosen
        for model, spec in config.models.items():
            served, better = self.of(model).variant, best.get(model)
            if served not in spec.variants or better not in spec.variants or isinstance(spec, SpeechModelSpec):
                continue  # it is a demo, or a folder of the operator's own
            if spec.variants.index(better) < spec.variants.index(served):
                what = "%s is served with %s. %s, which is better, fits this machine: hearth weights pull %s"
                _log.info(what, model, served.id, better.id, model)

    def of(self, engine: str) -> Placed:
        """Return the placement of a model or a replica; an empty one if the plan has none."""
        placed = self.plan.of(engine) if isinstance(self.plan, Plan) else None
        return placed or Placed(engine, "unplanned")

    def folder(self, spec: ModelSpec) -> tuple[Path, bool]:
        """Return the folder to load, and whether it is the demo: the operator's own, else the plan's, else the demo.

        Raises `LoadError` if there is none, and on GPUs if the plan was refused because of this model.
        """
        found = self._real_folder(spec)
        if found is None and spec.demo is not None:
            return weights_dir(spec.demo), True
        if found is None:
            best = self._best.of(spec.id) if isinstance(self._best, Plan) else None
            pull = f" 2. hearth weights pull {spec.id};" if best and best.variant else ""
            raise LoadError(
                f"{spec.id}: there is no folder {spec.weights!r} in the weights directory. Pick one: 1. put the "
                f"model's files there;{pull} {3 if pull else 2}. set `demo` in models.yaml; {4 if pull else 3}. take "
                "the model out of models.yaml."
            )
        if self._on_gpu and isinstance(self.plan, Refusal) and spec.id in self.plan.models:
            raise LoadError(f"{self.plan.message}. Smallest change: {self.plan.change}.")
        return found, False

    def is_demo(self, spec: ModelSpec) -> bool:
        return spec.demo is not None and self._real_folder(spec) is None

    def _real_folder(self, spec: ModelSpec) -> Path | None:
        own = self._weights_dir / spec.weights
        if own.is_dir():
            return own
        variant = self.of(spec.id).variant
        planned = None if variant is None else self._weights_dir / variant.id
        return planned if planned is not None and is_complete(planned) else None

    def memory_plan(self) -> MemoryPlan:
        """Return the budget of each device and the share of each model; nothing if the plan was refused.

        A model that is served by its demo has the demo's share, whatever is planned instead.
        """
        if not isinstance(self.plan, Plan):
            return MemoryPlan()
        budgets = {}
        for index, device in self._devices.items():
            sleepers = sum(one.swap_by == "sleep" and index in one.gpus for one in self.plan.models)
            budgets[index] = device.budget_bytes - asleep_bytes(sleepers)  # sleepers keep some
        shares = {}
        for spec in self.engines.values():
            swaps = self.of(spec.id).swap_by is not None
            shares[spec.id] = Share(self._bytes_on(spec), swaps, spec.keep_loaded, spec.unload_after_seconds)
        return MemoryPlan(budgets, shares)

    def _bytes_on(self, spec: ModelSpec) -> dict[int | None, int]:
        placed = self.of(spec.id)
        if placed.need is None:
            return {}
        if placed.state != "demo" and self.is_demo(spec):
            need = demo_need(spec, tuple(self._devices.values()))
            return dict.fromkeys(placed.gpus[:1] or (None,), need.weights_bytes)
        sizes: dict[int | None, int] = dict.fromkeys(placed.places, placed.device_bytes)
        if placed.ram_bytes and placed.swap_by != "sleep":
            sizes[None] = sizes.get(None, 0) + placed.ram_bytes
        return sizes

    def sleep(self, spec: ModelSpec, turn: contextlib.AbstractAsyncContextManager[Any]) -> Sleep | None:
        """Return how a model sleeps; None if it is ended instead."""
        placed = self.of(spec.id)
        if placed.swap_by != "sleep" or not placed.gpus or self.is_demo(spec):
            return None
        return Sleep(placed.gpus, placed.device_bytes - ASLEEP_BYTES, turn)

    def served(self, spec: ModelSpec, folder: Path, *, is_demo: bool) -> Served:
        """Return what a model is loaded with, given its `folder`."""
        planned_bytes = self._bytes_on(spec)
        if is_demo:
            return Served("demo", spec.demo or "", planned_bytes)
        own = folder == self._weights_dir / spec.weights
        return Served("own" if own else "variant", folder.relative_to(self._weights_dir).as_posix(), planned_bytes)

    def chat_spec(self, spec: ChatModelSpec, *, is_demo: bool, of_kv: float = 1.0) -> ChatModelSpec:
        """Fill in what models.yaml leaves to the plan: context, split, and the memory in bytes.

        `of_kv`: the part of the planned KV cache that is taken.
        """
        placed = _with_less(self.of(spec.id), of_kv)
        values: dict[str, Any] = {}
        if is_demo:
            values = {"context_length": _DEMO_CONTEXT, "kv_cache_gib": _DEMO_KV_GIB}
            if self._on_gpu:  # even without a plan, demos must leave each other memory
                values["gpu_memory_utilization"] = _DEMO_SHARE
        elif placed.need is not None and placed.variant is not None:
            # On a CPU the operator's own folder is served by its own configuration
            if self._on_gpu or model_of(spec.id) not in self._own:
                values = {"context_length": placed.context_length, "dtype": placed.variant.dtype}
                if placed.kv_bytes and placed.need.share is None:
                    values["kv_cache_gib"] = placed.kv_bytes / GIB
            if placed.gpus:
                values["tensor_parallel_size"] = placed.need.split
        if placed.utilization is not None:
            values["gpu_memory_utilization"] = placed.utilization
        if is_demo:
            return _filled(spec, values, kv_cache_dtype="auto", speculative=None, engine_args={})  # for the real model
        if placed.sequences is not None:  # vLLM would refuse to start with more
            return _filled(spec, values, max_num_seqs=placed.sequences)
        return _filled(spec, values)

    def auxiliary_spec(self, spec: AuxiliaryModelSpec, *, is_demo: bool) -> AuxiliaryModelSpec:
        """Fill in what models.yaml leaves to the plan: the longest input, the number format and the memory."""
        placed = self.of(spec.id)
        values: dict[str, Any] = {}
        if is_demo:
            values = {"kv_cache_gib": _DEMO_KV_GIB, "gpu_memory_utilization": _DEMO_SHARE}
        elif placed.variant is not None and spec.id not in self._own:
            values = {"dtype": placed.variant.dtype}
            if isinstance(spec, PoolingModelSpec):
                values["max_input_tokens"] = placed.variant.context_length
        if placed.kv_bytes and not is_demo:
            values["kv_cache_gib"] = placed.kv_bytes / GIB
        if placed.utilization is not None:
            values["gpu_memory_utilization"] = placed.utilization
        return _filled(spec, values)

    def image_spec(self, spec: ImageModelSpec, *, is_demo: bool) -> ImageModelSpec:
        """Fill in the profile, offload and number format of the planned variant."""
        variant = self.of(spec.id).variant
        if is_demo or variant is None or spec.id in self._own:
            return spec
        planned = {"offload": variant.offload, "dtype": None if variant.dtype == "auto" else variant.dtype}
        return _filled(spec, planned).model_copy(update={"profile": variant.profile or spec.profile})

    def on_its_gpus(self, spec: ModelSpec) -> contextlib.AbstractContextManager[None]:
        """Let processes that start in the block see the model's GPUs only. One model at a time."""
        gpus = ",".join(map(str, self.of(spec.id).gpus))
        named = {"CUDA_VISIBLE_DEVICES": gpus, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpus else {}
        return processes.with_variables(named)

    def taken(self, spec: ModelSpec, *, is_demo: bool) -> dict[int, int] | None:
        """Return the bytes in use on a model's devices (blocks for 50 ms); None if they are not to be recorded."""
        placed = self.of(spec.id)
        unknown = is_demo or self._data_dir is None or model_of(spec.id) in self._own or placed.variant is None
        return None if unknown else _taken(placed)

    def keep(self, spec: ModelSpec, before: dict[int, int] | None, *, of_kv: float) -> None:
        """Record what a load took since `before`, if nothing else took or freed memory meanwhile. Blocks.

        `of_kv`: the part of its KV cache that it was loaded with.
        """
        placed = _with_less(self.of(spec.id), of_kv)
        if before is None or self._data_dir is None or not (placed.variant and placed.need):
            return
        took = max(used - before.get(place, 0) for place, used in _taken(placed).items())
        took -= placed.kv_bytes + placed.need.adapters_bytes
        device = self._devices[placed.places[0]].name
        # Read again: another model may have been measured since
        known = Footprints.read(self._data_dir)
        known.with_(placed.variant, placed.need.split, device, took).write(self._data_dir)


def with_fitting_context(spec: ChatModelSpec, folder: Path, hardware: Hardware, *, chosen: bool) -> ChatModelSpec:
    """Shorten a context that was `chosen` here and has no room in the KV cache. Reads `folder`/config.json.

    Raises `LoadError` if models.yaml asks for a context without room, or hardly any fits: vLLM would notice only after
    reading the weights, or take memory for its tables of positions until the kernel kills it.
    """
    needs, engine = ContextNeeds.read(folder), spec.engine
    if needs is None:
        return spec
    memory_bytes = min((gpu.total_bytes for gpu in hardware.gpus), default=hardware.ram_bytes)
    if needs.tables_bytes > memory_bytes / 4:
        raise LoadError(
            f"{spec.id}: config.json has `max_position_embeddings` {needs.positions}, for which vLLM computes tables "
            f"of {needs.tables_bytes / GIB:.1f} GiB; the machine has {memory_bytes / GIB:.1f} GiB of memory. Write a "
            "smaller number there: the longest conversation that you want to serve."
        )
    cache_gib = engine.kv_cache_gib or (None if hardware.gpus else CPU_CACHE_GIB)
    if cache_gib is None or not needs.is_exact:
        return spec
    wide = 2.0 if engine.dtype == "float32" else 1.0
    wide = wide if engine.kv_cache_dtype == "auto" else 0.5
    gpu_bytes = memory_bytes if hardware.gpus else 0
    cache = needs.cache(engine.tensor_parallel_size, gpu_bytes, wide=wide, speculative=engine.speculative)
    wanted = engine.context_length or needs.positions
    longest = cache.longest(int(cache_gib * GIB), wanted)
    if wanted <= longest:
        return spec
    if not chosen or longest < _LEAST_CONTEXT:
        tokens = _LEAST_CONTEXT if chosen else wanted
        needed_gib = cache.bytes_of(1, tokens) / GIB
        lower = "" if longest < _LEAST_CONTEXT else f" or lower `context_length` to {longest}"
        raise LoadError(
            f"{spec.id}: one conversation of {tokens} tokens takes {needed_gib:.3g} GiB of KV cache, and there are "
            f"{cache_gib:.3g} GiB. Raise `kv_cache_gib` of its `engine` in models.yaml{lower}."
        )
    _log.warning(
        "%s: its context is %d tokens, not %d: a KV cache of %.3g GiB has no room for more. Raise `kv_cache_gib` of "
        "its `engine` in models.yaml, or write this `context_length` there.",
        *(spec.id, longest, wanted, cache_gib),
    )
    return spec.model_copy(update={"engine": engine.model_copy(update={"context_length": longest})})


def _filled(spec: _Spec, planned: Mapping[str, Any], **fixed: Any) -> _Spec:
    """Set `planned` values that `engine` leaves out, or has as null or auto, and always the `fixed` ones."""
    engine = spec.engine
    said = {key for key in engine.model_fields_set if getattr(engine, key) not in (None, "auto")}
    left = {key: value for key, value in planned.items() if key not in said}
    return spec.model_copy(update={"engine": engine.model_copy(update=left | fixed)})


def _with_less(placed: Placed, of_kv: float) -> Placed:
    """Return the placement with the part `of_kv` of its KV cache, if that is a share of the GPU."""
    if placed.utilization is None:
        return placed
    return replace(placed, kv_bytes=int(placed.kv_bytes * of_kv), utilization=placed.utilization * of_kv)


def _taken(placed: Placed) -> dict[int, int]:
    """Bytes taken on each GPU of a model, or in RAM by our children."""
    if placed.gpus:
        return {gpu.index: gpu.total_bytes - gpu.free_bytes for gpu in read_hardware().gpus if gpu.index in placed.gpus}
    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += child.memory_full_info().uss
    return {-1: total}
