"""Imported by the fork server: what each engine process on a CPU imports. A fork is ready in 5 s, a new one in 20 s."""

import contextlib
import gc
import importlib
import logging
import os

from engine.backends.vllm import compat
from engine.backends.vllm.processes import become_fork_server

become_fork_server()

logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])

# Imports make half a million objects, which stay. Collecting garbage meanwhile would take a quarter of the time.
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
    with contextlib.suppress(ImportError):  # another vLLM may have moved it: then the engine imports it later
        importlib.import_module(_name)
for _patch in importlib.import_module("engine.backends.vllm.plugin").patches():
    compat.fits(_patch)  # checked once for all engines: it reads vLLM's sources
# Frozen: a collection in an engine would copy every page that it shares with this process. The little garbage among
# them is left on purpose.
gc.freeze()
gc.enable()
