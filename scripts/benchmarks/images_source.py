"""Which image pipeline is measured: a model of models.yaml, its demo, or one with random weights, built on the spot."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.children import tail
from benchmarks.errors import BenchError
from benchmarks.images_worker import WorkerOrder
from engine import demo
from engine.config import ImageModelSpec
from engine.config_profiles import ImageProfile, profile_named

if TYPE_CHECKING:
    from benchmarks.workplace import Workplace

Family = Literal["sdxl", "sd3"]
Shape = Literal["full", "tiny"]

_MODULE = "benchmarks.images_random"
# Random pictures are noise at any size: what is rendered is what is asked for, so that sizes can be compared.
_AS_ASKED = {"render_size": {f"{size}x{size}": size for size in (256, 512, 1024)}}
_FAMILIES: dict[Family, dict[str, Any]] = {
    "sdxl": _AS_ASKED,
    "sd3": {**_AS_ASKED, "steps": {"standard": 28, "hd": 56}, "guidance_scale": 7.0},
}
_TINY = {"steps": {"standard": 4, "hd": 8}, "dtype": "float32"}


def random_profile(family: Family, shape: Shape, batch: int) -> ImageProfile:
    """Return how a random pipeline is run, `batch` images together at every size."""
    together = {"max_batch": {f"{size}x{size}": batch for size in (256, 512, 1024)}}
    return profile_named("sdxl", {**_FAMILIES[family], **together, **(_TINY if shape == "tiny" else {})})


async def build_random(place: Workplace, family: Family, shape: Shape) -> None:
    """Put a random pipeline where the model's weights are looked for. Raises `BenchError`."""
    folder, log = place.weights_dir / place.spec.weights, place.log("random")
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _MODULE, family, shape, str(folder)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=place.environment,
        )
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
    if process.returncode != 0:
        raise BenchError(f"No random pipeline could be built.{tail(log)}")


def order_for(place: Workplace, profile: ImageProfile | None, *, threads: int | None) -> WorkerOrder:
    """Say what is loaded: the folder of the weights or the demo, run as `profile` or as models.yaml says.

    As in the server, the demo has one thread unless told otherwise, and real weights have every core. Raises
    `BenchError`.
    """
    spec = place.spec
    if not isinstance(spec, ImageModelSpec):
        raise BenchError(f"{spec.id} makes no images. Choose a model with `task: image` with --model.")
    folder = place.weights_dir / spec.weights
    is_demo = not folder.is_dir()
    if is_demo:
        try:
            folder = demo.weights_dir(spec.demo or "")
        except ValueError as error:
            raise BenchError(f"There are no weights of {spec.id} to measure. {error}") from error
    return WorkerOrder(
        models=str(place.models),
        model=spec.id,
        folder=str(folder),
        profile=(profile or spec.profile_of(demo=is_demo)).model_dump_json(by_alias=True),
        threads=threads or spec.engine.cpu_threads or (1 if is_demo else os.cpu_count() or 1),
    )
