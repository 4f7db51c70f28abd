"""`hearth doctor` on the machine: GPUs, driver and CUDA, memory against the plan, disks, the port, the clock."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from engine.placement_refusal import gib
from engine.placement_report import use_line
from engine.placement_types import Refusal
from server.cli.doctor.findings import Finding
from server.terminal import HEARTH, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.hardware import Cuda, Gpu
    from server.cli.doctor.findings import Case

_NVIDIA = "0x10de"  # its number among makers of PCI devices
# CUDA 13 dropped what is older than Turing; before that Volta was the oldest that vLLM is built for.
_OLDEST_SINCE_CUDA_13 = (7, 5)
_OLDEST = (7, 0)
_LITTLE_RAM = 0.05
_LITTLE_DISK = 0.05
_NO_DISK_BYTES = 256 * 2**20
_OTHERS_BYTES = 2**30
_TIME_ERROR = 5  # of adjtimex(2): nobody keeps the clock


def machine(case: Case) -> Iterator[Finding]:
    """Look at all of it."""
    yield from gpus(case)
    yield from memory(case)
    yield from disks(case)
    yield port(case)
    yield clock(time.time(), keeper=_clock_is_kept())


def gpus(case: Case) -> Iterator[Finding]:
    """GPUs, the driver, and whether the installed build goes with them."""
    hardware, cuda = case.hardware, case.cuda
    if not hardware.gpus:
        yield _no_gpu(case, has_card=_has_nvidia_card())
        return
    driver = f"driver {hardware.driver}" + (f" for CUDA {_dotted(cuda.driver)}" if cuda.driver else "")
    if case.on_cpu_build:
        names = ", ".join(gpu.name for gpu in hardware.gpus)
        unused = f"vLLM's build for CPUs is installed, so nothing runs on the GPUs there are: {names}"
        yield Finding("gpu", "problem", unused, "./scripts/setup --cuda")
        return
    old = [gpu for gpu in hardware.gpus if gpu.compute_capability and gpu.compute_capability < _oldest(cuda)]
    for gpu in old:
        yield Finding(
            "gpu",
            "problem",
            f"GPU {gpu.index}, {gpu.name}, has compute capability {_dotted(gpu.compute_capability)}; this build needs "
            f"{_dotted(_oldest(cuda))}",
            "hide it with CUDA_VISIBLE_DEVICES, or serve on the CPU: ./scripts/setup --cpu",
        )
    for gpu in (gpu for gpu in hardware.gpus if gpu not in old):
        capability = f", compute capability {_dotted(gpu.compute_capability)}" if gpu.compute_capability else ""
        yield Finding("gpu", "ok", f"GPU {gpu.index}, {gpu.name}, {gib(gpu.total_bytes)}{capability}, {driver}")
        yield from _others(gpu)
    yield _cuda(cuda, driver)


def _no_gpu(case: Case, *, has_card: bool) -> Finding:
    why = case.hardware.problem
    if has_card:
        return Finding(
            "gpu",
            "problem",
            f"there is an NVIDIA GPU, but it cannot be used: {why or 'CUDA_VISIBLE_DEVICES hides it'}",
            "install or repair NVIDIA's driver until `nvidia-smi` shows the GPU; in a container, start it with GPUs",
        )
    if not case.on_cpu_build:
        return Finding(
            "gpu",
            "problem",
            f"no GPU ({why}), but vLLM's build for CUDA is installed",
            "bring the GPU back, or serve on the CPU: ./scripts/setup --cpu",
        )
    features = f" ({', '.join(case.hardware.cpu_features)})" if case.hardware.cpu_features else ""
    return Finding("gpu", "ok", f"no NVIDIA GPU: models run on {case.hardware.cpu_cores} CPU cores{features}")


def _others(gpu: Gpu) -> Iterator[Finding]:
    if gpu.foreign_bytes < _OTHERS_BYTES:
        return
    holders = [f"{one.name} (process {one.pid})" for one in gpu.holders if not one.ours]
    yield Finding(
        "gpu",
        "warning",
        f"{gib(gpu.foreign_bytes)} of GPU {gpu.index} are taken by others: {', '.join(holders) or 'nobody says who'}",
        "end them if they are not needed: what they hold is not planned with",
    )


def _cuda(cuda: Cuda, driver: str) -> Finding:
    if cuda.torch is None:
        return Finding("cuda", "problem", "torch is installed without CUDA", "./scripts/setup --cuda")
    if cuda.driver is None:
        return Finding("cuda", "warning", f"torch is built for CUDA {_dotted(cuda.torch)}; the {driver} does not say")
    if cuda.driver[0] < cuda.torch[0]:  # within one major version newer libraries run on older drivers
        return Finding(
            "cuda",
            "problem",
            f"torch is built for CUDA {_dotted(cuda.torch)}, the driver ends at CUDA {_dotted(cuda.driver)}",
            f"install a driver for CUDA {cuda.torch[0]} or newer (`nvidia-smi` shows which CUDA it is for)",
        )
    return Finding("cuda", "ok", f"torch is built for CUDA {_dotted(cuda.torch)}, {driver}")


def memory(case: Case) -> Iterator[Finding]:
    """What the models need against what there is."""
    found = case.plan
    if found is None:
        yield Finding("memory", "skipped", "what models take is not planned, since models.yaml cannot be read")
    elif isinstance(found, Refusal):
        yield Finding("memory", "problem", found.message, found.change)
    else:
        turns = [one.id for one in found.models if one.state == "swapped"]
        share = f"; {', '.join(turns)} take turns" if turns else ""
        lines = [use_line(use) for use in found.devices]
        yield Finding("memory", "ok", f"the plan fits{share}. {'; '.join(lines)}")
    hardware = case.hardware
    if hardware.ram_available_bytes < _LITTLE_RAM * hardware.ram_bytes and case.running is None:
        yield Finding(
            "memory",
            "warning",
            f"only {gib(hardware.ram_available_bytes)} of {gib(hardware.ram_bytes)} RAM are free",
            "end what takes it, before the kernel ends something",
        )
    asked = case.settings.ram_gib
    if asked is not None and asked * 2**30 > hardware.ram_bytes:
        yield Finding(
            "memory",
            "problem",
            f"HEARTH_RAM_GIB={asked:g} is more than this machine's {gib(hardware.ram_bytes)}",
            f"HEARTH_RAM_GIB={int(hardware.ram_bytes * 0.9 / 2**30) or 1}, or leave it out",
        )


def disks(case: Case) -> Iterator[Finding]:
    """What is left where data and weights are."""
    for name, folder in (("data", case.settings.data_dir), ("weights", case.settings.weights_dir)):
        place = next((one for one in (folder, *folder.absolute().parents) if one.is_dir()), Path("/"))
        disk = shutil.disk_usage(place)
        message = f"{size_text(disk.free)} of {size_text(disk.total)} are free for {name} ({folder})"
        if disk.free < _NO_DISK_BYTES:
            yield Finding("disk", "problem", message, "make room: without it neither keys nor usage can be written")
        elif disk.free < _LITTLE_DISK * disk.total:
            yield Finding("disk", "warning", message, f"make room: {HEARTH} weights list, HEARTH_IMAGE_FOLDER_GIB")
        else:
            yield Finding("disk", "ok", message)


def port(case: Case) -> Finding:
    """Who listens where the server listens, or will."""
    if case.running is not None and case.running.base_url is not None:
        return Finding("port", "ok", f"the server (process {case.running.pid}) listens at {case.running.base_url}")
    host, number = case.settings.host, case.settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            who = _listener(number)
            return Finding(
                "port",
                "problem",
                f"{host} port {number} cannot be listened on: {error.strerror}{f' by {who}' if who else ''}",
                "stop what listens there, or take another port with HEARTH_PORT",
            )
    return Finding("port", "ok", f"nobody listens on {host} port {number}, where the server will")


def _listener(number: int) -> str | None:
    """Name the process that listens, as far as the kernel tells us."""
    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections(kind="tcp"):
            at = one.laddr.port if one.laddr else None
            if one.status == psutil.CONN_LISTEN and at == number and one.pid is not None:
                return f"{psutil.Process(one.pid).name()} (process {one.pid})"
    return None


def clock(now: float, *, keeper: bool | None) -> Finding:
    """Compare it with the date of our own files, which cannot be in the future, and ask the kernel who keeps it."""
    said = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    installed = Path(__file__).stat().st_mtime
    why = "keys, limits, links and certificates go by it"
    if now < installed - 86400:
        there = datetime.fromtimestamp(installed, UTC).date().isoformat()
        return Finding(
            "clock", "problem", f"it is {said}, before Hearth was installed ({there}); {why}", "set the clock"
        )
    if keeper is False:
        return Finding(
            "clock",
            "warning",
            f"it is {said}, and no time service keeps it right, the kernel says; {why}",
            "timedatectl set-ntp true",
        )
    kept = ", kept by a time service" if keeper else ""
    return Finding("clock", "ok", f"it is {said}{kept}; later than the installation. No other clock was asked")


def _clock_is_kept() -> bool | None:
    """Ask the kernel (adjtimex(2), which only reads here); None where it does not say."""
    with contextlib.suppress(OSError, AttributeError):
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
        return None if state < 0 else bool(state != _TIME_ERROR)
    return None


def _has_nvidia_card() -> bool:
    """Whether one is plugged in, whatever the driver says."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            kind = (device / "class").read_text(encoding="ascii")
            if (device / "vendor").read_text(encoding="ascii").strip() == _NVIDIA and kind.startswith("0x03"):
                return True
    return False


def _oldest(cuda: Cuda) -> tuple[int, int]:
    return _OLDEST_SINCE_CUDA_13 if cuda.torch is not None and cuda.torch[0] >= 13 else _OLDEST


def _dotted(version: tuple[int, int] | None) -> str:
    return "?" if version is None else f"{version[0]}.{version[1]}"
