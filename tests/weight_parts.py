"""A small model as files, for tests of weights. Holds no tests."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer

from engine.errors import EngineError
from engine.weights.download import Wanted, check_room, prepared
from engine.weights.manifest import Manifest, Report, silent

REPOSITORY = "owner/tiny-chat"
NAME = "tiny-chat"
# Of seconds, before the second attempt of a pull
PAUSE = 0.001
SHARD = "model-00001-of-00002.safetensors"
_OTHER = "model-00002-of-00002.safetensors"
FILES = (
    "README.md",
    "config.json",
    "generation_config.json",
    SHARD,
    _OTHER,
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def safetensors(size: int, seed: int = 0) -> bytes:
    """A file that is whole: its header and one tensor of noise, `size` bytes in all if that is not too few."""
    for length in range(max(size - 200, 1), size + 1):
        header = json.dumps({"a": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).encode()
        if 8 + len(header) + length >= size:
            break
    noise = random.Random(seed).randbytes(length)  # noqa: S311 - the same each time
    return len(header).to_bytes(8, "little") + header + noise


def model_files() -> dict[str, bytes]:
    index = {"metadata": {}, "weight_map": {"a": SHARD, "b": _OTHER}}
    return {
        "README.md": b"---\nlicense: apache-2.0\n---\n",
        "config.json": b'{"architectures": ["TinyForCausalLM"]}',
        "generation_config.json": b'{"eos_token_id": 1}',
        SHARD: safetensors(1_500_000, seed=1),
        _OTHER: safetensors(700_000, seed=2),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "tokenizer.json": json.dumps({"version": 1, "vocab": list(range(40_000))}).encode(),
        "tokenizer_config.json": b'{"model_max_length": 64}',
    }


def wanted(hub: HubServer, **fields: Any) -> Wanted:
    return Wanted(REPOSITORY, NAME, endpoint=hub.endpoint, first_pause_seconds=PAUSE, **fields)


@contextmanager
def hub_here() -> Iterator[HubServer]:
    """A hub with the small model, for pulls by this process."""
    from huggingface_hub import close_session

    with HubServer() as server:
        server.add(REPOSITORY, model_files())
        yield server
        close_session()


def pull(weights: Path, asked: Wanted, report: Report = silent) -> Manifest:
    """Fetch a model as `hearth weights pull` does."""
    with prepared(weights, asked, report) as found:
        if isinstance(found, Manifest):
            return found
        check_room(weights, [found])
        return found.run(report)


def refusal(weights: Path, asked: Wanted) -> str:
    """What a pull says that must not leave a folder, nor repeat a lower library's words and addresses."""
    with pytest.raises(EngineError) as refused:
        pull(weights, asked)
    assert not (weights / asked.folder).exists()
    assert "://" not in refused.value.message.replace(asked.endpoint or "", "")
    return refused.value.message
