"""The arithmetic of vLLM's KV cache: how large its blocks are, how many there are, and how many a conversation takes.

vLLM puts the layers of a model into groups of equally many layers that keep the same. A block holds so many tokens of
the layers of one group, and all groups take blocks of one pool. Layers with full attention keep every token, those with
a sliding window the last ones, and those with linear attention a state of fixed size, for which the block is made large
enough (vllm/v1/core/kv_cache_utils.py, and `_align_hybrid_block_size` in vllm/platforms/interface.py).
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Self

from engine.placement.hardware import GIB

# Tokens of a block are a multiple of this: on a CPU, and with some kernels on GPUs, of the larger one.
GPU_BLOCK, CPU_BLOCK = 16, 128
CPU_CACHE_GIB = 1.0  # on a CPU, where models.yaml names no size
# A state beside the one that is computed next: vLLM keeps it for prompts that begin alike.
_STATES_OF_A_CHAT = 2
# Tokens that vLLM computes in one step, by the memory of the GPU (its `get_batch_defaults`), in two steps at a time:
# until they are done, layers with a sliding window keep them too.
_STEP_TOKENS = ((160 * GIB, 16384), (70 * GIB, 8192), (0, 2048))
_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class KvCache:
    """How the KV cache of a model is divided on each of its devices."""

    block_bytes: int
    block_tokens: int
    full_groups: int
    """Groups of layers that keep every token."""
    window_groups: int
    window_tokens: int
    """That each of `window_groups` keeps at most, with those that are being computed."""
    state_groups: int
    """Groups of layers that keep a state; then no more sequences may run than there are blocks."""

    @classmethod
    def of(cls, token_bytes: int, *, groups: int, window: int | None, state_bytes: int, gpu_bytes: int) -> Self:
        """Divide a cache of `groups` groups on GPUs of that size; 0: in RAM.

        `token_bytes` are those of one token in the layers of one group, `state_bytes` those of a conversation in all
        layers with linear attention; both on each device, and the first above 0. The groups are one with full
        attention and the others with states, or with a `window`; a single group with a window has no other beside it.
        """
        full = 0 if groups == 1 and window else 1
        beside = groups - full
        state_groups = beside if state_bytes else 0
        tokens = least_block = GPU_BLOCK if gpu_bytes else CPU_BLOCK
        if state_groups:
            tokens *= max(1, -(-state_bytes // (state_groups * least_block * token_bytes)))
        windows = 0 if state_groups else beside
        in_flight = _STEPS_IN_FLIGHT * next(tokens for least, tokens in _STEP_TOKENS if gpu_bytes >= least)
        return cls(tokens * token_bytes, tokens, full, windows, (window or 0) - 1 + in_flight, state_groups)

    def coarse(self) -> Self:
        """Return how it is divided where the larger multiple counts: what fits then fits with any kernel."""
        tokens = -(-self.block_tokens // CPU_BLOCK) * CPU_BLOCK
        return replace(self, block_tokens=tokens, block_bytes=self.block_bytes // self.block_tokens * tokens)

    def blocks(self, cache_bytes: int) -> int:
        """Return how many blocks a cache of that size has; one of them is never given out."""
        return cache_bytes // self.block_bytes

    def blocks_of_chat(self, tokens: int) -> int:
        windows = -(-min(tokens, self.window_tokens) // self.block_tokens) + 1
        fixed = self.window_groups * windows + self.state_groups * _STATES_OF_A_CHAT
        return self.full_groups * -(-tokens // self.block_tokens) + fixed

    def bytes_of(self, chats: int, tokens: int) -> int:
        return (chats * self.blocks_of_chat(tokens) + 1) * self.block_bytes

    def chats(self, cache_bytes: int, tokens: int) -> int:
        return max(0, self.blocks(cache_bytes) - 1) // self.blocks_of_chat(tokens)

    def longest(self, cache_bytes: int, most: int) -> int:
        """Return for how many tokens of one conversation there is room, up to `most`; 0: not even for one."""
        return bisect_right(range(1, most + 1), self.blocks(cache_bytes) - 1, key=self.blocks_of_chat)

    def sequences(self, cache_bytes: int, asked: int) -> int:
        """Return how many of the sequences that were asked for may run: vLLM refuses to start with more."""
        return max(1, min(asked, self.blocks(cache_bytes) - 1)) if self.state_groups else asked
