"""What the plan means for loading: which folder, which engine values, which GPUs, and what it took in the end.

The plan itself is engine/placement's. What models.yaml says under `engine` always wins.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from engine import demo
from engine.errors import LoadError
from engine.holdings import Shares
from engine.placement.hardware import GIB, read_hardware, with_ram
from engine.placement.measured import Footprints
from engine.placement.needs import demo_need, own_folders, variants_here
from engine.placement.packing import ASLEEP_BYTES, asleep_bytes
from engine.placement.plan import plan
from engine.placement.report import better_ones
from engine.placement.types import Plan, Refusal
from engine.process.spawning import with_variables
from engine.residency import Residency, Room
from engine.types import Served
from engine.weights import is_complete

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from engine.config import ChatModelSpec, Config, ImageModelSpec, ModelSpec
    from engine.holdings import Holdings
    from engine.placement.hardware import Hardware
    from engine.placement.types import Device, Placed

_log = logging.getLogger("hearth.plan")

# The demos learned no longer conversations.
_DEMO_CONTEXT = 2048
_DEMO_KV_GIB = 0.0625
_DEMO_SHARE = 0.1


class Planned:
    """The plan for one models.yaml on this machine. Made at the start and at every reload."""

    def __init__(self, config: Config, weights_dir: Path, data_dir: Path | None, hardware: Hardware) -> None:
        self._weights_dir = weights_dir
        self._data_dir = data_dir
        self._on_gpu = bool(hardware.gpus)
        self._names = {gpu.index: gpu.name for gpu in hardware.gpus}
        footprints = Footprints() if data_dir is None else Footprints.read(data_dir)
        self._own = own_folders(config, weights_dir)
        here = variants_here(config, weights_dir)
        self.plan: Plan | Refusal = plan(config, hardware, footprints, self._own, here)
        """What is served, of what is on the disk."""
        self._best = plan(config, hardware, footprints, self._own)
        self._tell(config)

    def _tell(self, config: Config) -> None:
        refused = next((found for found in (self.plan, self._best) if isinstance(found, Refusal)), None)
        if refused is not None:
            _log.error("%s. Smallest change: %s.", refused.message, refused.change)
        for model, variant in better_ones(config, self._best, self.plan).items():
            placed = self.of(model)
            if placed is not None and placed.variant is not None:
                what = "%s is served with %s. %s, which is better, fits this machine: hearth weights pull %s"
                _log.info(what, model, placed.variant.id, variant.id, model)

    def of(self, model: str) -> Placed | None:
        """Return what the plan says of a model."""
        return self.plan.of(model) if isinstance(self.plan, Plan) else None

    def folder(self, spec: ModelSpec) -> tuple[Path, bool]:
        """Return the folder to load, and whether it is the demo: the operator's own, else the plan's, else the demo.

        Raises `LoadError` where there is none, and on GPUs where the plan was refused because of this model.
        """
        found = self._real_folder(spec)
        if found is None and spec.demo is not None:
            return demo.weights_dir(spec.demo), True
        if found is None:
            best = self._best.of(spec.id) if isinstance(self._best, Plan) else None
            pull = f" 2. hearth weights pull {spec.id};" if best and best.variant else ""
            raise LoadError(
                f"{spec.id}: there is no folder {spec.weights!r} in the weights directory. Pick one: 1. put the "
                f"model's files there;{pull} {3 if pull else 2}. set `demo` in models.yaml; {4 if pull else 3}. take "
                "the model out of models.yaml."
            )
        if self._on_gpu and isinstance(self.plan, Refusal) and spec.id in self.plan.lack.models:
            raise LoadError(f"{self.plan.message}. Smallest change: {self.plan.change}.")
        return found, False

    def is_demo(self, spec: ModelSpec) -> bool:
        """Whether the demo would answer for a model."""
        return spec.demo is not None and self._real_folder(spec) is None

    def _real_folder(self, spec: ModelSpec) -> Path | None:
        own = self._weights_dir / spec.weights
        if own.is_dir():
            return own
        placed = self.of(spec.id)
        planned = None if placed is None or placed.variant is None else self._weights_dir / placed.variant.id
        return planned if planned is not None and is_complete(planned) else None

    def shares(self, config: Config) -> Shares:
        """Return what each model takes, and of how much; nothing where the plan was refused.

        It goes by what answers now: a demo takes what a demo takes, whatever is planned in its place.
        """
        if not isinstance(self.plan, Plan):
            return Shares()
        devices = {use.device.index: use.device for use in self.plan.devices}
        return Shares(
            {index: device.budget_bytes - self._asleep_bytes(index) for index, device in devices.items()},
            {spec.id: self._bytes_on(spec, devices) for spec in config.models.values()},
            frozenset(placed.id for placed in self.plan.models if placed.swap_by is not None),
        )

    def residency(self, config: Config, holdings: Holdings | None = None) -> Residency:
        """Return who takes turns, and on how much memory. Models that are not in it stay loaded.

        One that holds more than is planned, by `holdings`, counts with that.
        """
        shares = self.shares(config)
        taken = shares.needs if holdings is None else {name: holdings.most(name) for name in shares.needs}
        budgets = dict(shares.budgets)
        rooms: dict[str, Room] = {}
        for spec in config.models.values():
            placed = self.of(spec.id)
            moves = (placed is not None and placed.swap_by is not None) or spec.unload_after_seconds is not None
            if moves and taken.get(spec.id):
                rooms[spec.id] = Room(taken[spec.id], spec.keep_loaded, spec.unload_after_seconds)
            else:
                for index, size in taken.get(spec.id, {}).items():
                    budgets[index] -= size
        for room in rooms.values():  # where less is free than was planned with, it still has its turn
            for index, size in room.bytes_on.items():
                budgets[index] = max(budgets[index], size)
        return Residency(budgets, rooms)

    def _asleep_bytes(self, index: int | None) -> int:
        """Return what sleepers keep of a GPU while another one is awake."""
        placed = self.plan.models if isinstance(self.plan, Plan) else ()
        sleepers = sum(one.swap_by == "sleep" and index in one.gpus for one in placed)
        return asleep_bytes(sleepers)

    def _bytes_on(self, spec: ModelSpec, devices: Mapping[int | None, Device]) -> dict[int | None, int]:
        placed = self.of(spec.id)
        if placed is None or placed.need is None:
            return {}
        if placed.state != "demo" and self.is_demo(spec):
            need = demo_need(spec, tuple(devices.values()))
            return dict.fromkeys(placed.gpus[:1] or (None,), need.weights_bytes)
        sizes: dict[int | None, int] = dict.fromkeys(placed.gpus or (None,), placed.device_bytes)
        if placed.ram_bytes and placed.swap_by != "sleep":
            sizes[None] = sizes.get(None, 0) + placed.ram_bytes
        return sizes

    def leaves_by_sleep(self, spec: ChatModelSpec) -> tuple[tuple[int, ...], int] | None:
        """Return which GPUs a model leaves when it sleeps, and by how many bytes; None when it is ended instead."""
        placed = self.of(spec.id)
        if placed is None or placed.swap_by != "sleep" or not placed.gpus or self.is_demo(spec):
            return None
        return placed.gpus, placed.device_bytes - ASLEEP_BYTES

    def served(self, spec: ModelSpec, folder: Path, *, is_demo: bool) -> Served:
        """Say what a model is loaded with that is loaded from `folder`."""
        devices = {use.device.index: use.device for use in self.plan.devices} if isinstance(self.plan, Plan) else {}
        planned_bytes = self._bytes_on(spec, devices)
        if is_demo:
            return Served("demo", spec.demo or "", planned_bytes)
        own = folder == self._weights_dir / spec.weights
        return Served("own" if own else "variant", folder.relative_to(self._weights_dir).as_posix(), planned_bytes)

    def chat_spec(self, spec: ChatModelSpec, *, is_demo: bool) -> ChatModelSpec:
        """Fill in what models.yaml leaves to the plan: context, split, and the memory in bytes."""
        return spec.model_copy(update={"engine": spec.engine.model_copy(update=self._chat_values(spec, is_demo))})

    def _chat_values(self, spec: ChatModelSpec, is_demo: bool) -> dict[str, Any]:  # noqa: FBT001
        placed, engine = self.of(spec.id), spec.engine
        values: dict[str, Any] = {}
        if is_demo:
            values = {"context_length": _DEMO_CONTEXT}
            if self._on_gpu:
                # Where no plan could be made, too, demos must leave each other room
                values |= {"kv_cache_gib": _DEMO_KV_GIB, "gpu_memory_utilization": _DEMO_SHARE}
        elif placed is not None and placed.need is not None and placed.variant is not None:
            # On a CPU a folder of one's own is served as ever: by its own configuration
            if self._on_gpu or spec.id not in self._own:
                values = {"context_length": placed.need.context_length, "dtype": placed.variant.dtype}
                if placed.kv_bytes and placed.need.share is None:
                    values["kv_cache_gib"] = placed.kv_bytes / GIB
            if placed.gpus:
                values["tensor_parallel_size"] = placed.need.split
        if placed is not None and placed.utilization is not None:
            values["gpu_memory_utilization"] = placed.utilization
        # null and auto leave it open, like a key that is not there
        said = {key for key in engine.model_fields_set if getattr(engine, key) not in {None, "auto"}}
        return {key: value for key, value in values.items() if key not in said}

    def image_spec(self, spec: ImageModelSpec, *, is_demo: bool) -> ImageModelSpec:
        """Run the planned variant by its own profile."""
        placed = self.of(spec.id)
        variant = None if placed is None else placed.variant
        if is_demo or variant is None or spec.id in self._own:
            return spec
        engine = spec.engine
        if variant.offload is not None and engine.offload is None:
            engine = engine.model_copy(update={"offload": variant.offload})
        if variant.dtype != "auto" and engine.dtype is None:
            engine = engine.model_copy(update={"dtype": variant.dtype})
        return spec.model_copy(update={"profile": variant.profile or spec.profile, "engine": engine})

    @contextlib.contextmanager
    def on_its_gpus(self, spec: ModelSpec) -> Iterator[None]:
        """Have processes that start meanwhile see the model's GPUs only. One model at a time."""
        placed = self.of(spec.id)
        if placed is None or not placed.gpus:
            yield
            return
        ours = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, placed.gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        with with_variables(ours):
            yield

    def taken(self, spec: ModelSpec, *, is_demo: bool) -> dict[int, int] | None:
        """Return what is taken on a model's devices (blocks for 50 ms); None where that is not to be kept."""
        placed = self.of(spec.id)
        if is_demo or self._data_dir is None or spec.id in self._own or placed is None or placed.variant is None:
            return None
        return _taken(placed)

    def keep(self, spec: ModelSpec, before: dict[int, int] | None) -> None:
        """Keep what a model took that was loaded since `before`, while nothing else took or freed memory. Blocks."""
        placed = self.of(spec.id)
        if before is None or self._data_dir is None or placed is None or not (placed.variant and placed.need):
            return
        took = max(used - before.get(place, 0) for place, used in _taken(placed).items()) - placed.kv_bytes
        device = self._names[placed.gpus[0]] if placed.gpus else "RAM"
        # Read again: an earlier model has been measured since
        known = Footprints.read(self._data_dir)
        known.with_(placed.variant, placed.need.split, device, took).write(self._data_dir)


def hardware_for(*, on_cpu: bool, ram_gib: float | None) -> Hardware:
    """Return this machine as it is used: the CPU build has no GPUs. `ram_gib` is all that models may take of RAM."""
    hardware = with_ram(read_hardware(), ram_gib)
    return replace(hardware, gpus=()) if on_cpu else hardware


def _taken(placed: Placed) -> dict[int, int]:
    """Bytes taken on each GPU of a model, or in RAM by our children."""
    if placed.gpus:
        return {gpu.index: gpu.total_bytes - gpu.free_bytes for gpu in read_hardware().gpus if gpu.index in placed.gpus}
    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += child.memory_full_info().uss
    return {-1: total}
