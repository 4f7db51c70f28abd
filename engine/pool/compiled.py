"""Which chat models were compiled on this machine, so that a start on a CPU uses what is there and never waits for it.

vLLM compiles a model at its first start, for a minute or two on a CPU, and keeps the code in its cache. Here stands for
which models it has; the code itself is vLLM's (engine/backends/vllm/plugin.py has it load what it kept).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.config import ChatModelSpec
from engine.errors import LoadError
from engine.files import write_atomically

FILE_NAME = "compiled.json"

_log = logging.getLogger("hearth.compiled")


def compiler() -> str | None:
    """Return the C++ compiler that torch would use: `CXX`, else g++; None if it is not here."""
    return shutil.which(os.environ.get("CXX") or "g++")


class CompiledModels:
    """By model and folder, what its code was made for. Kept in one small JSON file that other processes write, too."""

    def __init__(self, data_dir: Path | None, versions: Callable[[], str]) -> None:
        """`versions` names what code depends on beside the model. `data_dir` None: nothing is kept, nothing known."""
        self._file = None if data_dir is None else data_dir / FILE_NAME
        self._versions = versions
        self._unusable: set[str] = set()
        self.lacking: set[str] = set()  # what was started uncompiled for want of code

    def choose(self, spec: ChatModelSpec, weights: Path) -> bool:
        """Whether it starts compiled: because models.yaml says so, or says nothing and it has been compiled before."""
        self.lacking.discard(spec.id)
        if spec.engine.enforce_eager is not None:
            return not spec.engine.enforce_eager
        place = _place(spec, weights)
        usable = place not in self._unusable and compiler() is not None  # vLLM asks it for its version
        if usable and self._read().get(place) == self._made_for(spec):
            return True
        self.lacking.add(spec.id)
        return False

    @contextmanager
    def used(self, spec: ChatModelSpec, weights: Path) -> Iterator[None]:
        """Hold while it starts compiled. If it fails, and models.yaml does not insist, the next try is uncompiled."""
        try:
            yield
        except LoadError:  # of the model, not of its code
            raise
        except Exception:
            if spec.engine.enforce_eager is None:
                self._unusable.add(_place(spec, weights))
                _log.warning(
                    "%s does not start with the code that was compiled for it. Until the server is restarted it runs "
                    "uncompiled, and slower. `hearth compile %s` makes new code.",
                    *(spec.id, spec.id),
                )
            raise
        self._keep(spec, weights)

    def _keep(self, spec: ChatModelSpec, weights: Path) -> None:
        if self._file is None or self._read().get(_place(spec, weights)) == self._made_for(spec):
            return
        try:
            with self._file.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                made = self._read() | {_place(spec, weights): self._made_for(spec)}
                write_atomically(self._file, json.dumps({"compiled": made}, indent=1) + "\n")
        except OSError as error:
            _log.warning("%s cannot be written (%s): the next start runs its models uncompiled.", self._file, error)

    def _made_for(self, spec: ChatModelSpec) -> str:
        engine = spec.engine
        settings = f"dtype {engine.dtype}, max_num_seqs {engine.max_num_seqs}, context_length {engine.context_length}"
        return f"{self._versions()}, {settings}"

    def _read(self) -> dict[str, str]:
        if self._file is None:
            return {}
        try:
            kept: dict[str, str] = json.loads(self._file.read_text(encoding="utf-8"))["compiled"]
            return {str(place): str(made_for) for place, made_for in kept.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            _log.warning("%s cannot be read (%s): models run uncompiled until `hearth compile`.", self._file, error)
            return {}


def _place(spec: ChatModelSpec, weights: Path) -> str:
    return f"{spec.id}: {weights.resolve()}"
