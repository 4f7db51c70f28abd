"""The process that engines on a CPU are forked from: started with what they need, and anew when it is gone."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import multiprocessing
import os
import signal
import threading
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil

from engine.backends.vllm_compat import guarded
from engine.process.spawning import with_variables

# oneDNN keeps 0.35 MiB and more for every size of a step, 1024 of them if let, which was half a GiB; 32 are as fast.
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}

_log = logging.getLogger("hearth.vllm")
_lock = threading.Lock()


def start_fork_server() -> None:
    """Start it. It imports vLLM in its own process, so this returns at once."""
    multiprocessing.set_forkserver_preload(["engine.backends.vllm_preload"])
    own = {"LD_PRELOAD": ":".join(_preloaded_libraries())}
    own |= {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    with with_variables(own):
        forkserver.ensure_running()


def ensure_fork_server_runs() -> None:
    """Before each process is forked: start it anew if it is gone, have it go on if it was stopped.

    Python would start another one by itself, but without the libraries above. The engines of the one before have ended
    with it: the kernel ends children that were tied to their parent (engine/backends/vllm_plugin.py).
    """
    with _lock, guarded("fork server"):
        server: Any = forkserver._forkserver  # noqa: SLF001  # not offered in public
        pid: int | None = server._forkserver_pid  # noqa: SLF001
        state = _state_of(pid)
        if pid is not None and state == psutil.STATUS_STOPPED:
            _log.warning("Process %d, which engines are forked from, was stopped; it is told to go on.", pid)
            os.kill(pid, signal.SIGCONT)
        elif state in {None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}:
            if pid is not None:
                _log.warning("Process %d, which engines are forked from, is gone; a new one takes its place.", pid)
            start_fork_server()


def _state_of(pid: int | None) -> str | None:
    with contextlib.suppress(psutil.Error):
        return None if pid is None else str(psutil.Process(pid).status())
    return None


def _preloaded_libraries() -> list[str]:
    """What vLLM's CPU platform puts into LD_PRELOAD of its processes: PyTorch's libgomp and tcmalloc."""
    found = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
    for package, pattern in (
        ("vllm", "libs/libtcmalloc_minimal*.so*"),
        ("torch", "lib/libgomp*.so*"),
        ("torch", "../torch.libs/libgomp*.so*"),
    ):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            found += [str(path.resolve()) for path in sorted(Path(spec.origin).parent.glob(pattern))[:1]]
    return list(dict.fromkeys(found))  # vLLM may have put them there since
