"""Has a process of its own, with which nothing is lost, make safetensors of pickled tensors; it installs nothing."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from engine.weights.errors import WeightsError
from engine.weights.manifest import ModelFile

ENDINGS = (".pth", ".pt")
_SECONDS = 1800
_REFUSED = 3  # as unpickle.py ends
_UNPICKLE = "engine.backends.tts.unpickle"


def converted(folder: Path, files: tuple[ModelFile, ...]) -> tuple[ModelFile, ...]:
    """Make safetensors of the pickles among `files`; return what is there then. Raises `WeightsError`, `OSError`."""
    pickles = [file.path for file in files if file.path.endswith(ENDINGS)]
    # -I: no module from elsewhere; -B: not even compiled code is written beside the packages.
    command = [sys.executable, "-I", "-B", "-m", _UNPICKLE, str(folder)]
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": home, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=home,
                input=json.dumps({name: _safe(name) for name in pickles}).encode(),
                capture_output=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise WeightsError(f"{pickles[0]} could not be converted within {_SECONDS} s.") from error
    said = done.stdout.decode(errors="replace").strip()
    if done.returncode == _REFUSED and said.isdigit():
        raise OSError(int(said), os.strerror(int(said)))
    if done.returncode == _REFUSED and said in pickles:
        raise WeightsError(f"{said} has more than tensors, so it could run code, and is refused.")
    if done.returncode != 0:
        why = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        raise WeightsError(f"The pickles could not be converted ({why}). Is there enough memory? Try again.")
    kept = [file for file in files if not file.path.endswith(ENDINGS)]
    made = [(path, folder / path) for path in map(_safe, pickles)]
    return (*kept, *(ModelFile(path=path, size_bytes=place.stat().st_size) for path, place in made))


def _safe(name: str) -> str:
    return f"{name.rpartition('.')[0]}.safetensors"
