"""The models that speak: what each family's file here offers, and the few models that stay loaded."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import LoadError

MAX_LOADED = 4
# Each is a file here whose `load(folder)` makes a `Synthesizer`, and a reader in engine/voices/readers.
FAMILIES = ("kokoro", "piper", "vits")


class Synthesizer(Protocol):
    """A loaded model, of one or more speakers."""

    @property
    def sample_rate(self) -> int:
        """In Hz."""

    def sayable(self, text: str) -> str:
        """Return what of a piece of text `speak` can say, in the letters that it takes; empty if nothing."""

    def speak(self, text: str, speaker: int | str | None, speed: float, seed: int) -> NDArray[np.float32]:
        """Say what `sayable` returned: mono samples, 1/`speed` as long as at speed 1. The same seed, the same sound.

        Raises `LoadError` for a speaker that the model does not have.
        """


class LoadedModels:
    """Loads models when they are first needed, and keeps those that were used last."""

    def __init__(self) -> None:
        self._models: OrderedDict[tuple[str, str, int], Synthesizer] = OrderedDict()

    def get(self, family: str, folder: str) -> Synthesizer:
        """Return a loaded model. Raises `LoadError`."""
        if family not in FAMILIES:
            raise LoadError(f"There is no family {family!r} of voices here, only: {', '.join(FAMILIES)}.")
        key = (family, folder, _changed_at(Path(folder)))
        if key not in self._models:
            while len(self._models) >= MAX_LOADED:
                self._models.popitem(last=False)
            self._models[key] = importlib.import_module(f"engine.backends.tts.{family}").load(Path(folder))
        self._models.move_to_end(key)
        return self._models[key]


def _changed_at(folder: Path) -> int:
    """A model that was replaced on disk is another one."""
    try:
        return max((file.stat().st_mtime_ns for file in folder.iterdir()), default=0)
    except OSError as error:
        raise LoadError(f"The folder {folder.name} cannot be read. Reload the models.") from error
