"""What a plan is made of, as frozen plain data: devices, needs, KV caches, places. plan.py makes it."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Literal, Self

from engine.config.models import SpeculativeSpec, VariantSpec
from engine.placement.hardware import GIB, Hardware

# resident: always loaded. swapped: takes turns with others on its devices. demo: served by the demo that comes with
# Hearth. unplanned: its folder does not say its size, or nothing is there.
State = Literal["resident", "swapped", "demo", "unplanned"]
SwapBy = Literal["sleep", "unload"]

CONTEXT_STEP = 1024
# Tokens of a block are a multiple of one of these: the larger one on a CPU, and with some kernels on GPUs.
_GPU_BLOCK, _CPU_BLOCK = 16, 128
CPU_CACHE_GIB = 1.0  # KV cache on a CPU, if models.yaml names no size
# vLLM keeps one more state beside the one that is computed next: for prompts that begin alike.
_STATES_OF_A_CHAT = 2
# With guesses: the fewest full layers of such a model, and the part of a state that each guessed token adds (1/64).
_LEAST_FULL_LAYERS, _STATE_OF_A_GUESS = 8, 64
# Tokens that vLLM computes in one step, by the memory of the GPU (its `get_batch_defaults`), in two steps at a time:
# until they are done, layers with a sliding window keep them too.
_STEP_TOKENS = ((160 * GIB, 16384), (70 * GIB, 8192), (0, 2048))
_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Device:
    """Memory for models. `index` is a GPU's, None for RAM; `budget_bytes` is what may be planned."""

    index: int | None
    name: str
    total_bytes: int
    foreign_bytes: int
    margin_bytes: int
    compute_capability: tuple[int, int] | None = None
    ours_bytes: int = 0
    """Used by the running server; the plan counts it as free."""

    @property
    def budget_bytes(self) -> int:
        return max(0, self.total_bytes - self.foreign_bytes - self.margin_bytes)


@dataclass(frozen=True, slots=True)
class KvCache:
    """How the KV cache of a model is divided on each of its devices: vLLM's arithmetic.

    vLLM puts the layers of a model into groups of equal size and kind. A block holds some tokens of the layers of one
    group, and all groups take blocks of one pool. Layers with full attention keep every token, those with a sliding
    window the last ones, and those with linear attention a state of fixed size, which has to fit into a block
    (vllm/v1/core/kv_cache_utils.py, and `_align_hybrid_block_size` in vllm/platforms/interface.py).
    """

    block_bytes: int
    block_tokens: int
    full_groups: int
    """Groups of layers that keep every token."""
    window_groups: int
    window_tokens: int
    """The most tokens that each of `window_groups` keeps, with those that are being computed."""
    state_groups: int
    """Groups of layers that keep a state; then no more sequences may run than there are blocks."""
    guessed: int = 0
    """Tokens that are guessed in one step, each with a state of its own."""

    @classmethod
    def of(  # noqa: PLR0913  # what vLLM divides a cache by
        cls,
        token_bytes: int,
        *,
        groups: int,
        window: int | None,
        state_bytes: int,
        gpu_bytes: int,
        speculative: SpeculativeSpec | None = None,
    ) -> Self:
        """Divide a cache of `groups` groups on GPUs of `gpu_bytes`; 0: in RAM.

        `token_bytes`, above 0, is for one token in the layers of one group, `state_bytes` for a conversation in all
        layers with linear attention; both on each device. One group has full attention, the others have states, or a
        `window`; a single group with a window has no other beside it. With guesses the result is a little less than
        vLLM's: variants do not say all that decides it.
        """
        guessed = speculative.tokens if speculative else 0
        if speculative and speculative.method == "mtp":
            token_bytes += token_bytes // _LEAST_FULL_LAYERS  # one more layer keeps every token
        state_bytes += state_bytes * guessed // _STATE_OF_A_GUESS
        full = 0 if groups == 1 and window else 1
        beside = groups - full
        state_groups = beside if state_bytes else 0
        tokens = least_block = _GPU_BLOCK if gpu_bytes else _CPU_BLOCK
        if state_groups:
            tokens *= max(1, -(-state_bytes // (state_groups * least_block * token_bytes)))
        windows = 0 if state_groups else beside
        in_flight = _STEPS_IN_FLIGHT * next(tokens for least, tokens in _STEP_TOKENS if gpu_bytes >= least)
        return cls(tokens * token_bytes, tokens, full, windows, (window or 0) - 1 + in_flight, state_groups, guessed)

    def coarse(self) -> Self:
        """Return the division into blocks of the larger size: what fits in it fits with any kernel."""
        tokens = -(-self.block_tokens // _CPU_BLOCK) * _CPU_BLOCK
        return replace(self, block_tokens=tokens, block_bytes=self.block_bytes // self.block_tokens * tokens)

    def blocks(self, cache_bytes: int) -> int:
        """Return how many blocks a cache of that size has; one of them is never given out."""
        return cache_bytes // self.block_bytes

    def blocks_of_chat(self, tokens: int) -> int:
        windows = -(-min(tokens, self.window_tokens) // self.block_tokens) + 1
        fixed = self.window_groups * windows + self.state_groups * (_STATES_OF_A_CHAT + self.guessed)
        return self.full_groups * (-(-tokens // self.block_tokens) + bool(self.guessed)) + fixed

    def bytes_of(self, chats: int, tokens: int) -> int:
        return (chats * self.blocks_of_chat(tokens) + 1) * self.block_bytes

    def chats(self, cache_bytes: int, tokens: int) -> int:
        return max(0, self.blocks(cache_bytes) - 1) // self.blocks_of_chat(tokens)

    def longest(self, cache_bytes: int, most: int) -> int:
        """Return how many tokens of one conversation fit, up to `most`; 0: not even one."""
        return bisect_right(range(1, most + 1), self.blocks(cache_bytes) - 1, key=self.blocks_of_chat)

    def sequences(self, cache_bytes: int, asked: int) -> int:
        """Return how many of the `asked` sequences may run: vLLM refuses to start with more."""
        return max(1, min(asked, self.blocks(cache_bytes) - 1)) if self.state_groups else asked


@dataclass(frozen=True, slots=True)
class Need:
    """What one variant needs on each of `split` GPUs (0: only in RAM), in bytes."""

    variant: VariantSpec
    split: int
    weights_bytes: int
    activations_bytes: int
    adapters_bytes: int = 0
    """Room for the LoRA adapters of the model."""
    kv_bytes: int = 0
    """KV cache for the least number of full-length conversations."""
    cache: KvCache | None = None
    """How the KV cache is divided; None if that is not known."""
    ram_bytes: int = 0
    """RAM beside the GPUs, for weights that are offloaded."""
    context_length: int | None = None
    """The least tokens of prompt and answer together."""
    longest_context: int = 0
    """The context may grow to this if there is memory; 0: it does not grow."""
    sequences: int = 0
    """How many should run at the same time."""
    share: float | None = None
    """The share of a GPU that models.yaml gives it."""
    fixed_kv: bool = False
    measured: bool = False

    def chat_bytes(self, tokens: int | None) -> int:
        """Return the KV cache for one conversation of that length; 0 if its size is not known."""
        return max((cache.bytes_of(1, tokens) for cache in self._divided), default=0) if tokens else 0

    @property
    def _divided(self) -> tuple[KvCache, ...]:
        """The cache in blocks of both sizes: what just fits with one size may need one block more with the other."""
        return () if self.cache is None else (self.cache, self.cache.coarse())

    @property
    def one_chat_bytes(self) -> int:
        """KV cache for one conversation of the shortest context."""
        return self.chat_bytes(self.context_length)

    def context_in(self, kv_bytes: int) -> int | None:
        """Return the context that a KV cache of this size serves."""
        if self.cache is None or self.context_length is None or not self.longest_context:
            return self.context_length
        longest = min(cache.longest(kv_bytes, self.longest_context) for cache in self._divided)
        if longest < self.longest_context:
            longest -= longest % CONTEXT_STEP
        return max(longest, self.context_length)

    @property
    def beside_kv_bytes(self) -> int:
        return self.weights_bytes + self.activations_bytes + self.adapters_bytes

    @property
    def least_bytes(self) -> int:
        """The least bytes, if models.yaml gives it no share."""
        return self.beside_kv_bytes + self.kv_bytes

    @property
    def all_weights_bytes(self) -> int:
        return self.weights_bytes * max(1, self.split)

    def bytes_on(self, device: Device) -> int | None:
        """Return the bytes that it takes there; None if its share in models.yaml is too small."""
        if self.share is None:
            return self.least_bytes
        given = int(self.share * device.total_bytes)
        enough = self.beside_kv_bytes + (self.kv_bytes if self.fixed_kv else self.one_chat_bytes)
        return given if given >= enough else None

    def is_kind_of(self, device: Device) -> bool:
        return (self.split == 0) == (device.index is None)

    def runs_on(self, device: Device) -> bool:
        """Whether the device is of the right kind, and new enough."""
        capability = device.compute_capability
        is_new = capability is None or capability[0] + capability[1] / 10 >= self.variant.min_compute_capability
        return is_new and self.is_kind_of(device)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one model goes, and why."""

    id: str
    state: State
    why: str = ""
    variant: VariantSpec | None = None
    need: Need | None = None
    gpus: tuple[int, ...] = ()
    device_bytes: int = 0
    """On each of `gpus`; in RAM if there are none."""
    kv_bytes: int = 0
    """The part of `device_bytes` for the KV cache."""
    utilization: float | None = None
    """`device_bytes` as a share of the smallest of its GPUs, rounded down."""
    swap_by: SwapBy | None = None
    ram_bytes: int = 0
    """RAM beside that: weights that are offloaded, or asleep."""
    replicas: tuple["Placed", ...] = ()
    """Further engines of a chat model, of the same variant and context."""

    @property
    def chats(self) -> int:
        """Conversations of full length for which the KV cache is large enough."""
        need, context = self.need, self.context_length
        return 0 if need is None or need.cache is None or context is None else need.cache.chats(self.kv_bytes, context)

    @property
    def context_length(self) -> int | None:
        """The most tokens of a conversation; None if it is not a chat model."""
        return self.need.context_in(self.kv_bytes) if self.need else None

    @property
    def sequences(self) -> int | None:
        """How many requests may run at the same time, if the KV cache has blocks for fewer than asked; else None."""
        need = self.need
        if need is None or need.cache is None:
            return None
        most = need.cache.sequences(self.kv_bytes, need.sequences)
        return most if most < need.sequences else None

    @property
    def places(self) -> tuple[int | None, ...]:
        """The devices that it runs on, by index: GPUs, or RAM alone."""
        return self.gpus or (None,)

    def bytes_on(self, index: int | None) -> int:
        """Return the bytes that it takes of a device."""
        return (self.device_bytes if index in self.places else 0) + (self.ram_bytes if index is None else 0)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A device and what the plan takes of it; of models that take turns, the largest counts."""

    device: Device
    used_bytes: int
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every model goes. Models in the order of models.yaml, devices as NVML counts them, RAM last."""

    hardware: Hardware
    models: tuple[Placed, ...]
    devices: tuple[DeviceUse, ...]

    @property
    def chosen(self) -> dict[str, VariantSpec | None]:
        """The variant of each model; None for one that is served by a demo, or by something unknown."""
        return {placed.id: placed.variant for placed in self.models}

    @property
    def engines(self) -> tuple[Placed, ...]:
        """All models, each followed by its replicas."""
        return tuple(engine for placed in self.models for engine in (placed, *placed.replicas))

    def of(self, engine: str) -> Placed | None:
        """Return where a model, or one of its replicas, goes."""
        return next((placed for placed in self.engines if placed.id == engine), None)


@dataclass(frozen=True, slots=True)
class Refusal:
    """No plan: which models cannot be placed, by how much, and the smallest change that would do, if it is known."""

    models: tuple[str, ...]
    message: str
    needed_bytes: int
    available_bytes: int
    change: str = ""
    on_gpus: bool = False
    """Whether GPUs are too small; else RAM is."""
    split: int = 1
    """The fewest GPUs that the model can be split over."""
