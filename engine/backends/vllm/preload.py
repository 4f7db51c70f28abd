"""Imported by the fork server: what an engine process on a CPU imports anyway.

A fork of a process that has it is ready in 5 s, a new one in 20 s.
"""

import contextlib
import gc
import importlib
import logging
import os

from engine.backends.vllm import compat
from engine.process.spawning import end_with_starter

# By itself it sees that the server is gone, but takes seconds then to put away what it has imported.
end_with_starter()
# SIGTERM and Ctrl-C sent to the server's process group are the server's to act on: it drains first.
os.setpgid(0, 0)

logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])

# Half a million objects come to stay. To look through them again and again would take a quarter of the time.
gc.disable()
for _name in (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.model_executor.model_loader",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.sample.sampler",
    "vllm.model_executor.models.qwen3",
):
    with contextlib.suppress(ImportError):  # moved in another vLLM: the engine imports it itself, a little later
        importlib.import_module(_name)
# What engines ask of each patch of theirs, so that none reads vLLM's sources for it.
for _patch in (
    "amx",
    "grammar threads",
    "seeds",
    "cache at start",
    "compile models only",
    "load compiled code",
    "cpu kernels",
):
    compat.fits(_patch)
# Nor are they an engine's to look through: it would copy every page that it shares with this process. The garbage among
# them, in cycles, is left on purpose: it is little, and to look for it would take longer than it is worth.
gc.freeze()
gc.enable()
