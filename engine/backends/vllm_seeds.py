"""Keeps seeded requests from killing an engine on a CPU, in the process that computes. On a GPU vLLM is right itself.

While a long prompt is computed in several steps, vLLM samples a token in each and throws it away, and winds the
request's random numbers back after that. A CPU's generator cannot be wound back (vLLM 0.32): the engine would end.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def spare_seeds() -> None:
    """Draw what is thrown away from nobody's seed, so that nothing has to be wound back. Safe to call twice."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if "sample_tokens" not in vars(CPUModelRunner):
        CPUModelRunner.sample_tokens = _sampling(CPUModelRunner.sample_tokens)


def _sampling(sample_tokens: Any) -> Any:
    def sample(runner: Any, *arguments: Any, **named: Any) -> Any:
        batch = runner.input_batch
        unfinished = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs])
        put_aside = {place: batch.generators.pop(place) for place in map(int, unfinished) if place in batch.generators}
        try:
            return sample_tokens(runner, *arguments, **named)
        finally:
            batch.generators.update(put_aside)

    return sample
