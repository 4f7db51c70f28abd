"""A speech service in this process, with what it has said, and a reader of audio files that is not ours."""

import io
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
from recorder import Recorder

from engine import EngineError
from engine.backends.tts.service import open_service
from engine.voices.types import SpeechChunk, SpeechJob

TEXT = "Hello there. It is me! Who else?"


class Booth:
    """A service with its recorder."""

    def __init__(self, folder: Path, *, mark: bool = True) -> None:
        self.folder = folder
        self.recorder = Recorder(SpeechChunk)
        options = msgspec.msgpack.encode((mark, []))
        self.service = open_service(options, self.recorder, lambda _phase, _progress: None)
        self.numbers = iter(range(1, 1000))

    def submit(self, text: str = TEXT, **more: Any) -> int:
        number = next(self.numbers)
        given = {"folder": str(self.folder), "family": "vits", "speaker": None, "language": "en", "seed": 1, **more}
        self.service.submit(number, msgspec.msgpack.encode(SpeechJob(text=text, **given)))
        return number

    def run(self) -> None:
        while self.service.busy:
            self.service.step()

    def pieces(self, number: int) -> list[SpeechChunk]:
        return self.recorder.events.get(number, [])

    def speak(self, text: str = TEXT, **more: Any) -> tuple[bytes, float]:
        """Return the file, and the seconds that the service says it has."""
        number = self.submit(text, **more)
        self.run()
        assert self.recorder.ends[number] is None
        pieces = self.pieces(number)
        return b"".join(piece.data for piece in pieces), sum(piece.seconds for piece in pieces)

    def samples(self, text: str = TEXT, **more: Any) -> np.ndarray:
        return np.frombuffer(self.speak(text, response_format="pcm", **more)[0], "<i2")

    def failure(self, text: str = TEXT, **more: Any) -> EngineError:
        number = self.submit(text, **more)
        self.run()
        error = self.recorder.ends[number]
        assert error is not None
        return error


def by_ffmpeg(data: bytes) -> tuple[np.ndarray, int, dict[str, str]]:
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        frames = [frame.to_ndarray().reshape(-1) for frame in container.decode(stream)]
        return np.concatenate(frames), stream.rate, {**container.metadata, **stream.metadata}
