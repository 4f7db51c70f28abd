"""Runs in every process that vLLM starts (entry point `vllm.general_plugins`): ties its life to ours, readies AMX."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Called by vLLM itself, early in each of its processes; does nothing in the process that serves HTTP."""
    if multiprocessing.parent_process() is None:
        return
    _die_with_parent()
    # Ctrl-C in a terminal goes to the whole process group. The server drains first, then stops its engines.
    os.setpgid(0, 0)
    _init_amx()


def _die_with_parent() -> None:
    """No engine outlives the server, not even after `kill -9`.

    The kernel's signal follows the *thread* that forked this process: the starter threads live as long as
    the server does (engine/backends/vllm_launch.py), and the fork server has only one.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        os._exit(1)  # it died between our fork and the line above


def _init_amx() -> None:
    """Ask the kernel for the AMX tiles: without it a very short first prompt ends in SIGILL on such CPUs."""
    import torch

    if torch.cpu._is_amx_tile_supported():  # noqa: SLF001  # no public name for it
        torch.cpu._init_amx()  # noqa: SLF001
