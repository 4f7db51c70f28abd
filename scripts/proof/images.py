"""Measures images on this machine: one by one and joined, at 512 and 1024, with peaks of memory.

Needs no vLLM and no server: torch, diffusers, transformers, accelerate, pydantic, msgspec and PyYAML, and no download:

    python3 scripts/proof/images.py --profiles sdxl --out proof
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from proof.report import Proof, Skipped  # noqa: E402  # both folders come first

GIB = 1 << 30
SIZES = (512, 1024)
JOINED = (1, 2, 4)
# What is written to the disk.
_DISK_GIB = {"sdxl": 7, "flux2-klein-4b": 16, "z-image-turbo": 21, "qwen-image-2512": 56}
_LIMIT_SECONDS = 1200.0


class _Recorder:
    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}

    def event(self, job: int, payload: Any) -> None:
        if hasattr(payload, "data"):
            self.files[job] = payload.data

    def done(self, job: int) -> None: ...

    def poll(self) -> None: ...

    def failed(self, job: int, error: Exception) -> None:  # noqa: ARG002  # one failure ends the step
        raise error


async def prove_images(proof: Proof, profiles: Sequence[str], *, small: bool) -> None:
    """Make, load and measure a pipeline that was never trained for each profile, and remove it."""
    for profile in profiles:
        with tempfile.TemporaryDirectory(prefix="hearth-proof-") as place:
            folder, services = Path(place) / profile, list[Any]()
            made = partial(asyncio.to_thread, write_random, profile, folder, small=small)
            if not await proof.try_step(f"{profile}: random weights", made, _LIMIT_SECONDS):
                continue
            load = partial(asyncio.to_thread, _load, folder, profile, services, small=small)
            if not await proof.try_step(f"{profile}: load", load, _LIMIT_SECONDS):
                continue
            service, recorder = services.pop()
            for size in SIZES:
                for count in JOINED:
                    job = partial(asyncio.to_thread, _measure, service, recorder, size, count)
                    await proof.try_step(f"{profile}: {count} x {size} at once", job, _LIMIT_SECONDS)
            del service, recorder
            await asyncio.to_thread(_free)


def write_random(profile: str, folder: Path, *, small: bool) -> dict[str, Any]:
    """Write a pipeline that was never trained; return its size. Raises `Skipped` where the disk has no room."""
    free = shutil.disk_usage(folder.parent).free
    if not small and free < _DISK_GIB[profile] * GIB:
        needed = f"{_DISK_GIB[profile]} GiB are needed in {folder.parent}"
        raise Skipped(f"{needed}, and {free / GIB:.0f} are free: set TMPDIR")
    # In a process of its own: what it leaves on the GPU would be counted to what is loaded.
    command = [sys.executable, str(ROOT / "scripts/proof/random_images.py"), profile, str(folder)]
    subprocess.run([*command, *(["--small"] if small else [])], check=True)
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"gib": round(written / GIB, 2)}


def _load(folder: Path, profile: str, services: list[Any], *, small: bool) -> dict[str, Any]:
    import msgspec
    import torch

    from engine.backends.diffusers.service import open_service
    from engine.config.models import profile_named

    joined = dict.fromkeys(("256x256", "512x512", "1024x1024"), max(JOINED))
    changes: dict[str, Any] = {"max_batch": joined}
    if small:
        changes["steps"] = {"standard": 2, "hd": 2}
        changes["render_size"] = {"256x256": 128, "512x512": 128, "1024x1024": 256}
    settings = profile_named(profile, changes).model_dump_json(by_alias=True)
    recorder = _Recorder()
    options: Any = msgspec.Raw(msgspec.msgpack.encode((str(folder), settings, False)))
    services.append((open_service(options, recorder, lambda _phase, _done: None), recorder))
    return {"gpu_gib": round(torch.cuda.memory_allocated() / GIB, 2)} if torch.cuda.is_available() else {}


def _measure(service: Any, recorder: _Recorder, size: int, count: int) -> dict[str, Any]:
    import msgspec
    import torch

    from engine.types import ImageJob

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    recorder.files.clear()
    begun = time.monotonic()
    for number in range(count):
        job = ImageJob(f"a red square, {number}", size, "standard", number)
        service.submit(number, msgspec.Raw(msgspec.msgpack.encode(job)))
    while service.busy:
        service.step()
    seconds = time.monotonic() - begun
    if len(recorder.files) != count:
        raise RuntimeError(f"{len(recorder.files)} of {count} images came")
    found: dict[str, Any] = {"seconds_per_image": round(seconds / count, 2)}
    if on_gpu:
        found["peak_gpu_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    return found


def _free() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(arguments: list[str]) -> int:
    """Return the exit code: 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="scripts/proof/images.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("proof-images"), help="folder of the report")
    parser.add_argument("--profiles", default=",".join(_DISK_GIB), help="of models.yaml, separated by commas")
    parser.add_argument("--small", action="store_true", help="few narrow layers; on a CPU always")
    given = parser.parse_args(arguments)
    profiles = given.profiles.split(",")
    if unknown := set(profiles) - _DISK_GIB.keys():
        parser.error(f"there is no profile {min(unknown)}, only {', '.join(_DISK_GIB)}")
    import torch

    on_gpu = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if on_gpu else "A CPU"
    began = datetime.now(UTC).isoformat(timespec="seconds")
    proof = Proof(machine, f"for CUDA {torch.version.cuda}", began, not on_gpu, given.out, "random")
    asyncio.run(prove_images(proof, profiles, small=given.small or not on_gpu))
    print(f"The report: {given.out / 'proof.md'}", file=sys.stderr)
    return 1 if proof.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
