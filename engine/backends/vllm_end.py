"""Ends a vLLM engine for good: its processes, then the sockets, threads and descriptors that its client has with us."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from engine.backends import vllm_compat

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.process import BaseProcess

# vLLM closes its sockets on the event loop, sometimes by way of a thread of its own.
_CLOSING_SECONDS = 30.0
_LOOK_SECONDS = 0.02
# Its thread that watches the processes looks every second whether it is to end, and at their descriptors meanwhile.
_WATCHED_SECONDS = 2.0


def end_engine(engine: Any, timeout_seconds: float) -> None:
    """Blocking. End the processes within that time; what the client of an `AsyncLLM` has open is closed soon after.

    vLLM leaves its ZeroMQ context and its processes' pipes to the garbage collector: eleven descriptors and three
    threads of every engine, until that comes by; and those of the first engine for ever, because it is among what is no
    longer looked through (server/heap.py).
    """
    engine.shutdown(timeout=timeout_seconds)
    processes = processes_of(engine)
    with vllm_compat.guarded("end"):
        resources = engine.engine_core.resources
        # By their ending: releases of vLLM have called them differently.
        sockets = [each for name, each in vars(resources).items() if name.endswith("_socket") and each is not None]
        # A daemon that nobody waits for: ZeroMQ waits for ever where a socket is open, and the event loop closes them.
        threading.Thread(target=_close, args=(resources.ctx, sockets, processes), name="vllm-end", daemon=True).start()


def processes_of(engine: Any) -> list[BaseProcess]:
    """Return those that vLLM's client knows."""
    with vllm_compat.guarded("end"):
        manager = engine.engine_core.resources.engine_manager
        return [] if manager is None else list(manager.processes)
    return []


def _close(context: Any, sockets: Iterable[Any], processes: Iterable[BaseProcess]) -> None:
    time.sleep(_WATCHED_SECONDS)
    for process in processes:
        with contextlib.suppress(ValueError):  # it still runs, or somebody was quicker
            process.close()
    deadline = time.monotonic() + _CLOSING_SECONDS
    for socket in sockets:
        while not socket.closed:
            if time.monotonic() > deadline:
                return  # left to the garbage collector, like vLLM does
            time.sleep(_LOOK_SECONDS)
    context.destroy(linger=0)
