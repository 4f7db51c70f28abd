"""Records of loads in the data folder: how long each phase took, what was compiled, which weights made vectors."""

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from engine.config import ChatModelSpec
from engine.config.models import model_of
from engine.errors import LoadError
from engine.files import read_record, write_record

TIMES_FILE = "load-times.json"
COMPILED_FILE = "compiled.json"
VECTORS_FILE = "vectors.json"

_log = logging.getLogger("hearth.records")
_NO_SOURCES = "a change of an embedding model's weights goes unnoticed"
_LOOKED_AT_BYTES = 2**20  # of the end of each file of weights: every training changes all of it
_NO_TIMES = "the next start will not say how long it takes"


class _Times(msgspec.Struct):
    seconds_to_ready: dict[str, dict[str, float]] = {}


class LoadTimes:
    """By model and phase, the seconds from the beginning of the phase until the model was ready.

    `again`: a later load in this process, which is faster, since libraries are imported already.
    """

    def __init__(self, data_dir: Path | None = None) -> None:
        """`data_dir` None: times are kept in memory only."""
        self._file = None if data_dir is None else data_dir / TIMES_FILE
        self._known = read_record(self._file, _Times, _NO_TIMES)

    def remaining(self, model: str, phase: str, seconds_in_phase: float, *, again: bool) -> float | None:
        """Return the seconds that the load should still take; None if this phase was never recorded."""
        known = self._known.seconds_to_ready.get(_key(model, again=again), {}).get(phase)
        return None if known is None else max(0.0, known - seconds_in_phase)

    def keep(self, model: str, begun: Sequence[tuple[str, float]], ready: float, *, again: bool) -> None:
        """Keep a load: `begun` says when each phase began, `ready` when it was over, on one clock, in seconds."""
        took = {phase: round(ready - moment, 1) for phase, moment in reversed(begun)}
        self._known.seconds_to_ready[_key(model, again=again)] = took
        if self._file is not None:
            write_record(self._file, self._known, _NO_TIMES)


def _key(model: str, *, again: bool) -> str:
    return f"{model} again" if again else model


def compiler() -> str | None:
    """Return the C++ compiler that torch would use: `CXX`, else g++; None if there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


class _Sources(msgspec.Struct):
    weights: dict[str, str] = {}


def keep_source_of_vectors(data_dir: Path | None, model: str, weights: Path) -> None:
    """Record the weights that an embedding model was loaded with; warn if they are others than before. Blocks."""
    if data_dir is None:
        return
    file, known = data_dir / VECTORS_FILE, hashlib.sha256()
    for part in sorted(weights.glob("*.safetensors")):
        with part.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - _LOOKED_AT_BYTES))
            known.update(b"%s %d %s" % (part.name.encode(), size, opened.read()))
    now = f"{weights.name} {known.hexdigest()[:12]}"
    record = read_record(file, _Sources, _NO_SOURCES)
    before = record.weights.get(model, now)
    if before != now:
        _log.warning(
            "%s makes vectors with other weights than before (%s, now %s): they do not fit those that were stored. "
            "Embed all texts again, or put the old weights back.",
            *(model, before, now),
        )
    if record.weights.get(model) != now:
        record.weights[model] = now
        write_record(file, record, _NO_SOURCES)


class _Compiled(msgspec.Struct):
    compiled: dict[str, str] = {}


class CompiledModels:
    """By model and folder, what its code was made for. Other processes write it too.

    vLLM compiles a model at its first start, for a minute or two on a CPU, and keeps the code in its cache
    (engine/backends/vllm/plugin.py has it load that). A start on a CPU uses what is there and never waits for it.
    """

    def __init__(self, data_dir: Path | None, versions: Callable[[], str]) -> None:
        """`versions` names what code depends on beside the model. `data_dir` None: nothing is kept or known."""
        self._file = None if data_dir is None else data_dir / COMPILED_FILE
        self._versions = versions
        self._unusable: set[str] = set()
        self.lacking: set[str] = set()  # models that run uncompiled because they have no code

    def choose(self, spec: ChatModelSpec, weights: Path) -> bool:
        """Whether it starts compiled: models.yaml says so, or says nothing and it has been compiled before."""
        self.lacking.discard(model_of(spec.id))
        if spec.engine.enforce_eager is not None:
            return not spec.engine.enforce_eager
        usable = _code_key(spec, weights) not in self._unusable and compiler() is not None  # vLLM asks for its version
        if usable and self._is_known(spec, weights):
            return True
        self.lacking.add(model_of(spec.id))
        return False

    @contextmanager
    def used(self, spec: ChatModelSpec, weights: Path) -> Iterator[None]:
        """The block starts it compiled. If that fails and `enforce_eager` is not set, the next try is uncompiled."""
        try:
            yield
        except LoadError:  # the model's fault, not its code's
            raise
        except Exception:
            if spec.engine.enforce_eager is None:
                self._unusable.add(_code_key(spec, weights))
                _log.warning(
                    "%s does not start with the code that was compiled for it. Until the server is restarted it runs "
                    "uncompiled, and slower. `hearth compile %s` makes new code.",
                    *(spec.id, model_of(spec.id)),
                )
            raise
        if self._file is not None and not self._is_known(spec, weights):
            self._keep(self._file, spec, weights)

    def _keep(self, file: Path, spec: ChatModelSpec, weights: Path) -> None:
        with ExitStack() as locked:
            with suppress(OSError):  # then the record cannot be written either
                fcntl.flock(locked.enter_context(file.with_suffix(".lock").open("w")), fcntl.LOCK_EX)
            known = _Compiled(self._read() | {_code_key(spec, weights): self._made_for(spec)})
            write_record(file, known, "the next start runs its models uncompiled")

    def _is_known(self, spec: ChatModelSpec, weights: Path) -> bool:
        return self._read().get(_code_key(spec, weights)) == self._made_for(spec)

    def _made_for(self, spec: ChatModelSpec) -> str:
        engine = spec.engine
        settings = f"dtype {engine.dtype}, max_num_seqs {engine.max_num_seqs}, context_length {engine.context_length}"
        return f"{self._versions()}, {settings}"

    def _read(self) -> dict[str, str]:
        return read_record(self._file, _Compiled, "models run uncompiled until `hearth compile`").compiled


def _code_key(spec: ChatModelSpec, weights: Path) -> str:
    return f"{model_of(spec.id)}: {weights.resolve()}"
