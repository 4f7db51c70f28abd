"""The shipped voices of eSpeak NG, texts for them, and measures of loudness and pitch that are not ours."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import numpy as np
import yaml
from numpy.typing import NDArray
from speech_parts import NINE, pitch_hz

from engine.backends.tts.service import loaded
from engine.voices.catalogue import SHIPPED

__all__ = ["NINE", "TEXTS", "folder_of", "loudness_by_ffmpeg", "pitch_hz", "spoken"]

DOCS = Path(__file__).parents[4] / "docs"
TEXTS: dict[str, list[str]] = yaml.safe_load((DOCS / "voice-samples/texts.yaml").read_text("utf-8"))


def folder_of(language: str) -> Path:
    return SHIPPED / f"espeak-{language}"


def spoken(voice: str, text: str, *, speed: float = 1, seed: int = 1) -> tuple[int, NDArray[np.float32]]:
    """The rate and the samples of one piece of text."""
    model = loaded("espeak", folder_of(NINE[voice][1]))
    return model.sample_rate, model.speak(model.sayable(text), voice, speed, seed)


def loudness_by_ffmpeg(samples: NDArray[np.float32], rate: int) -> float:
    """The integrated loudness in LUFS, by FFmpeg's filter ebur128."""
    with TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        graph: Any = av.filter.Graph()
        source = graph.add_abuffer(format="flt", layout="mono", sample_rate=rate)
        measure, tell = graph.add("ebur128", "metadata=1"), graph.add("ametadata", f"mode=print:file={told}")
        graph.link_nodes(source, measure, tell, graph.add("abuffersink")).configure()
        frame: Any = av.AudioFrame.from_ndarray(samples[np.newaxis], format="flt", layout="mono")
        frame.sample_rate = rate
        graph.push(frame)
        graph.push(None)
        while True:
            try:
                graph.pull()
            except (EOFError, av.error.BlockingIOError):
                break
        del graph
        values = [line for line in told.read_text().splitlines() if line.startswith("lavfi.r128.I=")]
        return float(values[-1].partition("=")[2])
