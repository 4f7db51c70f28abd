"""The engine: every model of models.yaml behind one object that knows nothing of HTTP, keys or databases.

A request is checked here against the entry of its model: whether the model can do what is asked.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry

from engine.backends import Backend
from engine.backends.diffusers.model import ImageModel
from engine.backends.tts.model import SpeechModel
from engine.backends.vllm import processes
from engine.backends.vllm.engine import VllmChat
from engine.backends.vllm.pooling import VllmPooling
from engine.backends.vllm.transcription import VllmTranscription
from engine.config import (
    ChatModelSpec,
    Config,
    EmbeddingModelSpec,
    ImageModelSpec,
    ModelSpec,
    PoolingModelSpec,
    RerankModelSpec,
    SpeechModelSpec,
    TranscriptionModelSpec,
)
from engine.config.models import SIZES, model_of
from engine.errors import EngineError, NotStartedError, RequestError, UnsupportedCapabilityError
from engine.media import ImageLimits, Pictures, PixelLoad, image_places
from engine.placement.hardware import Prefer
from engine.pool.loader import Loader
from engine.pool.pool import Pool
from engine.pool.records import CompiledModels, LoadTimes
from engine.stream import ImageStream, PoolingStream, SpeechStream, Stream, TokenStream, TranscriptionStream
from engine.types import (
    ChatRequest,
    EmbeddingRequest,
    GenerationRequest,
    ImageRequest,
    ModelHealth,
    ModelInfo,
    ModelLoad,
    ModelStatus,
    RerankRequest,
    TextRequest,
    Tokenized,
    TranscriptionRequest,
    Urgency,
)
from engine.voices.types import SpeechRequest, Voice

_Spec = TypeVar("_Spec", bound=ModelSpec)
_Generation = TypeVar("_Generation", bound=GenerationRequest)


class Engine:
    """Every configured model. Made in an event loop and used only from there.

    `start` returns at once and loads in the background; requests raise `ModelLoadingError` until their model
    is ready. On purpose, all methods that take a request raise only `EngineError`s.
    """

    def __init__(  # noqa: PLR0913  # what decides how this machine runs the models
        self,
        config: Config,
        *,
        weights_dir: Path,
        data_dir: Path | None = None,
        images: ImageLimits | None = None,
        mark_files: bool = True,
        ram_gib: float | None = None,
        prefer: Prefer = "resident",
        vllm_metrics: bool = False,
        keep_loads: bool = True,
    ) -> None:
        """`images` limits the pictures that clients send; `mark_files`: images and sound made here say so in metadata.

        `data_dir` keeps measurements of loads, for the next plan; None: nothing is kept. `ram_gib` is all the RAM that
        models may take; None: what is free, less a margin. `prefer`: models that stay loaded, or better ones that take
        turns. `vllm_metrics`: whether vLLM counts.
        Without `keep_loads` no measurements are kept, only what was compiled: for loads that are not usual.
        """
        loads_dir = data_dir if keep_loads else None
        self.config = config
        self._created = int(time.time())
        self._pictures = Pictures(images or ImageLimits())
        self._loader = Loader(
            config,
            weights_dir,
            self._pictures,
            CompiledModels(data_dir, processes.versions),
            mark_files=mark_files,
            data_dir=loads_dir,
            ram_gib=ram_gib,
            prefer=prefer,
            vllm_metrics=vllm_metrics,
        )
        engines = self._loader.planned.engines.values()
        self._pool = Pool(engines, self._loader.load, self._loader.ledger, LoadTimes(loads_dir))

    async def start(self) -> None:
        self._loader.prepare()
        self._pool.start()

    async def stop(self) -> None:
        """End all models gracefully (a few seconds); running requests fail."""
        await self._pool.stop()
        self._loader.clean_up()

    async def terminate(self) -> None:
        await self._pool.terminate()
        self._loader.clean_up()

    async def chat(self, request: ChatRequest, stream: TokenStream) -> TokenStream:
        """Answer a conversation. Its steps go into `stream`, which is returned once the request is dispatched.

        Every refusal is raised here, and then `stream` has ended and called its `on_end` callbacks. Batch and
        background requests also wait for a model that is being restarted.
        """
        return await self._begin(request, stream, request.n)

    async def text(self, request: TextRequest, stream: TokenStream) -> TokenStream:
        """Continue plain texts, like `chat`."""
        return await self._begin(request, stream, len(request.prompts) * request.n)

    async def _begin(self, request: ChatRequest | TextRequest, stream: TokenStream, sequences: int) -> TokenStream:
        asked = request
        try:
            while True:
                self._spec(asked.model, ChatModelSpec)
                request = self._addressed(asked)
                with await self._pool.acquire_for(request, sequences) as acquired:
                    backend, spec = self._chat_backend(asked.model, request.model)
                    check_request(spec, request)
                    try:
                        if isinstance(request, ChatRequest):
                            await backend.chat(request, stream)
                        else:
                            await backend.text(request, stream)
                    except NotStartedError:  # a death ends only what was running on the engine
                        if request.urgency == Urgency.INTERACTIVE and not self._pool.is_ready(
                            self._any_engine(asked.model)
                        ):
                            raise
                        continue
                    stream.keep(acquired.pop_all())
                    return stream
        except BaseException as error:
            stream.refuse(error)
            raise

    def _addressed(self, request: _Generation) -> _Generation:
        """Return the request with an engine's name as `model`, and the adapter, if any. A reload may change both."""
        base = self._base(request.model)
        adapter = None if base == request.model else request.model
        return replace(request, model=self._pool.engine_for(base, request.owner), adapter=adapter)

    def _base(self, model: str) -> str:
        """Return the model that has the engines of this one."""
        adapter = self.config.adapters.get(model)
        return model if adapter is None else adapter.base

    def _any_engine(self, model: str) -> str:
        return self._pool.engine_for(self._base(model), owner="")

    async def images(self, request: ImageRequest, stream: ImageStream) -> ImageStream:
        """Put the events of each image into `stream`. Closing it aborts the images that are not finished.

        Await the first item before answering: a refusal comes before it.
        """
        async with self._leased(request.model, ImageModelSpec, stream):
            cast("ImageModel", self._pool.get(request.model)).images(request, stream)
        return stream

    async def embed(self, request: EmbeddingRequest, stream: PoolingStream) -> PoolingStream:
        """Put the vector of each input into `stream` once it is computed. Closing it aborts the rest.

        A refusal that depends on the inputs is raised to the reader of the stream.
        """
        async with self._leased(request.model, EmbeddingModelSpec, stream):
            cast("VllmPooling", self._pool.get(request.model)).embed(request, stream)
        return stream

    async def rerank(self, request: RerankRequest, stream: PoolingStream) -> PoolingStream:
        """Put the score of each document into `stream`, like `embed`."""
        async with self._leased(request.model, RerankModelSpec, stream):
            cast("VllmPooling", self._pool.get(request.model)).rerank(request, stream)
        return stream

    async def transcribe(self, request: TranscriptionRequest, stream: TranscriptionStream) -> TranscriptionStream:
        """Put the segments of a transcript into `stream`, like `embed`."""
        async with self._leased(request.model, TranscriptionModelSpec, stream):
            spec = self._spec(request.model, TranscriptionModelSpec)
            if request.translate and "translation" not in self._capabilities(spec):
                raise _unsupported("does not translate", "translation", "model")
            cast("VllmTranscription", self._pool.get(request.model)).transcribe(request, stream)
        return stream

    def voices(self, model: str) -> tuple[Voice, ...]:
        """The voices of a speech model; none of other models."""
        return self._loader.voices.of(model).voices

    def voice_warnings(self, model: str) -> tuple[str, ...]:
        """Return, for the operator, why voices of a speech model are hidden, cannot speak, or were not updated."""
        return self._loader.voices.of(model).notices

    async def speech(self, request: SpeechRequest, stream: SpeechStream) -> SpeechStream:
        """Put an audio file into `stream` piece by piece, as it is spoken, like `images`."""
        async with self._leased(request.model, SpeechModelSpec, stream):
            voice = self._loader.voices.find(request.model, request.voice)
            cast("SpeechModel", self._pool.get(request.model)).speech(request, voice, stream)
        return stream

    @contextlib.asynccontextmanager
    async def _leased(self, model: str, kind: type[_Spec], stream: Stream[Any]) -> AsyncIterator[None]:
        """Lease a model until `stream` ends. An error in the block ends the stream."""
        try:
            self._spec(model, kind)
            stream.keep(await self._pool.acquire(model))
            yield
        except BaseException as error:
            stream.refuse(error)
            raise

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return how many tokens the prompt has, template and tools included. Nothing is generated."""
        self._spec(request.model, ChatModelSpec)
        addressed = self._addressed(request)
        with await self._pool.acquire(addressed.model):
            backend, spec = self._chat_backend(request.model, addressed.model)
            check_request(spec, addressed)
            return len(await backend.token_ids(addressed))

    async def tokenize(self, model: str, prompt: ChatRequest | str, *, special_tokens: bool = True) -> Tokenized:
        """Return the tokens of a conversation, template and tools included, or of a plain text."""
        self._spec(model, ChatModelSpec)
        engine = self._any_engine(model)
        with await self._pool.acquire(engine):
            backend, spec = self._chat_backend(model, engine)
            if isinstance(prompt, ChatRequest):
                check_request(spec, prompt)
            return await backend.tokenize(prompt, special_tokens=special_tokens)

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        self._spec(model, ChatModelSpec)
        engine = self._any_engine(model)
        with await self._pool.acquire(engine):
            return await self._chat_backend(model, engine)[0].detokenize(ids)

    async def load(self, model: str) -> None:
        """Try a failed model again; load an evicted one as for a request, and wait until it is loaded."""
        for engine in self._pool.engines_of(self._base(model)):
            self._pool.load_again(engine)
        (await self._pool.acquire(self._any_engine(model))).close()

    def unload(self, model: str) -> None:
        """Evict a model after its last answer. Raises `RequestError` for one that is never evicted."""
        if not self._pool.evict(self._base(model)):
            raise RequestError(
                f"{model} has memory of its own and stays loaded. Give it `unload_after_seconds` in models.yaml, or"
                " take it out.",
                param="model",
            )

    async def reload(self, config: Config) -> set[str]:
        """Serve `config` from now on, with the voices and weights that are on the disk. Running answers finish.

        Returns the models that are loaded again although their entry is the same: their weights came, went or changed,
        or they have memory that is now planned for others.
        """
        voices = await self._loader.read_voices(config)
        self.config = config
        self._loader.use(config, voices)
        outdated = self._loader.outdated()
        self._pool.update(self._loader.planned.engines.values(), outdated)
        return {model_of(engine) for engine in outdated}

    def again(self) -> tuple[str, ...]:
        """Return the models that a `reload` ends after their last answer, to load them again."""
        ending = self._pool.ending()
        return tuple(name for name in self.config.models if name in ending)

    def later(self) -> tuple[str, ...]:
        """Return the models that keep another amount of memory than planned until their next load."""
        later = {model_of(engine) for engine in self._loader.ledger.later()}
        return tuple(name for name in self.config.models if name in later)

    def models(self) -> tuple[ModelInfo, ...]:
        return tuple(self._info(health) for health in self.health())

    def health(self) -> tuple[ModelHealth, ...]:
        """What each model is doing, in the order of models.yaml; adapters come after their base."""
        found: list[ModelHealth] = []
        for health in _healths_of_models(self._pool.health()):
            adapters = self.config.adapters_of(health.id)
            found += [health, *(self._adapter_health(adapter.id, health) for adapter in adapters)]
        return tuple(found)

    def _adapter_health(self, adapter: str, base: ModelHealth) -> ModelHealth:
        health = replace(base, id=adapter)
        if base.status != "ready":
            return health
        with contextlib.suppress(EngineError):
            why = cast("VllmChat", self._pool.get(self._any_engine(base.id))).refused_adapters.get(adapter)
            reason = "It cannot be loaded on its base. The server's log says why."
            health = replace(health, status="failed", phase="failed", error=why, reason=reason) if why else health
        return health

    def loads(self) -> tuple[ModelLoad, ...]:
        """Return how busy each loaded model is, and what it was loaded with, in the order of models.yaml."""
        later, served = self._loader.ledger.later(), self._loader.served
        engines = (
            ModelLoad(
                name,
                one.running,
                one.admission.waiting,
                pids=one.pids,
                served=served(name),
                later_bytes=later.get(name),
                compiled=getattr(one, "compiled", None),
                kv_cache_usage=_kv_cache_usage(getattr(one, "metrics", None)),
            )
            for name, one in self._loaded()
        )
        return tuple(_loads_of_models(engines))

    def pixels(self) -> PixelLoad:
        return self._pictures.load

    def vllm_metrics(self) -> tuple[CollectorRegistry, ...]:
        """Return vLLM's own metrics, a registry for each engine of a chat model. A restart resets them."""
        registries = (getattr(backend, "metrics", None) for _, backend in self._loaded())
        return tuple(registry for registry in registries if registry is not None)

    def _loaded(self, *models: str) -> Iterator[tuple[str, Backend]]:
        """Yield each loaded engine of these models, or of all."""
        for name in (engine for model in models or self.config.models for engine in self._pool.engines_of(model)):
            with contextlib.suppress(EngineError):
                yield name, self._pool.get(name)

    async def wait_for_change(self) -> None:
        await self._pool.wait_for_change()

    @property
    def uncompiled(self) -> list[str]:
        """Models that would answer faster on this CPU if they were compiled once, in the order of models.yaml."""
        return [name for name in self.config.models if name in self._loader.compiled.lacking]

    @property
    def swaps(self) -> int:
        """How often models were evicted for another one since the start."""
        return self._loader.ledger.swaps

    async def hopeless(self) -> None:
        """Return when every model has failed for good, so that nothing can be served without a change."""
        await self._pool.hopeless()

    def _chat_backend(self, model: str, engine: str) -> tuple[VllmChat, ChatModelSpec]:
        """Return an engine of this model, and what the model can do as it is loaded."""
        spec = self._spec(model, ChatModelSpec)
        if self._loader.lacks.get(engine):
            spec = spec.model_copy(update={"capabilities": self._capabilities(spec)})
        return cast("VllmChat", self._pool.get(engine)), spec

    def _capabilities(self, spec: ModelSpec) -> tuple[str, ...]:
        """Return what models.yaml claims, without what was found to be lacking when the model was loaded last."""
        lacks = self._loader.lacks.get(spec.id, frozenset())
        return tuple(one for one in spec.capabilities if one not in lacks)

    def _spec(self, model: str, kind: type[_Spec]) -> _Spec:
        """Return the entry of a model; raise `UnsupportedCapabilityError` if its task is not that of `kind`."""
        spec = self.config.models.get(self._base(model))
        if spec is None:
            self._pool.get(model)  # raises `UnknownModelError`
        if not isinstance(spec, kind):
            lacks, capability = _LACKS[kind]
            raise _unsupported(lacks, capability, "model")
        return spec

    def _info(self, health: ModelHealth) -> ModelInfo:
        adapter = self.config.adapters.get(health.id)
        if adapter is not None:  # all but its name is of its base
            base = self._info(replace(health, id=adapter.base))
            own = {name: getattr(adapter, name) for name in ("id", "tier", "owned_by", "description")}
            return replace(base, parent=adapter.base, **own)
        spec = self.config.models[health.id]
        admissions = [backend.admission for _, backend in self._loaded(spec.id)]
        info = ModelInfo(
            id=spec.id,
            tier=spec.tier,
            owned_by=spec.owned_by,
            description=spec.description,
            capabilities=self._capabilities(spec),
            status=health.status,
            demo=spec.id in self._loader.demos,
            created=self._created,
            running=sum(admission.running for admission in admissions),
            waiting=health.waiting + sum(admission.waiting for admission in admissions),
        )
        if isinstance(spec, SpeechModelSpec):
            return replace(info, demo=self._loader.voices.of(spec.id).only_demos)
        if isinstance(spec, ImageModelSpec):
            with contextlib.suppress(EngineError):
                model = cast("ImageModel", self._pool.get(spec.id))
                able = (("image_editing", model.edits), ("negative_prompt", model.negative_prompts))
                info = replace(info, capabilities=(*info.capabilities, *(name for name, can in able if can)))
            return replace(info, sizes=tuple(f"{edge}x{edge}" for edge in SIZES))
        if isinstance(spec, PoolingModelSpec):
            longest, dimensions = spec.engine.max_input_tokens, None
            with contextlib.suppress(EngineError):
                backend = cast("VllmPooling", self._pool.get(spec.id))
                longest, dimensions = backend.max_input_tokens, backend.dimensions
            return replace(info, max_input_tokens=longest, dimensions=dimensions)
        if isinstance(spec, TranscriptionModelSpec):
            return info
        context_length = spec.engine.context_length
        with contextlib.suppress(EngineError):
            chat = self._chat_backend(spec.id, self._any_engine(spec.id))[0]
            context_length = chat.context_length
            if chat.reasons:
                info = replace(info, capabilities=(*info.capabilities, "reasoning"))
        longest = spec.engine.max_output_tokens or context_length
        return replace(info, context_length=context_length, max_output_tokens=longest)


_LACKS: dict[type, tuple[str, str]] = {
    ChatModelSpec: ("does not chat", "chat"),
    ImageModelSpec: ("makes no images", "image_generation"),
    SpeechModelSpec: ("does not speak", "speech"),
    EmbeddingModelSpec: ("makes no vectors", "embedding"),
    RerankModelSpec: ("does not rerank", "rerank"),
    TranscriptionModelSpec: ("does not transcribe", "transcription"),
}


# The status of a model is that of its best engine.
_BEST: tuple[ModelStatus, ...] = ("ready", "loading", "sleeping", "unloaded", "failed")


def _healths_of_models(engines: Iterable[ModelHealth]) -> Iterator[ModelHealth]:
    """Yield the state of each model; of one with replicas that of its best engine, with all of them in `engines`."""
    for model, group in groupby(engines, key=lambda one: model_of(one.id)):
        several = tuple(group)
        best = min(several, key=lambda one: _BEST.index(one.status))
        if len(several) == 1:
            yield best
            continue
        ready = sum(one.status == "ready" for one in several)
        lost = [f"{one.id}: {one.error}" for one in several if one.error]
        yield replace(
            best,
            id=model,
            phase=f"{ready} of {len(several)} engines are ready" if 0 < ready < len(several) else best.phase,
            restarts=sum(one.restarts for one in several),
            error=" ".join(lost) or None,
            waiting=sum(one.waiting for one in several),
            engines=several,
        )


def _loads_of_models(engines: Iterable[ModelLoad]) -> Iterator[ModelLoad]:
    """Yield how busy each model is; one with replicas as all of its engines together, which are in `engines`."""
    for model, group in groupby(engines, key=lambda one: model_of(one.id)):
        several = tuple(group)
        if len(several) == 1 and several[0].id == model:
            yield several[0]
            continue
        usages = [one.kv_cache_usage for one in several if one.kv_cache_usage is not None]
        yield replace(
            several[0],
            id=model,
            running=sum(one.running for one in several),
            waiting=sum(one.waiting for one in several),
            pids=tuple(pid for one in several for pid in one.pids),
            kv_cache_usage=sum(usages) / len(usages) if usages else None,
            engines=several,
        )


def _kv_cache_usage(metrics: CollectorRegistry | None) -> float | None:
    if metrics is None:
        return None
    families = metrics.restricted_registry(["vllm:kv_cache_usage_perc"]).collect()
    return next((sample.value for family in families for sample in family.samples), None)


def check_request(spec: ChatModelSpec, request: ChatRequest | TextRequest) -> None:
    """Raise `UnsupportedCapabilityError`, naming the field, or `RequestError` for a limit of the model."""
    if isinstance(request, ChatRequest):
        if "chat" not in spec.capabilities:
            raise _unsupported("has no chat template and only continues texts (/v1/completions)", "chat", "messages")
        if request.tools and "function_calling" not in spec.capabilities:
            raise _unsupported("cannot call tools", "function_calling", "tools")
        if "vision" not in spec.capabilities and (places := image_places(request)):
            raise _unsupported("cannot see images", "vision", places[0][2])
    most, asked = spec.engine.max_output_tokens, request.max_tokens
    if most is not None and asked is not None and asked > most and not spec.engine.clamp_max_tokens:
        raise RequestError(f"`max_tokens` is at most {most} for this model.", param="max_tokens")


def _unsupported(lacks: str, capability: str, param: str) -> UnsupportedCapabilityError:
    return UnsupportedCapabilityError(
        f"This model {lacks}. Pick a model with the capability `{capability}`.", param=param
    )
