"""OmniVoice, whose voices are listed and do not speak: nothing here runs it, and nothing is installed for it."""

from pathlib import Path

from engine.errors import LoadError
from engine.voices.readers import OMNIVOICE_PROBLEM


def load(folder: Path) -> None:
    raise LoadError(f"{folder.name}: {OMNIVOICE_PROBLEM}.")
