"""What the benchmarked processes share: a temporary folder, a models.yaml of its own, and their environment."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.errors import BenchError
from engine import ConfigError, ModelSpec, load_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TIER = "bench"


@dataclass(frozen=True, slots=True)
class Workplace:
    """Gone after the benchmark, with the server's data directory and all logs."""

    folder: Path
    models: Path
    weights_dir: Path
    spec: ModelSpec
    environment: dict[str, str]
    beside: tuple[ModelSpec, ...] = ()  # the other models, if there are any
    plugin: bool = False
    """Whether vLLM's own servers get what Hearth adds to vLLM's engine, too, and not only their own."""

    def log(self, name: str) -> Path:
        """Return the file that the process `name` prints to."""
        return self.folder / f"{name}.log"


@contextmanager
def open_workplace(
    models: Path,
    model: str,
    weights_dir: Path | None,
    *,
    engine: dict[str, Any] | None = None,
    beside: Sequence[str] = (),
) -> Iterator[Workplace]:
    """Set up for one model of `models`, with the settings of `engine` above its own. Raises `BenchError`.

    Its tier is one of our own, so that no limit of a real tier is measured; without `weights_dir` there are no
    weights, and the demo model answers. The models named in `beside` are served too, as they are.
    """
    try:
        config = load_config(models)
    except ConfigError as error:
        raise BenchError(str(error)) from error
    for name in (model, *beside):
        if name not in config.models:
            known = ", ".join(config.models)
            raise BenchError(f"{models} has no model {name!r}, only: {known}. Choose one with --model.")
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as name:
        folder = Path(name)
        entries = yaml.safe_load(models.read_text(encoding="utf-8"))["models"]
        served = {name: entries[name] | {"tier": TIER} for name in (model, *beside)}
        served[model]["engine"] = (served[model].get("engine") or {}) | (engine or {})
        alone = {"models": served, "tiers": {TIER: {"models": [TIER]}}}
        (folder / "models.yaml").write_text(yaml.safe_dump(alone, sort_keys=False), encoding="utf-8")
        specs = load_config(folder / "models.yaml").models
        weights = folder / "weights" if weights_dir is None else weights_dir.resolve()
        yield Workplace(
            folder=folder,
            models=folder / "models.yaml",
            weights_dir=weights,
            spec=specs[model],
            environment=_environment(folder, weights),
            beside=tuple(specs[name] for name in beside),
        )


def served_names(models: Path) -> list[str]:
    """Return the names of all models of a models.yaml. Raises `BenchError`."""
    try:
        return [*load_config(models).models]
    except ConfigError as error:
        raise BenchError(str(error)) from error


def _environment(folder: Path, weights_dir: Path) -> dict[str, str]:
    """Leave out the settings of the server that may run here, and give every process one OpenMP thread."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    return {
        "OMP_NUM_THREADS": "1",
        **inherited,
        "HEARTH_DATA_DIR": str(folder / "data"),
        "HEARTH_WEIGHTS_DIR": str(weights_dir),
        "HEARTH_MODELS": str(folder / "models.yaml"),
    }
