"""Voices that speak in a worker process: model.py is the server's half, service.py the worker's."""

import unicodedata
from collections.abc import Sequence

from engine.errors import LoadError


def only_of(text: str, *scripts: str) -> str:
    """Return a text with a space for each letter of other scripts. `scripts`: how Unicode's names of letters begin."""
    known = (*scripts, "COMBINING", "MODIFIER")
    letters = {one for one in text if unicodedata.category(one)[0] in "LM"}
    others = {one for one in letters if not unicodedata.name(one, "").startswith(known)}
    return text.translate({ord(one): " " for one in others})


def check_complete(folder: str, missing: Sequence[str]) -> None:
    """Raise `LoadError` if tensors are missing: they would be filled with noise, and sound like noise."""
    if missing:
        raise LoadError(f"{folder} lacks {len(missing)} tensors, like {missing[0]}. Download it again.")
