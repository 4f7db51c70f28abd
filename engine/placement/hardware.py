"""What this machine has, as frozen plain data: GPUs (NVML), memory and CPU; and the limits of its control groups.

Reading it never raises: a machine without an NVIDIA driver has no GPUs, and `problem` says why. The kernel limits the
memory of control groups, like those of containers and systemd units (`MemoryMax=`), and kills processes in one that
runs out. Version 2 is read, and version 1 of older systems.
"""

import contextlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import psutil

from engine.errors import EngineError

_log = logging.getLogger("hearth.engine")
GIB = 1 << 30
T = TypeVar("T")
# What a plan prefers if not all models fit: models that stay loaded, or better variants that take turns.
Prefer: TypeAlias = Literal["resident", "quality"]

_SHAPE = re.compile(r"(?:(\d{1,2})\s*x\s*)?(\d{1,4}(?:\.\d{1,3})?)\s*(?:gib|gb|g)?\Z", re.IGNORECASE)
_TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.(\d+)", re.MULTILINE)
_OWN_KIB = re.compile(r"^Pss_(?:Anon|Shmem): *(\d+)", re.MULTILINE)
_CPU_FLAGS = re.compile(r"^(?:flags|Features)\s*:(.*)", re.MULTILINE)
_MOST_GPUS = 64
# Read at the start: during a load the variable names that model's GPUs (engine/pool/loader.py).
_ALLOWED_GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
# What decides how fast, or whether, a model runs on a CPU.
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
_NO_NVIDIA = "this machine has no NVIDIA GPU"
_NVIDIA, _AMD = "0x10de", "0x1002"  # on the PCI bus
# Of control groups.
_ROOTS = {"0": Path("/sys/fs/cgroup"), "memory": Path("/sys/fs/cgroup/memory")}
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")  # beyond `high` processes are slowed to a halt
_USED = ("memory.current", "memory.usage_in_bytes")
_KILLS = ("memory.events", "memory.oom_control")
_KILL_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
# Cached files, which the kernel drops when memory is short. Version 1 has other names for sums with a group's children.
_CACHED = tuple(re.compile(rf"^{name}(?:in)?active_file (\d+)$", re.MULTILINE) for name in ("total_", ""))
# Scores for the processes of models: killing one costs one model, killing the server costs all.
MODEL_VICTIM, FIRST_VICTIM = 500, 1000


class HardwareError(EngineError):
    """A machine was described in a way that cannot be read."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that uses memory of a GPU. `used_bytes` is None where the driver does not say (containers)."""

    pid: int
    name: str
    used_bytes: int | None
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `index` counts as `CUDA_DEVICE_ORDER=PCI_BUS_ID` does; `compute_capability` is like (8, 9)."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None = None
    holders: tuple[Holder, ...] = ()

    @property
    def foreign_bytes(self) -> int:
        """Bytes that are in use, but not by Hearth."""
        used = self.total_bytes - self.free_bytes
        ours = [holder for holder in self.holders if holder.ours]
        if any(holder.used_bytes is None for holder in ours):
            return min(used, sum(holder.used_bytes or 0 for holder in self.holders if not holder.ours))
        return max(0, used - sum(holder.used_bytes or 0 for holder in ours))

    @property
    def ours_bytes(self) -> int:
        return self.total_bytes - self.free_bytes - self.foreign_bytes


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine as it was at one moment, or an imagined one."""

    gpus: tuple[Gpu, ...]
    ram_bytes: int
    ram_available_bytes: int
    cpu_cores: int
    cpu_features: tuple[str, ...] = ()
    driver: str | None = None
    problem: str | None = None
    """Why GPUs could not be read."""
    imagined: bool = False
    ram_for_models_bytes: int | None = None
    """What models may take of RAM. None: what is available, less a margin."""
    ram_ours_bytes: int = 0
    """RAM that Hearth uses, and that would be available without it."""
    shared_memory: bool = False
    """Whether the GPU has no memory of its own and uses the RAM."""
    prefer: Prefer = "resident"
    """What the plan prefers if not all models fit."""


@dataclass(frozen=True, slots=True)
class Cuda:
    """The newest CUDA that the driver supports, and the one that torch is built for; None: none, or not known."""

    driver: tuple[int, int] | None = None
    torch: tuple[int, int] | None = None


def read_cuda() -> Cuda:
    """Read both; torch's from its version.py, since an import would take seconds."""
    version, _ = _ask_nvml(lambda nvml: int(nvml.nvmlSystemGetCudaDriverVersion_v2()))  # 13020 is 13.2
    driver = None if version is None else (version // 1000, version % 1000 // 10)
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return Cuda(driver)
    match = _TORCH_CUDA.search(_text_of(Path(torch.origin).with_name("version.py")))
    return Cuda(driver, (int(match[1]), int(match[2])) if match else None)


def read_hardware(server_pid: int | None = None, *, ram_ours: bool = True) -> Hardware:
    """Read this machine within the limits of control groups (containers, services). Blocks, some 50 ms.

    With `server_pid` the limits are those of that process, and what it and its children use counts as ours; without
    `ram_ours` on GPUs only, since reading the RAM of a process takes 5 to 30 ms of a core.
    """
    family = _family(server_pid)
    found, problem = _ask_nvml(lambda nvml: _read_gpus(nvml, family))
    gpus, driver, divided = found or ((), None, 0)
    if divided:
        problem = f"MIG divides {divided} of its GPUs, and Hearth plans with whole ones (nvidia-smi -mig 0 ends that)"
    total, available = _read_memory(server_pid)
    return Hardware(
        gpus=tuple(gpu if gpu.total_bytes else replace(gpu, total_bytes=total, free_bytes=available) for gpu in gpus),
        shared_memory=any(not gpu.total_bytes for gpu in gpus),
        ram_bytes=total,
        ram_available_bytes=available,
        ram_ours_bytes=min(sum(map(_ram_of, family if ram_ours else ())), total - available),
        cpu_cores=len(os.sched_getaffinity(0)),
        cpu_features=_cpu_features(),
        driver=driver,
        problem=problem,
    )


def imagined(shape: str, *, ram_gib: float = 64) -> Hardware:
    """Return an imagined machine, like `2x24GiB`, `1x24GiB+1x48GiB` or `cpu`, all free. Raises `HardwareError`."""
    sizes: list[float] = []
    for part in shape.split("+") if shape.strip().lower() not in {"cpu", "none", "0"} else ():
        match = _SHAPE.match(part.strip())
        if match is None or float(match[2]) <= 0 or int(match[1] or 1) < 1:
            raise HardwareError(f"{shape!r} is not a machine. Write it like 2x24GiB, 1x24GiB+1x48GiB, or cpu.")
        sizes += [float(match[2])] * int(match[1] or 1)
    if len(sizes) > _MOST_GPUS:
        raise HardwareError(f"{shape!r} has {len(sizes)} GPUs; at most {_MOST_GPUS} can be planned for.")
    gpus = tuple(Gpu(index, "GPU", int(size * GIB), int(size * GIB)) for index, size in enumerate(sizes))
    ram = int(ram_gib * GIB)
    return Hardware(gpus, ram_bytes=ram, ram_available_bytes=ram, cpu_cores=16, imagined=True)


def meant_for(hardware: Hardware, ram_gib: float | None, prefer: Prefer) -> Hardware:
    """Return the machine with the operator's wishes: RAM for models (None: what is available) and `prefer`."""
    ram = hardware.ram_for_models_bytes if ram_gib is None else int(ram_gib * GIB)
    return replace(hardware, ram_for_models_bytes=ram, prefer=prefer)


def count_oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory in this process's group, else on the machine."""
    for place in [group / name for group in _groups(None) for name in _KILLS] + [Path("/proc/vmstat")]:
        if found := _KILL_COUNT.search(_text_of(place)):
            return int(found[1])
    return 0


def offer_to_oom_killer(score: int) -> None:
    """Have the kernel kill this process, and those that it starts, before others when memory runs out."""
    with contextlib.suppress(OSError):  # not allowed everywhere
        Path("/proc/self/oom_score_adj").write_text(str(score), encoding="ascii")


def _ask_nvml(question: Callable[[Any], T]) -> tuple[T | None, str | None]:
    """Return the answer of NVIDIA's library, or why there is none."""
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed" if _has_nvidia() else _no_nvidia()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"the NVIDIA driver does not answer: {error}" if _has_nvidia() else _no_nvidia()
    try:
        return question(pynvml), None
    except pynvml.NVMLError as error:
        return None, f"the NVIDIA driver did not say what GPUs there are: {error}"
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _no_nvidia() -> str:
    return f"{_NO_NVIDIA}, and there is no build for AMD's" if _AMD in _graphics_vendors() else _NO_NVIDIA


def _has_nvidia() -> bool:
    """Whether there is a card, or a driver that may have one (a container cannot read the bus)."""
    has_driver = any(Path("/dev").glob("nvidia*")) or Path("/proc/driver/nvidia").exists()
    return has_driver or _NVIDIA in _graphics_vendors()


def _graphics_vendors() -> set[str]:
    found = set()
    for device in Path("/sys/bus/pci/devices").glob("*"):
        if _text_of(device / "class").startswith("0x03"):
            found.add(_text_of(device / "vendor").strip())
    return found


def _read_gpus(nvml: Any, ours: frozenset[int]) -> tuple[tuple[Gpu, ...], str, int]:
    """Return the GPUs that may be used, the driver's version, and how many more are divided by MIG."""
    devices: dict[int, Any] = {}
    uuids = []
    for index in range(nvml.nvmlDeviceGetCount()):
        uuids.append("")
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            uuids[index], devices[index] = str(nvml.nvmlDeviceGetUUID(device)), device
        except nvml.NVMLError as error:  # a GPU that has fallen off the bus must not hide the others
            _leave_out(index, str(error))
    visible = _visible(uuids)
    divided = [index for index, device in devices.items() if _is_divided(nvml, device)]
    whole = devices.keys() - set(divided)
    gpus = tuple(_read_gpu(nvml, index, devices[index], ours) for index in visible if index in whole)
    return gpus, str(nvml.nvmlSystemGetDriverVersion()), len(divided)


@cache
def _leave_out(index: int, why: str) -> None:
    """Log a GPU that is left out, once."""
    _log.warning("GPU %d does not answer (%s), and is left out.", index, why)


def _read_gpu(nvml: Any, index: int, device: Any, ours: frozenset[int]) -> Gpu:
    total = free = 0
    with contextlib.suppress(nvml.NVMLError):  # GB10 and Jetson have no memory of their own, and report none
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        total, free = int(memory.total), int(memory.free)
    capability: tuple[int, int] | None = None
    processes: list[Any] = []
    with contextlib.suppress(nvml.NVMLError):
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
        capability = (int(major), int(minor))
    with contextlib.suppress(nvml.NVMLError):  # some virtual GPUs do not say
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
    holders = tuple(
        Holder(process.pid, _name(process.pid), process.usedGpuMemory, process.pid in ours) for process in processes
    )
    name = str(nvml.nvmlDeviceGetName(device))
    return Gpu(index, name, total, free, capability, holders)


def _is_divided(nvml: Any, device: Any) -> bool:
    """Whether MIG divides the GPU: its instances have no index that a model could be given."""
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        return bool(nvml.nvmlDeviceGetMigMode(device)[0])
    return False


def _visible(uuids: Sequence[str]) -> list[int]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES; like CUDA, stop at the first entry that is unknown or repeated."""
    if _ALLOWED_GPUS is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in (part.strip() for part in _ALLOWED_GPUS.split(",")):
        named = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if entry.isdecimal() and int(entry) < len(uuids):
            named = [int(entry)]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return found


def _family(pid: int | None) -> frozenset[int]:
    with contextlib.suppress(psutil.Error):
        if pid is not None:
            return frozenset({pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))})
    return frozenset()


def _ram_of(pid: int) -> int:
    """Return the RAM of a process, with its part of shared memory and without files; 0 where unreadable."""
    return 1024 * sum(map(int, _OWN_KIB.findall(_text_of(Path(f"/proc/{pid}/smaps_rollup")))))


def _name(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return str(psutil.Process(pid).name())
    return "?"  # of another container, or ended by now


def _cpu_features() -> tuple[str, ...]:
    found = _CPU_FLAGS.search(_text_of(Path("/proc/cpuinfo")))
    flags = found[1].split() if found else ()
    return tuple(feature for feature in _CPU_FEATURES if feature in flags)


def _read_memory(pid: int | None) -> tuple[int, int]:
    """Return the memory limit of a process's groups and what is left of it, in bytes. `pid` None: this process."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for group in _groups(pid):
        limit = min((size for name in _LIMITS if (size := _number(group / name)) is not None), default=None)
        used = next((size for name in _USED if (size := _number(group / name)) is not None), None)
        if limit is not None and used is not None and limit < machine.total:
            total = min(total, limit)
            available = min(available, max(0, limit - used + _cached(group)))
    return total, min(total, available)


def _groups(pid: int | None) -> Iterator[Path]:
    """The folders of the groups that a process is in, the innermost first. In a container the roots are its own."""
    for line in _text_of(Path("/proc", "self" if pid is None else str(pid), "cgroup")).splitlines():
        number, kinds, path = line.split(":", 2)
        root = _ROOTS.get("memory" if "memory" in kinds.split(",") else number)
        if root is not None:
            own = Path(f"{root}{path}")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _cached(group: Path) -> int:
    text = _text_of(group / "memory.stat")
    return sum(map(int, next(filter(None, (pattern.findall(text) for pattern in _CACHED)), ())))


def _number(file: Path) -> int | None:
    """Return the number in a file; None: there is no such file, or it has `max`."""
    text = _text_of(file).strip()
    return int(text) if text.isdecimal() else None


def _text_of(file: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""
