"""Runs in every process of an engine: ties its life to the server's, readies the CPU.

The engine's own process calls `tie_to_parent` before anything else (vllm_launch.py). Processes that vLLM starts
from there come here through the entry point `vllm.general_plugins`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from multiprocessing import forkserver
from typing import Any

from engine.backends.vllm_compat import apply, guarded
from engine.process.spawning import end_with_starter

# Python's own are 700, 10, 10, which a step of 128 requests passes several times: a twentieth of an engine's time.
_GC_THRESHOLDS = (20_000, 20, 20)


def register() -> None:
    """Called by vLLM itself in each of its processes; the one that serves HTTP only learns what kernels there are."""
    from engine.backends.vllm_launch import runs_on_cpu

    if runs_on_cpu():
        apply("cpu kernels", _kernels)
    if multiprocessing.parent_process() is None:
        return
    from engine.backends.vllm_compiled import compile_only_models, load_what_was_compiled
    from engine.backends.vllm_cpu_cache import take_cache_at_start
    from engine.backends.vllm_grammar_process import widen_engine
    from engine.backends.vllm_seeds import spare_seeds
    from engine.backends.vllm_slots import spare_searches

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
    from engine.backends.vllm_cpu_kernels import register_kernels

    register_kernels()


def tie_to_parent() -> None:
    """Make this process end with the server, however the server ends. Safe to call twice.

    The kernel's signal follows the *thread* that forked this process: the starter threads live as long as
    the server does (vllm_launch.py), and the fork server has only one.
    """
    _let_fork_server_end()
    end_with_starter()
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        os._exit(1)  # it died between our fork and the line above
    # Ctrl-C in a terminal goes to the whole process group. The server drains first, then stops its engines.
    os.setpgid(0, 0)


def _let_fork_server_end() -> None:
    """Close our end of the pipe by which the fork server sees that nobody needs it any more.

    Python hands it to every child, for forks of the child's own. With it open, fork server and engine would
    keep each other alive after the server's death.
    """
    with guarded("fork server"):
        server: Any = forkserver._forkserver  # noqa: SLF001  # not offered in public
        if server._forkserver_alive_fd is not None:  # noqa: SLF001
            os.close(server._forkserver_alive_fd)  # noqa: SLF001
            server._forkserver_alive_fd = None  # noqa: SLF001


def _init_amx() -> None:
    """Ask the kernel for the AMX tiles: without it a very short first prompt ends in SIGILL on such CPUs."""
    import torch

    if torch.cpu._is_amx_tile_supported():  # noqa: SLF001  # no public name for it
        torch.cpu._init_amx()  # noqa: SLF001
