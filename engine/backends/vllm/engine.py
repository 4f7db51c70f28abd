"""A model on vLLM, from its start to its end: one `AsyncLLM`, whose core is a child process.

The plan says whether it can sleep, the pool when. Chat models are here; pooling.py has embeddings and rerankers,
transcription.py transcription.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from PIL import Image
from prometheus_client import CollectorRegistry

from engine.admission import Admission, KvGroup, Room
from engine.backends import Backend
from engine.backends.vllm import compat, processes
from engine.backends.vllm.processes import EngineWatch, end_engine, processes_of
from engine.config import AuxiliaryModelSpec, ChatModelSpec
from engine.config.models import SpeculativeSpec
from engine.errors import LoadError, RequestError, StartError, UnsupportedCapabilityError
from engine.media import Pictures
from engine.placement.hardware import read_hardware
from engine.placement.types import CPU_CACHE_GIB
from engine.process.parent import NICE_ON_CPU, give_way
from engine.process.watchdog import Patience
from engine.stream import TokenStream, fold
from engine.types import ChatRequest, Report, TextRequest
from engine.weights.layouts import LoraAdapter, room_for_rank
from engine.weights.safety import check_chat_folder, read_config

if TYPE_CHECKING:
    from engine.backends.vllm.serving import Serving

_log = logging.getLogger("hearth.vllm")

SpecT = TypeVar("SpecT", bound=ChatModelSpec | AuxiliaryModelSpec)
AuxiliaryT = TypeVar("AuxiliaryT", bound=AuxiliaryModelSpec)

# A first prompt of fewer tokens ends in SIGILL on AMX machines; this one has more than 24 in any tokenizer.
WARM_UP = "one two three four five six seven eight nine ten " * 4
# Of one picture, as a chat model sees it: 4,096 tokens of Qwen's.
MOST_PICTURE_PIXELS = 2048 * 2048
_SLEEP_TIMEOUT_SECONDS = 120.0  # weights are copied over the bus; a slower one hangs
_LEAST_FREED = 0.8  # of what sleep should free: releases of vLLM have slept without freeing anything (vLLM issue 32714)


@dataclass(frozen=True, slots=True)
class Sleep:
    """How a model sleeps: which GPUs it frees, and how many bytes of each. `turn` is held while it wakes.

    vLLM's level 1: weights move to RAM, the KV cache is dropped, the process stays. Level 2 is not used: models woke
    from it without their weights (vLLM issue 29341).
    """

    gpus: tuple[int, ...]
    frees_bytes: int
    turn: contextlib.AbstractAsyncContextManager[Any]


@dataclass(frozen=True, slots=True)
class Launch(Generic[SpecT]):
    """What an engine needs to start: the model's entry, its folder, the thread for blocking starts, and options."""

    spec: SpecT
    weights: Path
    starter: processes.StarterThread
    report: Report
    metrics: CollectorRegistry | None = None
    """For vLLM's own metrics; None: it has none."""
    sleep: Sleep | None = None
    """How it frees its GPUs for another model; None: by ending."""
    compiled: bool = True
    """False: it starts sooner and answers slower."""
    only_kept_code: bool = False
    """Only load compiled code that was kept; the start fails if there is none."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Folders of LoRA adapters that answer beside it, by the names of their models."""


class VllmEngine(Backend, Generic[SpecT]):
    """One loaded model. Made within `starting`; a restart makes a new one. A subclass sets `admission`."""

    def __init__(self, engine: Any, launch: Launch[SpecT], watch: EngineWatch) -> None:
        self._engine, self._watch = engine, watch
        self._launch: Launch[SpecT] = launch
        self.metrics = launch.metrics
        self.compiled = launch.compiled
        self.died = asyncio.Event()
        watch.on_exit(self._on_exit)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(self._watch.pids())

    async def sleep(self) -> bool:
        sleep, name = self._launch.sleep, self._launch.spec.id
        if sleep is None:
            return False
        before = await _free_bytes(sleep.gpus)
        try:
            async with asyncio.timeout(_SLEEP_TIMEOUT_SECONDS):
                await self._engine.sleep(level=1)
        except Exception:  # noqa: BLE001  # any error of vLLM: the engine is ended instead
            _log.exception("%s did not fall asleep; it is stopped and will be loaded again", name)
            return False
        after = await _free_bytes(sleep.gpus)
        freed = min((after[gpu] - before[gpu] for gpu in sleep.gpus if gpu in after and gpu in before), default=0)
        if freed < _LEAST_FREED * sleep.frees_bytes:
            _log.warning("%s freed only %d of %d bytes asleep; it is stopped instead", name, freed, sleep.frees_bytes)
            return False
        return True

    async def wake(self) -> None:
        if self._launch.sleep is not None:
            async with self._launch.sleep.turn, asyncio.timeout(_SLEEP_TIMEOUT_SECONDS):
                await self._engine.wake_up()

    async def shutdown(self) -> None:
        """End the engine process; whatever still runs fails. Takes up to 5 s."""
        self._watch.end()
        self._close()
        self._engine.output_handler.cancel()  # else vLLM logs the end of its process with a traceback
        self._fail_requests()
        # Not on the starter's thread, where another model may be starting for minutes.
        await asyncio.to_thread(end_engine, self._engine, 5)

    def terminate(self) -> None:
        self._watch.end()
        self._close()
        self._watch.kill()
        end_engine(self._engine, 0)  # its sockets; the processes have been killed

    def _close(self) -> None:
        """End helpers beside the engine."""

    def _on_exit(self) -> None:
        # First: when requests end below, others would be dispatched to the dead engine.
        self.admission.close()
        try:
            self._fail_requests()
        finally:
            self.died.set()

    def _fail_requests(self) -> None:
        """End all that waits for the engine. vLLM's own monitor may find its client already shut down."""
        from vllm.v1.engine.exceptions import EngineDeadError

        with compat.guarded("death"):
            self._engine.engine_core.resources.engine_dead = True  # refuses requests that are being tokenised
            self._engine.output_processor.propagate_error(EngineDeadError())


class VllmAuxiliary(VllmEngine[AuxiliaryT]):
    """One loaded model that is small compared to chat models: its admission counts sequences, not the KV cache."""

    def __init__(self, engine: Any, launch: Launch[AuxiliaryT], watch: EngineWatch) -> None:
        super().__init__(engine, launch, watch)
        spec = launch.spec.engine
        self.admission = Admission(
            Room(
                spec.max_num_seqs,
                spec.max_queued_requests,
                kept_for_interactive=spec.max_num_seqs // 8,
                kept_for_newcomers=min(max(1, spec.max_num_seqs // 32), spec.max_num_seqs - 1),
                fair=spec.fair_queue,
            )
        )

    def give_way_to_chat(self) -> None:
        """On a CPU, lower the priority below that of chat models."""
        for pid in self.pids if processes.runs_on_cpu() else ():
            give_way(pid, NICE_ON_CPU)


@contextlib.asynccontextmanager
async def starting(
    launch: Launch[SpecT], arguments: Callable[[], dict[str, Any]]
) -> AsyncIterator[tuple[Any, EngineWatch]]:
    """Start an engine with vLLM's `arguments`, made on the starter's thread. An error in the block ends it.

    Raises `LoadError` if the model can never be loaded as configured; causes of other exceptions may pass.
    """
    patience = Patience.of(launch.spec.engine.stall_seconds, on_cpu=processes.runs_on_cpu())
    watch = EngineWatch(launch.spec.id, patience)
    async with contextlib.AsyncExitStack() as undo:
        undo.callback(watch.kill)  # who stops waiting for a start also ends it
        undo.callback(watch.end)
        engine = await launch.starter.run(partial(start_engine, launch, arguments, watch), watch.started)
        undo.push_async_callback(asyncio.to_thread, end_engine, engine, 0)
        undo.callback(watch.kill)
        if not watch.pids():  # vLLM started them itself (`start_own_processes`)
            for process in processes_of(engine):
                watch.started(process)
        engine._run_output_handler()  # noqa: SLF001  # built off the loop; nothing public starts it
        # If its output handler fails, vLLM logs that and refuses every request from then on.
        engine.output_handler.add_done_callback(lambda _: None if watch.ended else watch.kill())
        watch.guard.watch(engine.is_sleeping)  # a question that costs nothing
        yield engine, watch
        undo.pop_all()


class VllmChat(VllmEngine[ChatModelSpec]):
    """One loaded chat model. Made by `load`."""

    def __init__(self, engine: Any, serving: Serving, launch: Launch[ChatModelSpec], watch: EngineWatch) -> None:
        super().__init__(engine, launch, watch)
        self._serving = serving
        self.chat, self.text, self.token_ids = serving.chat, serving.text, serving.token_ids
        self.tokenize, self.detokenize = serving.tokenize, serving.detokenize
        self.admission = serving.admission
        self.context_length, self.reasons = serving.context_length, serving.reasons
        self.lacks: frozenset[str] = frozenset()
        self.refused_adapters: Mapping[str, str] = {}

    @classmethod
    async def load(
        cls, launch: Launch[ChatModelSpec], grammar_starter: processes.StarterThread, pictures: Pictures
    ) -> VllmChat:
        """Start the engine, check what models.yaml claims, and answer one warm-up prompt. Raises like `starting`."""
        await asyncio.to_thread(check_chat_folder, launch.weights)
        adapters = await asyncio.to_thread(_Adapters.read, launch.adapters, launch.weights)
        async with starting(launch, lambda: engine_arguments(launch) | adapters.arguments()) as (engine, watch):
            launch.report("checking the chat template", 0.8)
            groups = await _kv_groups(engine)
            build = partial(_build_serving, engine, launch.spec, grammar_starter, pictures, groups)
            serving = await launch.starter.run(build)
            model = cls(engine, serving, launch, watch)
            model.lacks = await model._lacking()
            await serving.prepare()
            serving.adapters = await adapters.loaded(engine)
            model.refused_adapters = adapters.refused
            launch.report("answering a warm-up prompt", 0.9)
            await model._warm_up()
        return model

    def _close(self) -> None:
        self._serving.grammars.close()

    async def _lacking(self) -> frozenset[str]:
        """Return the capabilities that models.yaml claims and the model does not have; each is a line in the log.

        Raises `LoadError` where its chat template refuses a plain question.
        """
        spec = self._launch.spec
        lacking = {name: why async for name, why in self._found_lacking() if name in spec.capabilities}
        for capability, why in lacking.items():
            _log.warning(
                "%s: models.yaml claims `%s`, but %s. It is served without it (docs/own-models.md).",
                *(spec.id, capability, why),
            )
        return frozenset(lacking)

    async def _found_lacking(self) -> AsyncIterator[tuple[str, str]]:
        if not self._engine.model_config.is_multimodal_model:
            yield "vision", "the model takes no pictures"
        tool = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
        plain = ChatRequest(request_id="probe", model="", messages=[{"role": "user", "content": "?"}])
        try:
            length = len(await self.token_ids(plain))
        except RequestError as error:
            if not self._serving.is_without_template(error):
                cause = error.__cause__
                line = processes.cause_of(cause).line if isinstance(cause, Exception) else error.message
                raise LoadError(
                    f"{self._launch.spec.id}: its chat template refuses a plain question: {line}. Correct it, or put "
                    "another one into the folder as chat_template.jinja."
                ) from error
            for capability in ("chat", "function_calling", "vision"):
                yield capability, "the folder has no chat template"
            return
        try:
            if len(await self.token_ids(replace(plain, tools=[tool]))) == length:
                yield "function_calling", "its chat template takes no tools"
        except UnsupportedCapabilityError:
            yield "function_calling", "it has no tool parser: no known one fits, or models.yaml says `none`"
        except RequestError:
            yield "function_calling", "its chat template refuses tools"

    async def _warm_up(self) -> None:
        spec, content = self._launch.spec, cast("Any", WARM_UP)
        common: dict[str, Any] = {"request_id": "warm-up", "model": spec.id, "temperature": 0, "max_tokens": 8}
        stream = TokenStream()
        if "chat" in self.lacks:
            text = TextRequest(**common, ignore_eos=True, prompts=(WARM_UP,), top_logprobs=1)
            await self.text(text, stream)
        else:
            if "vision" in spec.capabilities and "vision" not in self.lacks:
                picture = {"type": "image_url", "image_url": {"url": _white_picture()}}
                content = [picture, {"type": "text", "text": WARM_UP}]
            message = {"role": "user", "content": content}
            # Logprobs are compiled on first use on a GPU
            await self.chat(ChatRequest(**common, ignore_eos=True, messages=[message], logprobs=True), stream)
        await fold(stream)


@dataclass(frozen=True, slots=True)
class _Adapters:
    """LoRA adapters of one engine, by name: checked before it starts, loaded once it has, all kept in memory.

    One that cannot be used is refused alone, and `refused` says why: its base and the others answer.
    """

    usable: Mapping[str, LoraAdapter]
    refused: dict[str, str]

    @classmethod
    def read(cls, folders: Mapping[str, Path], base: Path) -> Self:
        """Check each folder, and that it was made for the model in `base`. Blocks."""
        usable, refused = {}, {}
        for name, folder in folders.items():
            try:
                adapter = LoraAdapter.read(folder)
                adapter.check_base(base)
                usable[name] = adapter
            except LoadError as error:
                refused[name] = error.message
                _log.error("%s cannot be served: %s", name, error.message)
        return cls(usable, refused)

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments that keep room for them."""
        if not self.usable:
            return {}
        # On a CPU, vLLM applies the last slot to requests for the base that share a step with an adapter: keep it empty
        empty = int(processes.runs_on_cpu())
        return {
            "enable_lora": True,
            "max_loras": len(self.usable) + empty,
            "max_lora_rank": room_for_rank(max(one.rank for one in self.usable.values())),
            "lora_target_modules": sorted({name for one in self.usable.values() for name in one.targets}),
        }

    async def loaded(self, engine: Any) -> dict[str, Any]:
        """Load them into a started engine; return vLLM's request for each, None for one that it refuses."""
        from vllm.lora.request import LoRARequest

        found: dict[str, Any] = dict.fromkeys(self.refused)
        for number, (name, adapter) in enumerate(self.usable.items(), 1):
            request = LoRARequest(name, number, str(adapter.folder.resolve()))
            try:
                await engine.add_lora(request)
                found[name] = request
            except Exception as error:  # noqa: BLE001  # vLLM raises anything for tensors that do not fit
                self.refused[name] = f"vLLM does not load it: {next(iter(str(error).splitlines()), '')[:300]}"
                _log.error("%s cannot be served: %s", name, self.refused[name])
                found[name] = None
        return found


async def _kv_groups(engine: Any) -> tuple[KvGroup, ...]:
    """Ask the core for the groups of its KV cache. Empty if this version of vLLM does not tell."""
    if not await asyncio.to_thread(compat.fits, "kv groups"):
        return ()
    groups = await engine.engine_core.call_utility_async("get_kv_cache_group_metadata")
    speculative = engine.vllm_config.speculative_config
    guessed = speculative.num_speculative_tokens if speculative else 0
    return tuple(_kv_group(group, guessed) for group in groups)


def _kv_group(group: Mapping[str, Any], guessed: int) -> KvGroup:
    """Return what a sequence takes of a group. `guessed`: tokens per step, each with a state of its own."""
    size = group["block_size"]
    if group["kind"] == "mamba":
        return KvGroup(size, most_blocks=2, more_blocks=guessed)  # its state, and the next one
    is_window = group["kind"].startswith("sliding_window")
    return KvGroup(size, math.ceil(group["sliding_window"] / size) + 1 if is_window else None)


def _build_serving(*arguments: Any) -> Serving:
    """Call on a thread: the import takes as long as that of vLLM."""
    from engine.backends.vllm.serving import build_serving

    return build_serving(*arguments)


def _white_picture() -> str:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "white").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def start_engine(launch: Launch[SpecT], arguments: Callable[[], dict[str, Any]], watch: EngineWatch) -> Any:
    """Block until the core is ready (4 s to minutes); return the `AsyncLLM`. Raises `LoadError` or `StartError`."""
    if watch.ended:
        raise StartError("It was given up before its turn.")
    launch.report("importing vLLM", 0.1)
    compat.check(launch.spec.id)
    with processes.causes_told(launch.spec.id, may_be_the_code=launch.only_kept_code):
        return _start_engine(launch, arguments)


def _start_engine(launch: Launch[SpecT], arguments: Callable[[], dict[str, Any]]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from engine.backends.vllm.outputs import stat_logger_into

    stat_logger = None if launch.metrics is None else compat.apply("metrics", lambda: stat_logger_into(launch.metrics))
    with processes.changing_environment():
        with processes.CONFIG_LOCK:
            launch.report("reading the model's configuration", 0.4)
            compat.apply("fresh folders", forget_folders)
            forget_capability(current_platform)
            if isinstance(launch.spec, ChatModelSpec):
                _check_known(launch.spec, AsyncEngineArgs)
            config = AsyncEngineArgs(**arguments()).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
            processes.start_own_processes()
        launch.report(f"starting the engine process{', compiled' if launch.compiled else ''}", 0.5)
        processes.job.may_compile = not launch.only_kept_code
        with processes.phases_shown(launch.report):
            return AsyncLLM.from_vllm_config(
                vllm_config=config,
                usage_context=UsageContext.OPENAI_API_SERVER,
                enable_log_requests=False,
                disable_log_stats=stat_logger is None,
                stat_loggers=None if stat_logger is None else [stat_logger],
            )


def _check_known(spec: ChatModelSpec, arguments: Any) -> None:
    """Raise `LoadError` for `engine_args` of models.yaml that this version of vLLM does not take."""
    unknown = sorted(set(spec.engine.engine_args) - {each.name for each in fields(arguments)})
    if unknown:
        raise LoadError(f"{spec.id}: this vLLM has no {', '.join(unknown)}. Take it out of `engine_args`.")


def forget_folders() -> None:
    """Empty vLLM's caches of model folders, which are by name: a folder may have been replaced.

    One of them keeps a method of each tokenizer, and thereby three copies of the tokenizer of every load.
    """
    from vllm.renderers import hf
    from vllm.tokenizers import registry
    from vllm.transformers_utils import config, processor
    from vllm.utils import func_utils

    hf._PROCESSOR_CHAT_TEMPLATES.clear()  # noqa: SLF001
    for remembered in (
        registry.cached_get_tokenizer,
        registry.cached_resolve_tokenizer_args,
        processor.cached_get_processor,
        processor.cached_get_feature_extractor,
        processor.cached_get_image_processor,
        processor.cached_get_video_processor,
        config.checkpoint_has_lm_head,
        func_utils._supports_kw,  # noqa: SLF001
    ):
        remembered.cache_clear()


def forget_capability(platform: Any) -> None:
    """Have vLLM read the capability of the first visible GPU again: models may see different GPUs."""
    for kind in type(platform).__mro__:
        method: Any = getattr(vars(kind).get("get_device_capability"), "__func__", None)
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def common_arguments(launch: Launch[SpecT]) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs` that all models have."""
    engine = launch.spec.engine
    arguments: dict[str, Any] = {
        "model": str(launch.weights.resolve()),  # what it compiles is found by this name again
        "served_model_name": [launch.spec.id],
        "load_format": "safetensors",
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        "dtype": engine.dtype,
        "max_num_seqs": engine.max_num_seqs,
        "scheduling_policy": "priority",
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "enforce_eager": not launch.compiled,
        "enable_sleep_mode": launch.sleep is not None,
    }
    cache_gib = engine.kv_cache_gib
    if processes.runs_on_cpu():
        # By class path: the short name "uni" is turned into a process of its own on a CPU.
        arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        cache_gib = cache_gib or CPU_CACHE_GIB
        from engine.backends.vllm.plugin import register_kernels

        kernels = None if launch.compiled else compat.apply("cpu kernels", register_kernels)
        if kernels is not None:
            arguments["ir_op_priority"] = kernels
    if cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(cache_gib * 2**30)
    return arguments


def auxiliary_arguments(launch: Launch[AuxiliaryT], saved_in: str | None) -> dict[str, Any]:
    """Return vLLM's arguments for a model whose weights are `saved_in` this number format."""
    arguments = common_arguments(launch)
    if launch.spec.engine.dtype == "auto" and processes.runs_on_cpu() and saved_in != "bfloat16":
        arguments["dtype"] = "float32"  # vLLM would take float16, with which few CPUs compute
    return arguments


def engine_arguments(launch: Launch[ChatModelSpec]) -> dict[str, Any]:
    """Return vLLM's `AsyncEngineArgs` of a chat model. Imports vLLM."""
    from engine.backends.vllm.tool_calls import reasoning_parser_in

    spec, engine = launch.spec, launch.spec.engine
    images = engine.max_images if "vision" in spec.capabilities else 0
    arguments = {
        **common_arguments(launch),
        "max_model_len": engine.context_length,
        "max_logprobs": 20,
        "tensor_parallel_size": engine.tensor_parallel_size,
        # Video and sound, which some models take, are never sent: no memory is kept for them.
        "limit_mm_per_prompt": {"image": images, "video": 0, "audio": 0},
        # Off: its two halves must get all pictures in the same order, and our admission changes the order.
        "mm_processor_cache_gb": 0,
        **(_fewer_pixels(launch.weights) if images else {}),
    }
    reasoning_parser = reasoning_parser_in(launch.weights, spec)
    if reasoning_parser is not None:
        arguments["reasoning_parser"] = reasoning_parser
    if engine.speculative is not None:
        arguments["speculative_config"] = _speculative(engine.speculative)
    if engine.kv_cache_dtype != "auto":
        arguments["kv_cache_dtype"] = engine.kv_cache_dtype
    if not processes.runs_on_cpu():
        arguments["gdn_prefill_backend"] = "triton"  # FlashInfer, on newer GPUs, would need nvcc
    return arguments | engine.engine_args


def _fewer_pixels(folder: Path) -> dict[str, Any]:
    """Return arguments that shrink large pictures, for a family that would take them whole.

    Qwen's models turn 16 megapixels into 16,384 tokens in one step: that takes 2 GiB of a GPU, which no plan counts,
    and would end the engine.
    """
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            config = read_config(folder / name)
            config = config.get("image_processor") or config
            size = config.get("size")
            most = (size.get("longest_edge") if isinstance(size, dict) else None) or config.get("max_pixels")
            if isinstance(most, int) and most > MOST_PICTURE_PIXELS:
                return {"mm_processor_kwargs": {"max_pixels": MOST_PICTURE_PIXELS}}
    return {}


def _speculative(spec: SpeculativeSpec) -> dict[str, Any]:
    found: dict[str, Any] = {"method": spec.method, "num_speculative_tokens": spec.tokens}
    if spec.method == "ngram":
        found |= {"prompt_lookup_max": spec.longest_match, "prompt_lookup_min": spec.shortest_match}
    return found


async def _free_bytes(gpus: tuple[int, ...]) -> dict[int, int]:
    hardware = await asyncio.to_thread(read_hardware)
    return {gpu.index: gpu.free_bytes for gpu in hardware.gpus if gpu.index in gpus}
