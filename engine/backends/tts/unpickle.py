"""`python -m engine.backends.tts.unpickle FOLDER`: makes safetensors of pickled tensors, for weights/download.py.

`torch.load(weights_only=True)` reads tensors only. Prints on stdout what it refuses, or the number of the system's
error, and ends with status 3.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

_REFUSED = 3
_ONLY = "voice"  # the name of a file's only tensor


def main() -> None:
    """Convert files below the folder in the first argument; stdin has old and new names as a JSON object."""
    folder, status = Path(sys.argv[1]), 0
    for name, target in json.load(sys.stdin).items():
        try:
            _convert(folder / name, folder / target)
        except OSError as error:
            said, status = str(error.errno), _REFUSED
        except Exception:  # noqa: BLE001  # a hostile file can raise anything
            said, status = name, _REFUSED
        if status:
            print(said)  # noqa: T201  # to the process that started this one
            break
    sys.exit(status)


def _convert(file: Path, target: Path) -> None:
    found = torch.load(file, map_location="cpu", weights_only=True)
    # Copies, because tensors that share their memory cannot be saved
    target.write_bytes(save({name: tensor.detach().clone().contiguous() for name, tensor in _tensors(found)}))


def _tensors(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors of dictionaries within dictionaries, by their names with dots between."""
    if isinstance(found, torch.Tensor):
        yield name or _ONLY, found
    elif isinstance(found, dict) and all(isinstance(key, str) for key in found):
        for key, inside in found.items():
            yield from _tensors(inside, f"{name}.{key}" if name else key)
    else:
        raise TypeError


if __name__ == "__main__":
    main()
