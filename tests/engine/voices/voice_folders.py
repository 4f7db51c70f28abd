"""Makes TTS model folders as their families lay them out, with weights of a few bytes."""

import json
import time
from pathlib import Path

import pytest
import yaml

from engine.voices.catalogue import Catalogue, read_catalogue

SAFETENSORS = (2).to_bytes(8, "little") + b"{}"
ONNX = b"\x08\x08\x12\x07pytorch"
GOOD = {"id": "selam", "name": "Selam", "gender": "female"}
OTHER = {"id": "abebe", "name": "Abebe", "gender": "male"}


def put(folder: Path, name: str, content: object) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return file


def vits(root: Path, name: str, language: str | None = "amh", speakers: int = 1) -> Path:
    folder = root / name
    put(folder, "config.json", {"model_type": "vits", "num_speakers": speakers, "sampling_rate": 16000})
    put(folder, "tokenizer_config.json", {"language": language, "is_uroman": True})
    put(folder, "vocab.json", {"a": 0})
    put(folder, "model.safetensors", SAFETENSORS)
    return folder


def piper(root: Path, name: str, stem: str = "so_SO-hodan-medium", **config: object) -> Path:
    folder = root / name
    plain = {
        "audio": {"sample_rate": 22050, "quality": "medium"},
        "espeak": {"voice": "so"},
        "language": {"code": "so_SO", "family": "so"},
        "num_speakers": 1,
        "speaker_id_map": {},
    }
    put(folder, f"{stem}.onnx.json", plain | config)
    put(folder, f"{stem}.onnx", ONNX)
    return folder


def kokoro(root: Path, name: str, *files: str, weights: str = "kokoro-v1_0.safetensors") -> Path:
    folder = root / name
    put(folder, "config.json", {"istftnet": {}, "plbert": {}, "vocab": {}})
    put(folder, weights, SAFETENSORS if weights.endswith(".safetensors") else ONNX)
    for file in files:
        put(folder, f"voices/{file}", SAFETENSORS)
    return folder


def overlay(folder: Path, *voices: dict[str, object], **keys: object) -> Path:
    said = {**keys, "voices": list(voices)} if voices else keys
    put(folder, "voices.yaml", yaml.safe_dump(said, allow_unicode=True, sort_keys=False))
    return folder


def read(root: Path, demo: Path | None = None) -> Catalogue:
    catalogue = read_catalogue(root, demo)
    for warning in catalogue.warnings:
        assert all(text.isprintable() for text in (warning.model, warning.voice or "", warning.message))
    return catalogue


def ids(catalogue: Catalogue) -> list[str]:
    return [voice.id for voice in catalogue.voices]


def only_warning(catalogue: Catalogue) -> str:
    (warning,) = catalogue.warnings
    return warning.message


def complaint_of(root: Path, *, voices: list[str] | None = None) -> str:
    started = time.process_time()
    catalogue = read(root)
    assert time.process_time() - started < 5
    assert ids(catalogue) == (["selam"] if voices is None else voices)
    return only_warning(catalogue)


def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *packages: str) -> None:
    for package in packages:
        put(tmp_path / "site", f"{package}/__init__.py", "raise RuntimeError('never imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
