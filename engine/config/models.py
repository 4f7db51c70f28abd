"""What one entry of models.yaml may say, a frozen class per kind of entry. engine/config/__init__.py reads the file.

The strings under the fields are the help that editors show, through models.schema.json. A new task is added here: its
spec class joins `ModelSpec`.
"""

from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeAlias, TypeVar, get_args

import yaml
from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from engine.config.messages import Folder, Id, Limit, Names, Spec, Word, did_you_mean, listed, matching, plain_error
from engine.config.yaml import shown
from engine.demo import demo_names

_PROFILES = Path(__file__).with_name("profiles.yaml")
SIZES = (256, 512, 1024)

ChatCapability = Literal["chat", "streaming", "function_calling", "vision"]
VoiceId = Annotated[str, Field(min_length=1, max_length=64)]


@cache
def shipped() -> dict[str, dict[str, Any]]:
    """The profiles that come with Hearth, as they are in the file."""
    return dict(yaml.safe_load(_PROFILES.read_text("utf-8")))


def _one_of(what: str, choices: Callable[[], Collection[str]]) -> AfterValidator:
    def check(name: str) -> str:
        known = choices()
        if name not in known:
            near = did_you_mean(name, known)
            raise plain_error(f"there is no {what} `{shown(name)}`{near}; there is {listed(known)}")
        return name

    return AfterValidator(check)


_PROFILE = {"patternErrorMessage": "the name of a profile, like `sdxl`"}
_Profile = Annotated[str, _one_of("profile", shipped), Field(json_schema_extra=_PROFILE)]
_Demo = Annotated[Word, _one_of("demo", demo_names)]
_Gib = Annotated[float, Field(gt=0, le=65536)]
_Repository = Annotated[
    str, matching(r"^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$", 128, "a repository like `owner/name`")
]
_Revision = Annotated[str, matching(r"^[A-Za-z0-9][A-Za-z0-9_./-]*$", 128, "a commit, tag or branch of the repository")]


_Token = Annotated[str, Field(min_length=1, max_length=64)]
_TEMPLATE = matching(r"\{query\}[\s\S]*\{document\}", 4000, "a text with `{query}`, and `{document}` behind it")


class VariantSpec(Spec):
    """One way to serve a model. Sizes are stated here, or measured after the first load (engine/placement)."""

    id: Annotated[Folder, Field(validation_alias="folder")]
    """Folder of its weights, below the weights directory. Different variants need different folders."""
    repository: _Repository | None = None
    """Where `hearth weights pull` fetches it from. null: the folder is made by hand."""
    revision: _Revision | None = None
    """Version of the repository. null: the newest at the first pull, and the same from then on."""
    licence: Annotated[str, Field(min_length=1, max_length=64)]
    """The licence of the weights, like Apache-2.0."""
    weights_gib: _Gib
    """GiB of all weights in memory, on all GPUs together."""
    download_gib: _Gib | None = None
    """GiB that are fetched, if that differs from what the weights take in memory. null: weights_gib."""
    resident_gib: _Gib | None = None
    """GiB of the weights that are on the GPU at the same time, with `offload`. null: all of them."""
    activations_gib: Annotated[float, Field(ge=0, le=65536)] = 1.0
    """GiB on each GPU beside weights and KV cache: CUDA itself, its graphs, and what a step needs at its peak."""
    runs_on: Literal["gpu", "cpu", "any"] = "gpu"
    """The device it is for. any: on a GPU where there is one."""
    min_compute_capability: Annotated[float, Field(ge=0, le=99)] = 0.0
    """Oldest GPU that runs it, like 8.0 for bfloat16 and 8.9 for FP8 arithmetic."""
    tensor_parallel_sizes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(strict=False, min_length=1)
    ] = (1,)
    """Over how many GPUs it can be split; the smallest number that fits is used."""
    quantization: Word | None = None
    """How the weights are stored, for people to read; vLLM finds out by itself. null: as in `dtype`."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format in memory. auto: what the model was saved in."""
    context_length: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Tokens of prompt and answer together, at least. null: 8192."""
    max_context_length: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Most tokens that the model was made for: the context grows up to that if there is memory. null: it does not
    grow."""
    chats: Annotated[int, Field(ge=1, le=65536)] = 2
    """Least number of conversations of `context_length` tokens that the KV cache has room for."""
    kv_kib_per_token: Annotated[float, Field(ge=0, le=65536)] = 0.0
    """KiB of KV cache that one token takes: 2 x layers with full attention x KV heads x head size x 2 bytes."""
    kv_groups: Annotated[int, Field(ge=1, le=4096)] | None = None
    """KV cache groups of vLLM: 1, and 1 for each layer with linear attention or a sliding window that stands beside
    one with full attention. null: 4 with `state_mib_per_chat`, 2 with `sliding_window`, else 1."""
    sliding_window: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Tokens that the layers with a sliding window look back. null: there are none."""
    kv_heads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """KV heads: the KV cache is split over at most so many GPUs. null: over any number."""
    state_mib_per_chat: Annotated[float, Field(ge=0, le=65536)] = 0.0
    """MiB of a conversation's states in all layers with linear attention."""
    profile: _Profile | None = None
    """Profile of an image model, in place of the model's."""
    offload: Literal["none", "model", "sequential"] | None = None
    """What of an image model stays in the GPU's memory. null: what its profile says."""
    lacks: Names[Literal["translation"]] = ()
    """Capabilities of the model that this variant does not have."""

    @property
    def fetched_gib(self) -> float:
        """GiB that are fetched, about."""
        return self.download_gib or self.weights_gib

    @property
    def groups(self) -> int:
        """KV cache groups, given or by default."""
        return self.kv_groups or (4 if self.state_mib_per_chat else 2 if self.sliding_window else 1)


def _each_folder_once(variants: tuple[VariantSpec, ...]) -> tuple[VariantSpec, ...]:
    folders = [variant.id for variant in variants]
    for folder in folders:
        if folders.count(folder) > 1:
            raise plain_error(f"names the folder `{shown(folder)}` twice: each variant has its own")
    return variants


Variants = Annotated[tuple[VariantSpec, ...], Field(strict=False, max_length=64), AfterValidator(_each_folder_once)]


class TierSpec(Spec):
    """A tier of keys."""

    id: Id
    models: Names[str]
    """Keys of this tier may use the models of these tiers."""
    requests_per_minute: Limit | None = None
    """Requests of one key, as a bucket that refills evenly: all may come at once. Each item of a batch counts. null: no
    limit, as for all of these."""
    tokens_per_minute: Limit | None = None
    """Tokens of one key: prompt and longest possible answer are charged when a request begins, and what the answer
    did not use is refunded at its end."""
    parallel_requests: Limit | None = None
    """Requests of one key that run or wait at the same time; the items of a batch are one request together."""
    batch_items: Limit | None = None
    """Items in one batch, if fewer than the server allows (HEARTH_MAX_BATCH_ITEMS)."""
    images_per_day: Limit | None = None
    """Images that one key may make in a day (UTC)."""
    queue_share: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """While requests wait for a model, a key of share 2 gets twice the tokens of a key of share 1."""


class _Entry(Spec):
    """What every entry has under `models`."""

    id: Id
    tier: str
    """Which keys may use the model: those whose tier lists this one (see `tiers` below)."""
    owned_by: Annotated[str, Field(min_length=1, max_length=64)] = "hearth"
    """Shown in the list of models as its owner."""
    aliases: Annotated[tuple[Id, ...], Field(strict=False, max_length=64)] = ()
    """Other names that requests may use for the model, like gpt-4o-mini, for programs with a fixed name."""
    description: Annotated[str, Field(max_length=1000)] = ""
    """One or two sentences for the people who choose a model."""


class AdapterSpec(_Entry):
    """A LoRA adapter of a chat model: a model of its own, on the engine of its base."""

    task: Literal["adapter"]
    """What it is."""
    base: Id
    """The chat model that it changes, by its name in this file. Both have the same capabilities and limits."""
    weights: Folder
    """Folder with the adapter as PEFT saves it (adapter_config.json, adapter_model.safetensors), below the weights
    directory."""


class CommonModelSpec(_Entry):
    """What every model with an engine of its own has, whatever its task."""

    weights: Folder
    """Folder with the model's weights, below the weights directory (HEARTH_WEIGHTS_DIR)."""
    demo: _Demo | None = None
    """Demo model that answers while the weights folder is not there. null: the model then fails to load."""
    variants: Variants = ()
    """Sets of weights to serve it with, best first: `hearth plan` picks the best that fit this machine together."""
    keep_loaded: bool = False
    """Never takes turns with other models: what does not fit beside it does not run."""
    unload_after_seconds: Annotated[float, Field(ge=10, le=31_536_000)] | None = None
    """It is unloaded after so long without a request, and loaded again by the next one. null: it stays loaded."""


def replica_id(model: str, number: int) -> str:
    """Return the name of a model's engine; the first has the name of the model."""
    return model if number == 1 else f"{model}#{number}"  # no model has a `#` in its name


def model_of(engine: str) -> str:
    """Return the model that an engine belongs to."""
    return engine.partition("#")[0]


class EngineSpec(Spec):
    """Settings of every engine."""

    cpu_threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Threads on a CPU. null: the machine's cores divided by the models (demos alone: 1)."""
    fair_queue: bool = True
    """true: the waiting key that has had the least lately is served first. false: first come, first served."""
    stall_seconds: Annotated[float, Field(ge=1, le=86400)] | None = 30.0
    """An engine that gives no sign of life for so long is killed and restarted; longer while it loads or computes.
    null: never."""


# vLLM's arguments that decide its speed only, not what Hearth promises: its answers, whose code runs, which files and
# addresses it opens, how much memory the plan gives it, and the order of requests. `load_format` is there for one
# value, see `_reads_safetensors_or_nothing`.
ENGINE_ARGS = (
    "all2all_backend",
    "async_scheduling",
    "attention_backend",
    "block_size",
    "cudagraph_capture_sizes",
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "enable_chunked_prefill",
    "enable_expert_parallel",
    "enable_flashinfer_autotune",
    "enable_prefix_caching",
    "gdn_prefill_backend",
    "linear_backend",
    "load_format",
    "long_prefill_token_threshold",
    "mamba_backend",
    "max_cudagraph_capture_size",
    "max_num_batched_tokens",
    "mm_encoder_attn_backend",
    "mm_encoder_tp_mode",
    "moe_backend",
    "numa_bind",
    "optimization_level",
    "performance_mode",
    "quantization",
    "safetensors_load_strategy",
)
_EngineArg = Annotated[str, _one_of("argument of vLLM that may be set here,", lambda: ENGINE_ARGS)]


class SpeculativeSpec(Spec):
    """Tokens that are guessed and checked in one step: the same text, sooner if guesses are right."""

    method: Literal["ngram", "mtp"]
    """ngram: what followed the last tokens earlier in the conversation; good for code and for texts that quote. mtp: by
    the model's own layers for it, if it was saved with them."""
    tokens: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens that are guessed at a time."""
    longest_match: Annotated[int, Field(ge=1, le=16)] = 4
    """Most tokens that ngram looks for."""
    shortest_match: Annotated[int, Field(ge=1, le=16)] = 2
    """Fewest tokens that ngram looks for."""

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if self.shortest_match > self.longest_match:
            raise plain_error(f"`shortest_match` must be at most `longest_match` ({self.longest_match})")
        return self


class ChatEngineSpec(EngineSpec):
    """Settings of vLLM for a chat model. Every value has a default."""

    context_length: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Tokens of prompt and answer together. null: what the plan says, else what the model's own configuration says."""
    max_output_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Most tokens of one answer. null: what the prompt leaves of the context."""
    clamp_max_tokens: bool = True
    """true: a request for a longer answer than the context has room for gets as many tokens as fit. false: it is
    refused."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] = 256
    """Requests that are generated at the same time; more wait in the queue."""
    max_queued_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Requests that may wait. The next one is answered with 503 server_overloaded."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of the weights in memory. auto: what the model was saved in."""
    kv_cache_gib: Annotated[float, Field(gt=0, le=65536)] | None = None
    """GiB for the KV cache, which holds the running conversations. null: what the plan gives it; without one on a GPU
    what gpu_memory_utilization leaves, on a CPU 1 GiB (demo model: 0.0625)."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Number format of the KV cache. fp8: twice as much context in the same memory, slightly different answers; on GPUs
    only. auto: that of the weights."""
    speculative: SpeculativeSpec | None = None
    """Guess several tokens and check them in one step. null: no guesses."""
    engine_args: Annotated[dict[_EngineArg, bool | int | float | str | list[int]], Field(max_length=32)] = Field(
        default_factory=dict
    )
    """More arguments of vLLM, by its own names. Those that would break a promise are refused. The plan does not know
    them."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for this model, weights and cache together. Better left out: then the plan decides.
    Without effect on a CPU."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that the model is split over. Left out, the plan decides."""
    enforce_eager: bool | None = None
    """true: skip compilation and CUDA graphs, for a faster start and slower answers. false: compile. null: compile; but
    on a CPU, run compiled only what `hearth compile` has compiled."""
    tool_parser: Word | None = None
    """vLLM's parser of function calls, like hermes or llama3_json. null: chosen from the
    model's family; none: no parser."""
    kept_for_interactive: Annotated[int, Field(ge=0, le=65536)] | None = None
    """Of max_num_seqs, how many places batches leave free, so that interactive requests find one. null: an eighth."""
    kept_for_newcomers: Annotated[int, Field(ge=0, le=65536)] | None = None
    """Of max_num_seqs, how many places only keys with nothing running take. null: 1 of 2 to 63, then 1 in 32."""
    max_images: Annotated[int, Field(ge=1, le=256)] = 8
    """Pictures in one request, for a model with the capability vision."""
    reasoning_parser: Word | None = None
    """vLLM's parser of thinking sections, like qwen3. null: chosen from the
    model's family; none: no parser."""

    @field_validator("engine_args")
    @classmethod
    def _reads_safetensors_or_nothing(cls, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("load_format", "dummy") != "dummy":
            raise plain_error("`load_format` can only be dummy, for random weights: others are read from safetensors")
        return given

    @property
    def places_for_interactive(self) -> int:
        """Places of `max_num_seqs` that batches leave free; at least one is left to them."""
        return self._kept(self.kept_for_interactive, one_in=8)

    @property
    def places_for_newcomers(self) -> int:
        """Places of `max_num_seqs` for keys that have nothing running; at least one is left to others."""
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
    prefer: Literal["context", "conversations"] = "context"
    """What the remaining memory is for. context: longer conversations, up to the longest that the model was made for,
    then more of them. conversations: more of them, with the shortest context of the variant."""
    replicas: Annotated[int, Field(ge=1, le=64)] | None = None
    """Most engines of this model, behind its one name. Those beyond the first take GPUs without a chat model or, on a
    CPU, free RAM. null: as many as such GPUs have room for; on a CPU one."""
    engine: ChatEngineSpec = ChatEngineSpec()
    """Settings of vLLM. Every value has a default."""

    @field_validator("capabilities")
    @classmethod
    def _can_chat(cls, capabilities: tuple[ChatCapability, ...]) -> tuple[ChatCapability, ...]:
        if "chat" not in capabilities:
            raise plain_error("must contain `chat`, because the task is chat")
        return capabilities

    @model_validator(mode="after")
    def _comes_and_goes_alone(self) -> Self:
        if self.unload_after_seconds is not None and (self.replicas or 1) > 1:
            raise plain_error("`replicas` above 1 and `unload_after_seconds` exclude each other: take one of them out")
        return self


Steps = Annotated[int, Field(ge=1, le=200)]
Edge = Annotated[int, Field(ge=64, le=2048, multiple_of=64)]
Batch = Annotated[int, Field(ge=1, le=64)]
MaxPromptTokens = Annotated[int, Field(ge=1, le=4096)]
Batches = Literal["steps", "requests"]
Amount = TypeVar("Amount", bound=int)


class StepsByQuality(Spec):
    """Denoising steps."""

    standard: Steps
    """Steps of an image of quality standard."""
    hd: Steps
    """Steps of an image of quality hd."""


class BySize(Spec, Generic[Amount]):
    """A number for each size of image."""

    small: Amount = Field(alias="256x256")
    """For small images."""
    medium: Amount = Field(alias="512x512")
    """For medium images."""
    large: Amount = Field(alias="1024x1024")
    """For large images."""

    def of(self, size: int) -> int:
        return {256: self.small, 512: self.medium, 1024: self.large}[size]


class RenderSizes(BySize[Edge]):
    """The edge in pixels at which an image of each size is rendered; it is then resized to exactly that size."""


class MaxBatch(BySize[Batch]):
    """Images of each size that are denoised together at most; memory decides."""


class ImageProfile(Spec):
    """Everything that depends on the model and not on the request; `ImageEngineSpec` explains the fields."""

    steps: StepsByQuality
    guidance_scale: Annotated[float, Field(ge=0, le=30)]
    render_size: RenderSizes
    max_batch: MaxBatch
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    offload: Literal["none", "model", "sequential"] = "none"
    vae_tiling: bool = False
    """Part of the profile, so that pixels never depend on the load."""
    negative_prompt: bool = False
    """It needs a guidance_scale above 1."""
    max_prompt_tokens: MaxPromptTokens
    """The pipeline would cut longer ones silently."""
    batching: Batches = "steps"
    """By steps only if the family's adapter can."""

    def step_count(self, quality: Literal["standard", "hd"]) -> int:
        """How many steps a quality has."""
        return self.steps.hd if quality == "hd" else self.steps.standard


def profile_named(name: str, changes: dict[str, Any] | None = None) -> ImageProfile:
    """Return a shipped profile with some values replaced. Raises KeyError for an unknown name."""
    return ImageProfile.model_validate({**shipped()[name], **(changes or {})})


class ImageEngineSpec(EngineSpec):
    """Settings of the model. Every value has a default; null means what the profile says."""

    steps: StepsByQuality | None = None
    """Denoising steps for each `quality` of a request."""
    guidance_scale: Annotated[float, Field(ge=0, le=30)] | None = None
    """Classifier-free guidance; 0 for models that were distilled to do without."""
    render_size: RenderSizes | None = None
    """The edge in pixels at which images of each size are made before they are resized to the size asked for."""
    max_batch: MaxBatch | None = None
    """Most images of each size that are made together."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Number format on a GPU. On a CPU it is float32."""
    offload: Literal["none", "model", "sequential"] | None = None
    """What stays in the GPU's memory. none: everything; model: the part in use; sequential: the layer in use."""
    vae_tiling: bool | None = None
    """Decode large images in tiles, with less memory and slightly different pixels."""
    negative_prompt: bool | None = None
    """Whether requests may have a `negative_prompt`."""
    max_prompt_tokens: MaxPromptTokens | None = None
    """Longer prompts are refused."""
    batching: Batches | None = None
    """steps: images join and leave a batch between denoising steps; requests: a batch is made when its images begin."""
    max_queued_images: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Images that may wait. The next one is answered with 503 server_overloaded."""
    max_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """An image that takes longer is given up."""


class ImageModelSpec(CommonModelSpec):
    """An image model."""

    task: Literal["image"]
    """What the model does."""
    capabilities: Names[Literal["image_generation"]]
    """What clients may ask of it."""
    profile: _Profile
    """How this pipeline is run: one of the profiles that come with Hearth."""
    engine: ImageEngineSpec = ImageEngineSpec()
    """Differences from its profile, and its queue. Every value has a default."""

    @model_validator(mode="after")
    def _agrees_with_its_profile(self) -> Self:
        profile = self.profile_of(demo=False)
        if profile.negative_prompt and profile.guidance_scale <= 1:
            raise plain_error("`negative_prompt: true` needs a `guidance_scale` above 1: raise it, or say false")
        return self

    def profile_of(self, *, demo: bool) -> ImageProfile:
        """The model's profile, or that of the demo model that stands in."""
        changes = self.engine.model_dump(include=set(ImageProfile.model_fields), exclude_none=True, by_alias=True)
        return profile_named("demo") if demo else profile_named(self.profile, changes)


class SpeechEngineSpec(EngineSpec):
    """Settings of the speech worker. Every value has a default."""

    max_parallel_requests: Annotated[int, Field(ge=1, le=1024)] = 8
    """Requests that neural voices speak at the same time, sentence by sentence in turn; more wait. Formant voices speak
    eight in the place of one. With `fair_queue` one place in eight (of two or more at least one) is kept for keys that
    have nothing spoken."""
    max_queued_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Requests that may wait. The next one is answered with 503 server_overloaded."""
    max_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """A text that takes the worker longer is given up; time for other texts does not count."""


class SpeechModelSpec(CommonModelSpec):
    """Voices that speak."""

    task: Literal["speech"]
    """What the model does."""
    capabilities: Names[Literal["speech"]]
    """What clients may ask of it."""
    voice_aliases: Annotated[dict[VoiceId, VoiceId], Field(max_length=256)] = Field(default_factory=dict)
    """Other names of voices, like OpenAI's six."""
    espeak: bool = False
    """Offer nine voices of eSpeak NG that come with Hearth, where that is installed."""
    engine: SpeechEngineSpec = SpeechEngineSpec()
    """Settings of the worker, and its queue. Every value has a default."""


class AuxiliaryEngineSpec(EngineSpec):
    """How vLLM runs it. Every value has a default."""

    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] = 128
    """Inputs that are computed at the same time; more wait. An eighth of the places is closed to long lists, one in 32
    is kept for keys that have nothing running."""
    max_queued_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Requests that may wait. The next one is answered with 503 server_overloaded."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format in memory. auto: what the variant says, else what the model was saved in; but on a GPU 32 bits
    become 16, and on a CPU all but bfloat16 becomes float32."""
    kv_cache_gib: Annotated[float, Field(gt=0, le=65536)] | None = None
    """GiB for the KV cache; of models that make vectors or scores, only those made from a chat model need one. null:
    what the plan gives it, on a CPU 1 GiB."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for this model. Better left out: then the plan decides. Without effect on a CPU."""
    enforce_eager: bool | None = None
    """true: skip compilation and CUDA graphs, for a faster start and slower answers. null: compile on a GPU."""


class PoolingEngineSpec(AuxiliaryEngineSpec):
    """How vLLM runs it. Every value has a default."""

    max_input_tokens: Annotated[int, Field(ge=8, le=1 << 20)] | None = None
    """Most tokens of one input. null: what the variant or the model's own configuration says."""


class _PoolingSpec(CommonModelSpec):
    """A model that reads a text and answers with numbers."""

    engine: PoolingEngineSpec = PoolingEngineSpec()
    """How vLLM runs it. Every value has a default."""


class EmbeddingModelSpec(_PoolingSpec):
    """A model that makes a vector of a text."""

    task: Literal["embedding"]
    """What the model does."""
    capabilities: Names[Literal["embedding"]]
    """What clients may ask of it."""
    pooling: Literal["mean", "cls", "last"] | None = None
    """How the tokens of a text become one vector. null: as the folder says, in the layout of sentence-transformers; a
    folder that does not say it is refused."""
    least_dimensions: Annotated[int, Field(ge=1, le=65536)] | None = None
    """A request's `dimensions` may cut vectors down to so many numbers: only for a model that was trained for it
    (Matryoshka). null: `dimensions` is refused."""
    query_prefix: Annotated[str, Field(max_length=1000)] | None = None
    """Put before inputs of `input_type: query`. null: what the folder says, which may be nothing."""
    document_prefix: Annotated[str, Field(max_length=1000)] | None = None
    """Put before inputs of `input_type: document`. null: what the folder says, which may be nothing."""


class RerankModelSpec(_PoolingSpec):
    """A model that says how well a text answers a query."""

    task: Literal["rerank"]
    """What the model does."""
    capabilities: Names[Literal["rerank"]]
    """What clients may ask of it."""
    score_tokens: Annotated[tuple[_Token, ...], Field(strict=False, min_length=1, max_length=2)] | None = None
    """Of a chat model that was trained to rerank: its tokens for no and yes, whose logits make the score (that of yes
    less that of no), or the one for yes alone. null: the model has a score of its own."""
    template: Annotated[str, _TEMPLATE] | None = None
    """Put around a query and a text; has `{query}`, `{document}` behind it. null: the tokenizer's marks of a pair."""


class TranscriptionEngineSpec(AuxiliaryEngineSpec):
    """How vLLM runs it. Every value has a default."""

    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] = 16
    """Pieces of sound, of up to 30 seconds, that are heard at the same time; more wait. An eighth of the places is
    closed to what is after the first minute of a file, one in 32 is kept for keys that have nothing running."""
    max_seconds: Annotated[float, Field(gt=0, le=86400)] = 14400.0
    """Most seconds of sound in one file."""


class TranscriptionModelSpec(CommonModelSpec):
    """A model that writes down what is said."""

    task: Literal["transcription"]
    """What the model does."""
    capabilities: Annotated[
        Names[Literal["transcription", "translation"]],
        Field(json_schema_extra={"contains": {"const": "transcription"}}),
    ]
    """What clients may ask of it. translation: into English, for models that were trained for it."""
    engine: TranscriptionEngineSpec = TranscriptionEngineSpec()
    """How vLLM runs it. Every value has a default."""

    @field_validator("capabilities")
    @classmethod
    def _can_transcribe(cls, capabilities: tuple[str, ...]) -> tuple[str, ...]:
        if "transcription" not in capabilities:
            raise plain_error("must contain `transcription`, because that is the task")
        return capabilities


PoolingModelSpec: TypeAlias = EmbeddingModelSpec | RerankModelSpec
# Small models on vLLM, which take nothing from chat models.
AuxiliaryModelSpec: TypeAlias = PoolingModelSpec | TranscriptionModelSpec
ModelSpec: TypeAlias = (
    ChatModelSpec | ImageModelSpec | SpeechModelSpec | EmbeddingModelSpec | RerankModelSpec | TranscriptionModelSpec
)
Entry: TypeAlias = ModelSpec | AdapterSpec
SPEC_BY_TASK: dict[str, type[Entry]] = {
    get_args(spec.model_fields["task"].annotation)[0]: spec for spec in get_args(Entry)
}
