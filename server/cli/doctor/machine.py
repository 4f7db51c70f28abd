"""`hearth doctor` on the machine: GPUs, driver and CUDA, memory against the plan, disks, the port, the clock."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from engine.placement.report import gib, use_line
from engine.placement.types import Refusal
from server.cli.doctor.findings import Case, Finding, ok, problem, skipped, warning
from server.terminal import HEARTH, size_text

# CUDA 13 dropped what is older than Turing; before that Volta was the oldest that vLLM is built for.
_OLDEST_SINCE_CUDA_13 = (7, 5)
_OLDEST = (7, 0)
_LITTLE_DISK = 0.05
_NO_DISK_BYTES = 256 * 2**20
_OTHERS_BYTES = 2**30


def gpu(case: Case) -> Iterator[Finding]:
    """GPUs, and whether the installed build goes with them."""
    hardware = case.hardware
    if not hardware.gpus and case.on_cpu_build:
        features = f" ({', '.join(hardware.cpu_features)})" if hardware.cpu_features else ""
        yield ok(f"{hardware.problem or 'no NVIDIA GPU'}: models run on {hardware.cpu_cores} CPU cores{features}")
    elif not hardware.gpus:
        yield problem(
            f"no GPU ({hardware.problem}), but vLLM's build for CUDA is installed",
            "repair the driver until `nvidia-smi` shows the GPU (a container has to be started with GPUs), or serve on "
            "the CPU: ./scripts/setup --cpu",
        )
    elif case.on_cpu_build:
        names = ", ".join(one.name for one in hardware.gpus)
        unused = f"vLLM's build for CPUs is installed, so nothing runs on the GPUs there are: {names}"
        yield problem(unused, "./scripts/setup --cuda")
    else:
        yield from _each_gpu(case)


def _each_gpu(case: Case) -> Iterator[Finding]:
    oldest = _OLDEST_SINCE_CUDA_13 if case.cuda.torch is not None and case.cuda.torch[0] >= 13 else _OLDEST
    for one in case.hardware.gpus:
        if one.compute_capability and one.compute_capability < oldest:
            yield problem(
                f"GPU {one.index}, {one.name}, has compute capability {_dotted(one.compute_capability)}; this build "
                f"needs {_dotted(oldest)}",
                "hide it with CUDA_VISIBLE_DEVICES, or serve on the CPU: ./scripts/setup --cpu",
            )
            continue
        capability = f", compute capability {_dotted(one.compute_capability)}" if one.compute_capability else ""
        yield ok(f"GPU {one.index}, {one.name}, {gib(one.total_bytes)}{capability}, {_driver(case)}")
        if one.foreign_bytes >= _OTHERS_BYTES:
            holders = [f"{holder.name} (process {holder.pid})" for holder in one.holders if not holder.ours]
            yield warning(
                f"{gib(one.foreign_bytes)} of GPU {one.index} are taken by others: "
                f"{', '.join(holders) or 'nobody says who'}",
                "end them if they are not needed: what they hold is not planned with",
            )


def cuda(case: Case) -> Iterator[Finding]:
    """Whether the driver is new enough for torch. Nothing where the CPU serves."""
    if not case.hardware.gpus or case.on_cpu_build:
        return
    build, driver = case.cuda.torch, case.cuda.driver
    if build is None:
        yield problem("torch is installed without CUDA", "./scripts/setup --cuda")
    elif driver is None:
        yield warning(f"torch is built for CUDA {_dotted(build)}; the {_driver(case)} does not say")
    elif driver[0] < build[0]:  # within one major version newer libraries run on older drivers
        yield problem(
            f"torch is built for CUDA {_dotted(build)}, the driver ends at CUDA {_dotted(driver)}",
            f"install a driver for CUDA {build[0]} or newer (`nvidia-smi` shows which CUDA it is for)",
        )
    else:
        yield ok(f"torch is built for CUDA {_dotted(build)}, {_driver(case)}")


def memory(case: Case) -> Iterator[Finding]:
    """What the models need against what there is."""
    found, hardware = case.plan, case.hardware
    if found is None:
        yield skipped("what models take is not planned, since models.yaml cannot be read")
    elif isinstance(found, Refusal):
        yield problem(found.message, found.change)
    else:
        turns = [one.id for one in found.models if one.state == "swapped"]
        share = f"; {', '.join(turns)} take turns" if turns else ""
        yield ok(f"the plan fits{share}. {'; '.join(use_line(use) for use in found.devices)}")
    given = case.settings.ram_gib
    if given is not None and given * 2**30 > hardware.ram_bytes:
        yield problem(
            f"HEARTH_RAM_GIB={given:g} is more than this machine's {gib(hardware.ram_bytes)}",
            f"HEARTH_RAM_GIB={int(hardware.ram_bytes * 0.9 / 2**30) or 1}, or leave it out",
        )


def disk_usage(folder: Path) -> tuple[int, int, int]:
    """Return total, used and free bytes of the disk that a folder is on, or will be on."""
    return shutil.disk_usage(next((one for one in (folder, *folder.absolute().parents) if one.is_dir()), "/"))


def disk(case: Case) -> Iterator[Finding]:
    """What is left where data and weights are."""
    for name, folder in (("data", case.settings.data_dir), ("weights", case.settings.weights_dir)):
        total, _, free = disk_usage(folder)
        message = f"{size_text(free)} of {size_text(total)} are free for {name} ({folder})"
        if free < _NO_DISK_BYTES:
            yield problem(message, "make room: without it neither keys nor usage can be written")
        elif free < _LITTLE_DISK * total:
            yield warning(message, f"make room: {HEARTH} weights list, HEARTH_IMAGE_FOLDER_GIB")
        else:
            yield ok(message)


def port(case: Case) -> Iterator[Finding]:
    """Whether the server listens, or can."""
    if case.running is not None and case.running.base_url is not None:
        yield ok(f"the server (process {case.running.pid}) listens at {case.running.base_url}")
        return
    host, number = case.settings.host, case.settings.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            yield problem(
                f"{host} port {number} cannot be listened on: {error.strerror}",
                f"stop what listens there (`ss -ltnp sport = :{number}` shows it), or take another port with "
                "HEARTH_PORT",
            )
        else:
            yield ok(f"nobody listens on {host} port {number}, where the server will")


def clock(case: Case) -> Iterator[Finding]:
    """Compare it with the date of our own files, which cannot be in the future."""
    shown = datetime.fromtimestamp(case.now, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    installed = Path(__file__).stat().st_mtime
    if case.now < installed - 86400:
        day = datetime.fromtimestamp(installed, UTC).date().isoformat()
        yield problem(
            f"it is {shown}, before Hearth was installed ({day}); keys, limits, links and certificates go by it",
            "set the clock: timedatectl set-ntp true",
        )
    else:
        yield ok(f"it is {shown}; later than the installation. No other clock was asked")


def _driver(case: Case) -> str:
    made_for = case.cuda.driver
    return f"driver {case.hardware.driver}" + (f" for CUDA {_dotted(made_for)}" if made_for else "")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
