"""Piper: `X.onnx` with `X.onnx.json` beside it. It says language and names of speakers, but no genders."""

from __future__ import annotations

from typing import Any

from engine.config.yaml import shown
from engine.voices.files import MetadataError, ModelFolder
from engine.voices.languages import language_code
from engine.voices.readers import MAX_SAMPLE_RATE, MAX_SPEAKERS, ModelFacts, Speaker, slug, whole_number

FAMILY = "piper"
WANTED = "X.onnx with X.onnx.json"
RUNTIMES = ("piper", "onnxruntime")
INSTALL = "pip install piper-tts"

_ENDING = ".onnx.json"
_CARD_BYTES = 64 << 10
_PHONEMES = ("espeak", "text")


def read(folder: ModelFolder) -> ModelFacts | None:
    """As `Reader.read`."""
    names = folder.names()
    configs = [name for name in names if name.endswith(_ENDING) and name != _ENDING]
    if not configs:
        return None
    if len(configs) > 1:
        raise MetadataError(
            f"holds {len(configs)} Piper models: put each, with its .onnx.json, into a folder of its own"
        )
    config = folder.read_json(configs[0])
    if config is None:
        return None
    audio = _mapping(config, "audio")
    speakers, notes = _speakers(configs[0].removesuffix(_ENDING), config)
    return ModelFacts(
        speakers=speakers,
        sample_rate=whole_number(audio.get("sample_rate"), 1, MAX_SAMPLE_RATE),
        licence=_licence(folder),
        problem=_problem(folder, config, names, configs[0].removesuffix(".json")),
        notes=notes,
    )


def _problem(folder: ModelFolder, config: dict[str, Any], names: list[str], weights: str) -> str | None:
    if config.get("phoneme_type", "espeak") not in _PHONEMES:
        return f"only the phoneme types {' and '.join(_PHONEMES)} work here; take another model"
    if weights not in names:
        return f"there is no {shown(weights)}; finish the download"
    return folder.weights_problem(weights)


def _mapping(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _language(config: dict[str, Any]) -> str | None:
    # The phonemes of a language that eSpeak lacks may be another's, so eSpeak's is asked last.
    language = _mapping(config, "language")
    said = (language.get("code"), language.get("family"), _mapping(config, "espeak").get("voice"))
    return next((code for text in said if (code := language_code(text))), None)


def _speakers(stem: str, config: dict[str, Any]) -> tuple[tuple[Speaker, ...], tuple[str, ...]]:
    language = _language(config)
    count = whole_number(config.get("num_speakers", 1), 0, 2**31)
    if count is None:
        raise MetadataError("`num_speakers` must be a whole number: download the model again")
    if count <= 1:
        # `en_US-amy-medium`: what stands between language and quality is the voice's name.
        parts = stem.split("-")
        name = parts[1].replace("_", " ").title() if len(parts) == 3 else None
        return (Speaker(speaker=None, slug=slug(f"piper {stem}"), name=name, language=language),), ()
    labels: dict[int, str] = {}
    for label, number in _mapping(config, "speaker_id_map").items():
        if (index := whole_number(number, 0, count - 1)) is not None:
            labels.setdefault(index, label)
    speakers = tuple(
        Speaker(
            speaker=number,
            slug=slug(f"piper {stem} {slug(labels.get(number, '')) or number}"),
            label=labels.get(number),
            name=labels.get(number),
            language=language,
        )
        for number in range(min(count, MAX_SPEAKERS))
    )
    notes = () if count <= MAX_SPEAKERS else (f"only the first {MAX_SPEAKERS} of its {count} voices are looked at",)
    return speakers, notes


def _licence(folder: ModelFolder) -> str | None:
    card = folder.read_start("MODEL_CARD", _CARD_BYTES) or b""
    for line in card.decode("utf-8", "replace").splitlines():
        key, _, value = line.strip("*# \t").partition(":")
        if key.lower() in {"license", "licence"} and value.strip():
            return value.strip()
    return None
