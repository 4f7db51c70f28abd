"""What one entry of models.yaml may say, a frozen class per kind of entry; reading it is engine/config.py's.

The strings under the fields are the help that editors show, by way of models.schema.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from engine.config_document import shown
from engine.config_report import did_you_mean, plain_error
from engine.config_variants import Variants  # pydantic reads it
from engine.config_words import Folder, Id, Limit, Names, Spec, StallSeconds, Word
from engine.demo import demo_names

ChatCapability = Literal["chat", "streaming", "function_calling", "vision"]


@dataclass(frozen=True, slots=True)
class TierNames:
    """What the file's tiers are called, for the checks that look across entries."""

    defined: frozenset[str]
    usable: frozenset[str]


def _check_defined(tier: str, names: TierNames) -> None:
    if tier not in names.defined:
        raise plain_error(f"there is no tier `{shown(tier)}` under `tiers`{did_you_mean(tier, names.defined)}")


class TierSpec(Spec):
    """A tier of keys."""

    id: Id
    models: Names[str]
    """Keys of this tier may use the models of these tiers."""
    requests_per_minute: Limit | None = None
    """Requests of one key, as a bucket that refills evenly: as many at once, too. Each item of a batch counts.
    null: no limit, as for all of these."""
    tokens_per_minute: Limit | None = None
    """Tokens of one key: prompt and longest possible answer are taken when a request begins, and what the answer
    did not need is given back at its end."""
    parallel_requests: Limit | None = None
    """Requests of one key that run or wait at the same time; the items of a batch are one request together."""
    batch_items: Limit | None = None
    """Items in one batch, where that is fewer than the server allows (HEARTH_MAX_BATCH_ITEMS)."""
    images_per_day: Limit | None = None
    """Images that one key may make in a day (UTC)."""
    queue_share: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """When requests wait for a model: a key of share 2 is given twice the tokens of a key of share 1."""

    @field_validator("models")
    @classmethod
    def _tiers_exist(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if isinstance(info.context, TierNames):
            for name in names:
                _check_defined(name, info.context)
        return names


class CommonModelSpec(Spec):
    """What every model has, whatever its task."""

    id: Id
    tier: str
    """Which keys may use the model: those whose tier lists this one (see `tiers` below)."""
    owned_by: Annotated[str, Field(min_length=1, max_length=64)] = "hearth"
    """Shown in the list of models as its owner."""
    description: Annotated[str, Field(max_length=1000)] = ""
    """One or two sentences for the people who choose a model."""
    weights: Folder
    """Folder with the model's weights, below the weights directory (HEARTH_WEIGHTS_DIR)."""
    demo: Word | None = None
    """Demo model that answers while the weights folder is not there. null: the model then fails to load."""
    variants: Variants = ()
    """What to serve it with, best first: `hearth plan` picks the best ones that fit this machine together."""
    keep_loaded: bool = False
    """Never takes turns with other models: what does not fit beside it does not run."""
    unload_after_seconds: Annotated[float, Field(ge=10, le=31_536_000)] | None = None
    """Without a request for so long it is unloaded, and loaded again by the next one. null: it stays loaded."""

    @field_validator("demo")
    @classmethod
    def _is_shipped_demo(cls, demo: str | None) -> str | None:
        if demo is not None and demo not in demo_names():
            known = ", ".join(f"`{name}`" for name in demo_names())
            raise plain_error(f"there is no demo `{shown(demo)}`{did_you_mean(demo, demo_names())}; there is {known}")
        return demo

    @field_validator("tier")
    @classmethod
    def _some_key_may_use_it(cls, tier: str, info: ValidationInfo) -> str:
        if isinstance(info.context, TierNames):
            _check_defined(tier, info.context)
            if tier not in info.context.usable:
                message = f"no tier lists `{tier}` under its `models`, so no key could use this model"
                raise plain_error(f"{message}: add it to one")
        return tier


class ChatEngineSpec(Spec):
    """What vLLM is told about a chat model. Every value has a default."""

    context_length: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Tokens of prompt and answer together. null: what the plan says, else what the model's own configuration says."""
    max_output_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Tokens of one answer at most. null: whatever the prompt leaves of the context."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] = 256
    """Requests that are generated at the same time; more wait in the queue."""
    max_queued_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Requests that may wait. The next one is answered with 503 server_overloaded."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of the weights in memory. auto: what the model was saved in."""
    kv_cache_gib: Annotated[float, Field(gt=0, le=65536)] | None = None
    """GiB for the KV cache, which holds the running conversations. null: what the plan gives it; without one on a GPU
    what gpu_memory_utilization leaves, on a CPU 1 GiB (demo model: 0.0625)."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for this model, weights and cache together. Better left out: the plan then sees to it.
    Without effect on a CPU."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that the model is split over. Left out, the plan decides."""
    cpu_threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Threads on a CPU. null: the machine's cores divided by the models (demo model: 1)."""
    enforce_eager: bool | None = None
    """true: skip compilation and CUDA graphs, for a faster start and slower answers. false: compile. null: compile; but
    on a CPU, run compiled only what `hearth compile` has compiled."""
    tool_parser: Word | None = None
    """vLLM's parser of function calls, like hermes or llama3_json. null: chosen from the
    model's family; none: no parser."""
    kept_for_interactive: Annotated[int, Field(ge=0, le=65536)] | None = None
    """Of max_num_seqs, how many places batches leave free, so that nobody waits for theirs. null: an eighth."""
    kept_for_newcomers: Annotated[int, Field(ge=0, le=65536)] | None = None
    """Of max_num_seqs, how many places only keys take that have nothing running. null: 1 of 2 to 63, then 1 in 32."""
    fair_queue: bool = True
    """true: who waits is served by how little its key has had lately. false: first come, first served."""
    max_images: Annotated[int, Field(ge=1, le=256)] = 8
    """Pictures in one request, for a model with the capability vision."""
    stall_seconds: StallSeconds | None = 30.0
    """An engine that gives no sign of life for so long is killed and restarted; longer while it loads or computes.
    null: never."""
    reasoning_parser: Word | None = None
    """vLLM's parser of thinking sections, like qwen3. null: chosen from the
    model's family; none: no parser."""

    @property
    def places_for_people(self) -> int:
        """Of `max_num_seqs`, how many batches leave free; one place has to be left to them."""
        return self._kept(self.kept_for_interactive, one_in=8)

    @property
    def places_for_newcomers(self) -> int:
        """Of `max_num_seqs`, how many are for keys that have nothing running."""
        return self._kept(self.kept_for_newcomers, one_in=32)

    def _kept(self, asked: int | None, *, one_in: int) -> int:
        wanted = max(1, self.max_num_seqs // one_in) if asked is None else asked
        return min(wanted, self.max_num_seqs - 1)

    @field_validator("max_output_tokens")
    @classmethod
    def _fits_the_context(cls, tokens: int | None, info: ValidationInfo) -> int | None:
        context = info.data.get("context_length")
        if tokens is not None and context is not None and tokens > context:
            raise plain_error(f"must be at most context_length ({context}), not {tokens}")
        return tokens


class ChatModelSpec(CommonModelSpec):
    """A chat model."""

    task: Literal["chat"]
    """What the model does."""
    capabilities: Annotated[Names[ChatCapability], Field(json_schema_extra={"contains": {"const": "chat"}})]
    """What clients may ask of it; each is checked against the model when it is loaded."""
    engine: ChatEngineSpec = ChatEngineSpec()
    """What vLLM is told. Every value has a default."""

    @field_validator("capabilities")
    @classmethod
    def _can_chat(cls, capabilities: tuple[ChatCapability, ...]) -> tuple[ChatCapability, ...]:
        if "chat" not in capabilities:
            raise plain_error("must contain `chat`, because the task is chat")
        return capabilities
