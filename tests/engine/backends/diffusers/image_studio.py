"""An image service in this process, with what it has said, and its pictures compared."""

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image
from recorder import Recorder

from engine.backends.diffusers.service import open_service
from engine.config.models import profile_named
from engine.types import FinishedImage, ImageEvent, ImageJob, ImageProgress

SMALL = {
    "steps": {"standard": 4, "hd": 6},
    "render_size": {"256x256": 64, "512x512": 64, "1024x1024": 128},
    "max_batch": {"256x256": 4, "512x512": 2, "1024x1024": 1},
}


class Studio:
    """A service with its recorder."""

    def __init__(self, folder: Path, changes: dict[str, Any]) -> None:
        profile = profile_named("demo", {**SMALL, **changes}).model_dump_json(by_alias=True)
        self.phases: list[str] = []
        self.recorder = Recorder(ImageEvent)
        options = msgspec.msgpack.encode((str(folder), profile, True))
        self.service = open_service(options, self.recorder, lambda phase, _progress: self.phases.append(phase))

    def submit(self, number: int, prompt: str = "a lamp", size: int = 256, **more: Any) -> None:
        job = ImageJob(prompt, size, more.pop("quality", "standard"), more.pop("seed", 1), **more)
        self.service.submit(number, msgspec.msgpack.encode(job))

    def run(self) -> None:
        while self.service.busy:
            self.service.step()

    def steps(self, number: int) -> list[tuple[int, int]]:
        events = self.recorder.events.get(number, [])
        return [(event.step, event.steps) for event in events if isinstance(event, ImageProgress)]

    def file(self, number: int) -> bytes:
        last = self.recorder.events[number][-1]
        assert isinstance(last, FinishedImage)
        assert self.recorder.ends[number] is None
        return last.data


def opened(file: bytes) -> Image.Image:
    picture = Image.open(io.BytesIO(file))
    picture.load()
    return picture


def apart(one: bytes, other: bytes) -> int:
    return int(np.abs(np.asarray(opened(one)).astype(int) - np.asarray(opened(other)).astype(int)).max())
