"""A vLLM in which some names are called something else, as a new release might have it: it runs, our code finds none.

Of the installed one: its own uses of a name are renamed, too; files without any are links.
"""

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path


def make(folder: Path, names: Iterable[str]) -> None:
    """Put it into the folder, which is to come first on PYTHONPATH."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    words = re.compile(rb"\b(%s)\b" % "|".join(names).encode())
    for libraries in package.parent.glob("vllm*.libs"):
        (folder / libraries.name).symlink_to(libraries)
    for file in package.rglob("*"):
        place = folder / "vllm" / file.relative_to(package)
        if file.is_dir():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_bytes() if file.suffix == ".py" else b""
        if words.search(text):
            place.write_bytes(words.sub(rb"\1_as_it_is_called_now", text))
        else:
            place.symlink_to(file)
