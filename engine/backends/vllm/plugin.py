"""Runs in every process of an engine: it ends with the server, and takes our patches of vLLM.

vLLM calls it through the entry point `vllm.general_plugins`. The engine's own process has called `tie_to_parent`
before that (processes.py).
"""

from __future__ import annotations

import gc
import multiprocessing

from engine.backends.vllm.compat import apply
from engine.backends.vllm.processes import runs_on_cpu, tie_to_parent

# Python's own are 700, 10, 10, which a step of 128 requests passes several times: a twentieth of an engine's time.
_GC_THRESHOLDS = (20_000, 20, 20)


def register() -> None:
    """Called by vLLM itself in each of its processes; the one that serves HTTP only registers the kernels."""
    if runs_on_cpu():
        apply("cpu kernels", _kernels)
    if multiprocessing.parent_process() is None:
        return
    from engine.backends.vllm.grammars import add_grammar_threads
    from engine.backends.vllm.patches import (
        commit_kv_cache_at_start,
        compile_only_models,
        load_compiled_models,
        sample_discarded_tokens_unseeded,
    )

    tie_to_parent()
    gc.set_threshold(*_GC_THRESHOLDS)
    apply("amx", _init_amx)
    apply("grammar threads", add_grammar_threads)
    if runs_on_cpu():
        apply("seeds", sample_discarded_tokens_unseeded)
        apply("cache at start", commit_kv_cache_at_start)
        apply("compile models only", compile_only_models)
        apply("load compiled code", load_compiled_models)


def _kernels() -> None:
    from engine.backends.vllm.patches import register_kernels

    register_kernels()


def _init_amx() -> None:
    """Ask the kernel for the AMX tiles: without it a very short first prompt ends in SIGILL on such CPUs."""
    import torch

    if torch.cpu._is_amx_tile_supported():  # noqa: SLF001  # no public name for it
        torch.cpu._init_amx()  # noqa: SLF001
