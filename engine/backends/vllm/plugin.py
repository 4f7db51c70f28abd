"""Runs in every process of an engine: ties its life to the server's, readies the CPU.

The engine's own process calls `tie_to_parent` before anything else (processes.py). Processes that vLLM starts
from there come here through the entry point `vllm.general_plugins`.
"""

from __future__ import annotations

import gc
import multiprocessing

from engine.backends.vllm.compat import apply
from engine.backends.vllm.processes import runs_on_cpu, tie_to_parent

# Python's own are 700, 10, 10, which a step of 128 requests passes several times: a twentieth of an engine's time.
_GC_THRESHOLDS = (20_000, 20, 20)


def register() -> None:
    """Called by vLLM itself in each of its processes; the one that serves HTTP only learns what kernels there are."""
    if runs_on_cpu():
        apply("cpu kernels", _kernels)
    if multiprocessing.parent_process() is None:
        return
    from engine.backends.vllm.grammar_process import widen_engine
    from engine.backends.vllm.patches import (
        compile_only_models,
        load_what_was_compiled,
        spare_searches,
        spare_seeds,
        take_cache_at_start,
    )

    tie_to_parent()
    gc.set_threshold(*_GC_THRESHOLDS)
    apply("amx", _init_amx)
    apply("grammar threads", widen_engine)
    apply("slots", spare_searches)
    if runs_on_cpu():
        apply("seeds", spare_seeds)
        apply("cache at start", take_cache_at_start)
        apply("compile models only", compile_only_models)
        apply("load compiled code", load_what_was_compiled)


def _kernels() -> None:
    from engine.backends.vllm.patches import register_kernels

    register_kernels()


def _init_amx() -> None:
    """Ask the kernel for the AMX tiles: without it a very short first prompt ends in SIGILL on such CPUs."""
    import torch

    if torch.cpu._is_amx_tile_supported():  # noqa: SLF001  # no public name for it
        torch.cpu._init_amx()  # noqa: SLF001
