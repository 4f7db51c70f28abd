"""How fast memory is, and how many tokens a second that allows. Needs torch alone."""

from __future__ import annotations

import time
from typing import Any

_COPIED_BYTES = 4 << 30
_TIMES = 8


def bandwidth() -> float:
    """Return the bytes a second that a large copy on the GPU reads and writes, the best of some."""
    import torch

    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(_TIMES):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = max(best, 2 * _COPIED_BYTES / (time.perf_counter() - begun))
    return best


def tokens_per_second(config: dict[str, Any], weights_bytes: float, streams: int, bytes_per_second: float) -> float:
    """Return how many tokens a second can be made where all weights that a step uses are read once for it.

    KV caches, which are read as well, are left out: they are small beside the weights for short conversations.
    """
    return streams * bytes_per_second / (weights_bytes * _part_used(config, streams))


def _part_used(config: dict[str, Any], tokens: int) -> float:
    """Return which part of the weights a step of so many tokens reads: of experts those that any token is sent to."""
    text: dict[str, Any] = config.get("text_config") or config
    experts = text.get("num_experts") or text.get("num_local_experts")
    if not experts:
        return 1.0
    per_token = text.get("num_experts_per_tok") or text.get("experts_per_token") or 1
    width, inside = text["hidden_size"], text.get("moe_intermediate_size") or text["intermediate_size"]
    of_experts = text["num_hidden_layers"] * experts * 3 * width * inside
    words = 2 * text["vocab_size"] * width  # one table of them is looked up, the other multiplied
    of_layers = text["num_hidden_layers"] * 6 * width * width  # attention, roughly
    used = 1 - (1 - per_token / experts) ** tokens
    return float((of_experts * used + of_layers + words / 2) / (of_experts + of_layers + words))


if __name__ == "__main__":
    print(bandwidth())
