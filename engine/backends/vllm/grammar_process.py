"""What runs in a process of the schema compiler: vLLM's own grammar backend, on one grammar at a time, until killed.

The other end of the socket, and every decision, is in grammars.py.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

PROCESS_NAME = "hearth-schemas"
LENGTH = struct.Struct("!I")
# What a compilation may need on top of the process itself. The largest schemas that compile in time take a tenth.
_MEMORY_BYTES = 2**30
# One more than there are slow compilations at a time (grammars.py), so that quick ones find a thread.
_ENGINE_THREADS = 7


def serve(end: socket.socket, config: Any) -> None:
    """Answer each frame (length, JSON of [kind, grammar]) by one line of JSON: `seconds`, or what is wrong.

    `config` is the engine's `VllmConfig`: tokenizer and compiler are made of it as the engine makes its own.
    """
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    model = config.model_config
    tokenizer = cached_tokenizer_from_config(model_config=model)
    backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=model.get_vocab_size())
    _confine()
    with end, end.makefile("rwb") as stream:
        _say(stream, {})
        while header := stream.read(LENGTH.size):
            (size,) = LENGTH.unpack(header)
            kind, grammar = json.loads(stream.read(size))
            _say(stream, _compile(backend, kind, grammar))


def widen_engine() -> None:
    """Give the engine process that this runs in enough threads for grammars: vLLM takes half the cores."""
    from vllm.v1.structured_output import StructuredOutputManager

    make = StructuredOutputManager.__init__

    def widened(manager: Any, *arguments: Any, **named: Any) -> None:
        make(manager, *arguments, **named)
        if hasattr(manager, "executor"):
            manager.executor.shutdown()  # idle still
            manager.executor = ThreadPoolExecutor(_ENGINE_THREADS)

    StructuredOutputManager.__init__ = widened


def _compile(backend: Any, kind: str, grammar: str) -> dict[str, Any]:
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    began = time.monotonic()
    try:
        backend.compile_grammar(StructuredOutputOptions[kind], grammar)
    except MemoryError:
        return {"problem": "memory"}
    except Exception as error:  # noqa: BLE001  # xgrammar raises many kinds, all of them about the grammar
        return {"problem": "memory" if "bad_alloc" in str(error) else "invalid"}
    finally:
        backend.compiler.clear_cache()
    return {"seconds": time.monotonic() - began}


def _confine() -> None:
    """Whatever eats the memory of this process ends this process, silently, and no other. Engines go first."""
    os.nice(10)
    Path("/proc/self/comm").write_text(PROCESS_NAME, encoding="ascii")
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # not everywhere allowed
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    # A compiler that runs out of memory writes about it, and about keywords that it does not know.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _say(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()
