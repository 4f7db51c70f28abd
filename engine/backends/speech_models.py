"""The models that speak: what each family must offer, which families can run here, and the few that stay loaded."""

from __future__ import annotations

import importlib
import importlib.util
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.errors import LoadError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KEPT_MODELS = 4

# Family -> the module here whose `load(folder)` makes a `SpeechModel`, and the packages without which it cannot.
_FAMILIES = {
    "vits": ("engine.backends.speech_vits", ("transformers",)),
    "piper": ("engine.backends.speech_piper", ("piper", "onnxruntime")),
    "kokoro": ("engine.backends.speech_kokoro", ("kokoro",)),
}


class SpeechModel(Protocol):
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


def installed_families() -> list[str]:
    """Return the families whose packages are installed."""
    return [family for family, (_, packages) in _FAMILIES.items() if all(map(_is_installed, packages))]


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class Shelf:
    """Loads models when they are first needed, and keeps those that were used last."""

    def __init__(self) -> None:
        self._models: OrderedDict[tuple[str, str, int], SpeechModel] = OrderedDict()

    def take(self, family: str, folder: str) -> SpeechModel:
        """Return a loaded model. Raises `LoadError`."""
        if family not in _FAMILIES:
            raise LoadError(f"There is no family {family!r} of voices here, only: {', '.join(_FAMILIES)}.")
        key = (family, folder, _changed_at(Path(folder)))
        if key not in self._models:
            while len(self._models) >= KEPT_MODELS:
                self._models.popitem(last=False)
            self._models[key] = importlib.import_module(_FAMILIES[family][0]).load(Path(folder))
        self._models.move_to_end(key)
        return self._models[key]


def _changed_at(folder: Path) -> int:
    """A model that was replaced on disk is another one."""
    try:
        return max((file.stat().st_mtime_ns for file in folder.iterdir()), default=0)
    except OSError as error:
        raise LoadError(f"The folder {folder.name} cannot be read. Reload the models.") from error
