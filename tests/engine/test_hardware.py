"""What a machine has: this one, an imagined one, and one whose driver is a fake library."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from memory_group import MemoryGroup, missing_reason

from engine.placement.hardware import GIB, HardwareError, imagined, read_hardware
from engine.placement.needs import devices_of

ROOT = Path(__file__).parents[2]

# Stands in for nvidia-ml-py in a process of its own: two GPUs, one of them held by that process.
FAKE_NVML = """
import os
from types import SimpleNamespace as S
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return "999.1"
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMemoryInfo(index): return S(total=24 << 30, free=(24 - 10 * index) << 30)
def nvmlDeviceGetCudaComputeCapability(index): return (8, 9)
def nvmlDeviceGetComputeRunningProcesses(index):
    if index == 0: raise NVMLError("not told")
    return [S(pid=os.getpid(), usedGpuMemory=8 << 30), S(pid=2**22, usedGpuMemory=2 << 30)]
def nvmlDeviceGetName(index): return "Fake 4090"
def nvmlDeviceGetUUID(index): return f"GPU-{index}abc"
"""
ASK = """
import json, os
from engine.placement.hardware import read_hardware
found = read_hardware(server_pid=os.getpid())
print(json.dumps([[gpu.index, gpu.name, gpu.total_bytes, gpu.foreign_bytes, gpu.compute_capability,
                   [holder.ours for holder in gpu.holders]] for gpu in found.gpus] + [found.driver]))
"""


def test_this_machine_can_be_read_with_a_driver_or_without():
    found = read_hardware()
    assert found.ram_bytes >= found.ram_available_bytes > 0
    assert found.cpu_cores >= 1
    assert found.gpus or found.problem
    assert not found.imagined
    if not any(Path("/dev").glob("nvidia*")) and not Path("/proc/driver/nvidia").exists():
        assert found.problem is not None
        assert found.problem.startswith("this machine has no NVIDIA GPU")


def test_what_a_server_and_its_children_have_in_ram_is_known_and_counts_as_free():
    child = "held = bytearray(b'x') * (64 << 20); print('there', flush=True); input()"
    parent = f"import subprocess, sys; held = bytearray(b'x') * (64 << 20); subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"there\n"
        found = read_hardware(server_pid=server.pid)
        server.kill()
    assert 128 << 20 <= found.ram_ours_bytes < GIB
    assert read_hardware().ram_ours_bytes == 0
    taken = devices_of(replace(found, gpus=(), ram_available_bytes=found.ram_bytes - found.ram_ours_bytes))[-1]
    assert (taken.foreign_bytes, taken.ours_bytes) == (0, found.ram_ours_bytes)


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    if (reason := missing_reason()) is not None:
        pytest.skip(reason)
    with MemoryGroup(GIB) as made:
        yield made


def test_memory_is_what_the_control_groups_leave_for_this_process_and_for_a_server(group: MemoryGroup):
    """As in a container or a service with MemoryMax; of a group within a group the smaller limit counts."""
    ask = """if True:
        import dataclasses, json
        from engine.placement.hardware import read_hardware
        held = bytearray(b"x") * (300 << 20)
        print(json.dumps([getattr(read_hardware(), name) for name in ("ram_bytes", "ram_available_bytes")]), flush=True)
        input()
    """
    with (
        group.inner(2 * GIB) as inner,
        inner.entered(),
        subprocess.Popen([sys.executable, "-c", ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as held,
    ):
        assert held.stdout is not None
        inner.leave()
        total, available = json.loads(held.stdout.readline())
        seen = read_hardware(server_pid=held.pid)
        held.kill()
    assert total == seen.ram_bytes == GIB
    assert GIB // 2 < available < GIB - (300 << 20)
    assert seen.ram_available_bytes < GIB - (300 << 20)
    assert seen.ram_bytes - seen.ram_available_bytes - seen.ram_ours_bytes < 64 << 20, "the rest is the server's"
    assert read_hardware().ram_bytes > GIB


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1]), ("", []), ("1", [1]), ("1,0", [1, 0]), ("GPU-1", [1]), ("0,7,1", [0]), ("1,1,0", [1]), ("-1", [])],
)
def test_gpus_are_read_with_who_holds_them_and_cuda_visible_devices_is_heeded(tmp_path: Path, visible, indices):
    (tmp_path / "pynvml.py").write_text(FAKE_NVML)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"PYTHONPATH": f"{tmp_path}:{ROOT}"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    *gpus, driver = json.loads(done.stdout)
    assert [gpu[0] for gpu in gpus] == indices
    assert driver == "999.1"
    for index, name, total, foreign, capability, ours in gpus:
        assert (name, total, capability) == ("Fake 4090", 24 * GIB, [8, 9])
        assert (foreign, ours) == ((0, []) if index == 0 else (2 * GIB, [True, False]))


def ask_of(tmp_path: Path, nvml: str, ask: str) -> str:
    (tmp_path / "pynvml.py").write_text(nvml)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_gpu_that_shares_the_machines_memory_gets_three_quarters_of_it(tmp_path: Path):
    """As on GB10 and Jetson, whose driver does not say how large it is."""
    nvml = FAKE_NVML + 'def nvmlDeviceGetMemoryInfo(index): raise NVMLError("Not Supported")\n'
    ask = """if True:
        from engine.placement.hardware import read_hardware
        from engine.placement.needs import devices_of
        machine = read_hardware()
        gpu, _, ram = devices_of(machine)
        print(machine.shared_memory, gpu.total_bytes == machine.ram_bytes, (gpu.budget_bytes + gpu.foreign_bytes)
              / machine.ram_bytes, ram.total_bytes / machine.ram_bytes)"""
    assert ask_of(tmp_path, nvml, ask).split() == ["True", "True", "0.75", "0.25"]


def test_a_gpu_that_does_not_answer_takes_no_other_with_it(tmp_path: Path):
    nvml = (
        FAKE_NVML
        + """
def nvmlDeviceGetHandleByIndex(index):
    if index == 0: raise NVMLError("GPU is lost")
    return index
"""
    )
    ask = """if True:
        from engine.placement.hardware import read_hardware
        print([[gpu.index for gpu in read_hardware().gpus] for _ in range(2)])"""
    assert ask_of(tmp_path, nvml, ask) == "[[1], [1]]\n"


def test_what_a_model_takes_is_kept_right_whatever_part_of_its_kv_cache_it_has(tmp_path: Path):
    """After a load that ran out of memory the next one takes less."""
    ask = f"""if True:
        import sys
        from pathlib import Path
        sys.path += ["{ROOT}/tests/engine", "{ROOT}/tests"]
        from plan_parts import config_of, model, variant
        from test_planned import put
        from engine.placement.hardware import read_hardware
        from engine.placement.needs import Footprints
        from engine.pool.loader import Planned
        spec = model("a", variant("chatty", 4, kv_kib_per_token=128, context_length=4096))
        here = Path("{tmp_path}")
        put(here / "chatty")
        planned = Planned(config_of(spec), here, here, read_hardware())
        placed = planned.of("a")
        for part in (0.7, 1.0):
            took = (5 << 30) + int(placed.kv_bytes * part)
            planned.keep(spec, {{placed.gpus[0]: -took}}, of_kv=part)
            print([found.bytes for found in Footprints.read(here).footprints.values()], placed.kv_bytes > 1 << 30)
    """
    assert ask_of(tmp_path, FAKE_NVML, ask) == f"[{5 << 30}] True\n" * 2


def test_what_mig_has_divided_is_left_out_with_a_reason(tmp_path: Path):
    nvml = FAKE_NVML + "def nvmlDeviceGetMigMode(index): return (1 - index, 0)\n"
    ask = """if True:
        from engine.placement.hardware import read_hardware
        machine = read_hardware()
        print([gpu.index for gpu in machine.gpus], machine.problem)"""
    found = ask_of(tmp_path, nvml, ask)
    assert found.startswith("[1] MIG divides 1 of its GPUs")


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [("2x24GiB", [24, 24]), ("1x24GiB+1x48GiB", [24, 48]), ("8x80", [80] * 8), ("16 GB", [16]), ("cpu", [])],
)
def test_machines_can_be_imagined(shape: str, sizes: list[int]):
    found = imagined(shape, ram_gib=32)
    assert [gpu.total_bytes for gpu in found.gpus] == [size * GIB for size in sizes]
    assert found.ram_bytes == 32 * GIB
    assert found.imagined


@pytest.mark.parametrize("shape", ["", "two", "0x24", "2x0", "24x", "2x24GiB+", "99x8", "x24"])
def test_what_is_no_machine_is_said_to_be_none(shape: str):
    with pytest.raises(HardwareError):
        imagined(shape)
