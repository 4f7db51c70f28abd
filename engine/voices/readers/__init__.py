"""What each family of TTS models says about its voices: one file per family, found by being here.

A reader is a module with what `Reader` asks for. It reads metadata through `ModelFolder` alone and loads no model.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

from engine.voices.files import ModelFolder
from engine.voices.types import Gender

MAX_SPEAKERS = 1000
MAX_SAMPLE_RATE = 384_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """One voice as its model describes it; None is what the model does not say.

    `slug` makes ids of the voice: small letters, digits and hyphens, another for every speaker. `label` is the name
    that voices.yaml may use for it. `problem`: why it cannot speak.
    """

    speaker: int | str | None
    slug: str
    label: str | None = None
    name: str | None = None
    gender: Gender | None = None
    language: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's own files say. `problem`: why none of its voices can speak; `notes` are for the operator."""

    speakers: tuple[Speaker, ...]
    sample_rate: int | None
    licence: str | None = None
    problem: str | None = None
    notes: tuple[str, ...] = ()


class Reader(Protocol):
    """A family."""

    FAMILY: str
    WANTED: str
    """What a folder of this family holds, for people."""
    RUNTIMES: tuple[str, ...]
    """Packages without which it cannot speak."""
    INSTALL: str
    """How they are installed."""

    def read(self, folder: ModelFolder) -> ModelFacts | None:
        """Return what the model says, None if it is of another family. Raises `MetadataError`."""


@cache
def readers() -> tuple[Reader, ...]:
    """All readers, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(cast("Reader", importlib.import_module(f"{__name__}.{name}")) for name in names)


def is_installed(package: str) -> bool:
    """Whether a package could be imported; it is not."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a spec, put there by hand
        return True


def whole_number(value: object, low: int, high: int) -> int | None:
    """Return a number from JSON if it is a whole one in this range."""
    return value if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high else None


def slug(text: str) -> str:
    """Make an id of a name: `en_US-amy` becomes `en-us-amy`; empty if nothing of it can be kept."""
    kept = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in text.lower())
    return "-".join(kept.split())
