"""VITS in the layout of transformers, like Meta's MMS: language and number of voices, neither names nor genders."""

from __future__ import annotations

from typing import Any

from engine.voices.files import MetadataError, ModelFolder
from engine.voices.languages import language_code
from engine.voices.readers import MAX_SAMPLE_RATE, MAX_SPEAKERS, ModelFacts, Speaker, is_installed, slug, whole_number

FAMILY = "vits"
WANTED = "config.json with `model_type: vits`"
RUNTIMES = ("transformers",)
INSTALL = "pip install transformers"

_PHONEMES = "phonemizer"


def read(folder: ModelFolder) -> ModelFacts | None:
    """As `Reader.read`."""
    config = folder.read_json("config.json")
    if config is None or config.get("model_type") != "vits":
        return None
    tokenizer = folder.read_json("tokenizer_config.json") or {}
    if "auto_map" in config or "auto_map" in tokenizer:
        raise MetadataError("has `auto_map`: it wants to run code of its own, which is never done here")
    count = whole_number(config.get("num_speakers", 1), 0, 2**31)
    if count is None:
        raise MetadataError("config.json: `num_speakers` must be a whole number: download the model again")
    notes = () if count <= MAX_SPEAKERS else (f"only the first {MAX_SPEAKERS} of its {count} voices are looked at",)
    return ModelFacts(
        speakers=_speakers(folder.name, min(count, MAX_SPEAKERS), language_code(tokenizer.get("language"))),
        sample_rate=_sample_rate(config),
        problem=_problem(folder, tokenizer),
        notes=notes,
    )


def _speakers(model: str, count: int, language: str | None) -> tuple[Speaker, ...]:
    if count <= 1:
        return (Speaker(speaker=None, slug=slug(model), language=language),)
    return tuple(Speaker(speaker=number, slug=slug(f"{model} {number}"), language=language) for number in range(count))


def _sample_rate(config: dict[str, Any]) -> int | None:
    return whole_number(config.get("sampling_rate"), 1, MAX_SAMPLE_RATE)


def _problem(folder: ModelFolder, tokenizer: dict[str, Any]) -> str | None:
    if tokenizer.get("phonemize") and not is_installed(_PHONEMES):
        return (
            f"it was made for phonemes: pip install {_PHONEMES} and install espeak-ng, or take a model made for letters"
        )
    names = folder.names()
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights:
        return (
            "there is no .safetensors file; finish the download, or take a model that offers it (pickles like .bin and "
            ".pth can run code and are refused)"
        )
    if "vocab.json" not in names:
        return "there is no vocab.json; finish the download"
    return next((problem for name in weights if (problem := folder.weights_problem(name))), None)
