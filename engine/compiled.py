"""Which chat models were compiled on this machine, so that a start on a CPU uses what is there and never waits for it.

vLLM compiles a model at its first start, for up to a minute on a CPU, and keeps the code in its cache. Here stands for
which models it has; the code itself is vLLM's (engine/backends/vllm_compiled.py has it load what it kept).
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.small_files import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from engine.config import ChatModelSpec

FILE_NAME = "compiled.json"

_log = logging.getLogger("hearth.compiled")


class CompiledModels:
    """By model, what its code was made for. Kept in one small JSON file."""

    def __init__(self, data_dir: Path | None, versions: str) -> None:
        """`versions` names vLLM's and torch's. `data_dir` None: nothing is kept, and nothing known."""
        self._file = None if data_dir is None else data_dir / FILE_NAME
        self._versions = versions
        self.lacking: set[str] = set()  # what starts uncompiled only because nobody has compiled it
        self._made_for = {} if self._file is None else _read(self._file)

    def wanted(self, spec: ChatModelSpec, weights: Path) -> bool:
        """Whether it starts compiled: because models.yaml says so, or says nothing and it has been compiled before."""
        there = self._made_for.get(spec.id) == self._would_be_for(spec, weights)
        asked = spec.engine.enforce_eager
        (self.lacking.discard if there or asked is not None else self.lacking.add)(spec.id)
        return there if asked is None else not asked

    @contextmanager
    def used(self, spec: ChatModelSpec, weights: Path) -> Iterator[None]:
        """Hold while it starts compiled. If it fails, and models.yaml does not insist, the next try is uncompiled."""
        try:
            yield
        except Exception:
            if spec.engine.enforce_eager is None and self._made_for.pop(spec.id, None) is not None:
                _log.warning(
                    "%s does not start with the code that was compiled for it; from now on it starts uncompiled. "
                    "`hearth compile %s` makes new code.",
                    *(spec.id, spec.id),
                )
                self._write()
            raise
        made_for = self._would_be_for(spec, weights)
        if self._made_for.get(spec.id) != made_for:
            self._made_for[spec.id] = made_for
            self._write()

    def _would_be_for(self, spec: ChatModelSpec, weights: Path) -> dict[str, str]:
        settings = f"dtype {spec.engine.dtype}, max_num_seqs {spec.engine.max_num_seqs}"
        return {"weights": str(weights.resolve()), "versions": self._versions, "settings": settings}

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            replace_file(self._file, json.dumps({"compiled": self._made_for}, indent=1) + "\n")
        except OSError as error:
            _log.warning("%s cannot be written (%s): the next start runs its models uncompiled.", self._file, error)


def _read(file: Path) -> dict[str, dict[str, str]]:
    try:
        kept: Mapping[str, Mapping[str, str]] = json.loads(file.read_text(encoding="utf-8"))["compiled"]
        return {str(model): {str(key): str(value) for key, value in of.items()} for model, of in kept.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _log.warning("%s cannot be read (%s): models run uncompiled until `hearth compile`.", file, error)
        return {}
