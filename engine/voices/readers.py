"""What each family of TTS models says about its voices. `ModelFolder` reads only metadata; no model is loaded.

A family is a row of `FAMILIES`, and a file with its name in engine/backends/tts, which speaks.
"""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, get_args

from engine.config.yaml import shown
from engine.voices.files import MetadataError, ModelFolder
from engine.voices.languages import language_code
from engine.voices.types import Gender, Quality

MAX_SPEAKERS = 1000
_MAX_SAMPLE_RATE = 384_000
_SAFE, _PICKLES = ".safetensors", (".pt", ".pth", ".bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """One voice as its model describes it; None: the model does not say.

    `slug` makes the voice's id: small letters, digits and hyphens, different for every speaker. `label` is the name
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
    instructed: Callable[[str, str | None], Speaker | None] | None = None
    """For a model that makes voices from instructions: returns the voice of a `speaker` in voices.yaml and a language;
    None if there is none."""


def is_installed(package: str) -> bool:
    """Whether a package could be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def _slug(text: str) -> str:
    """Make an id of a name: `en_US-amy` becomes `en-us-amy`; empty if no character is usable."""
    kept = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in text.lower())
    return "-".join(kept.split())


def _whole_number(value: object, low: int, high: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high else None


def _number_of_speakers(config: dict[str, Any]) -> int:
    count = _whole_number(config.get("num_speakers", 1), 0, 2**31)
    if count is None:
        raise MetadataError("`num_speakers` must be a whole number: download the model again")
    return count


def _left_out(count: int) -> tuple[str, ...]:
    return () if count <= MAX_SPEAKERS else (f"only the first {MAX_SPEAKERS} of its {count} voices are read",)


def _first_problem(folder: ModelFolder, weights: list[str]) -> str | None:
    return next((problem for name in weights if (problem := folder.weights_problem(name))), None)


# Kokoro: the names of its files say language and gender. `a` and `b` are American and British English: `am_adam` is an
# American man and has nothing to do with Amharic. Source: VOICES.md in the repository of Kokoro-82M.
_KOKORO_FILE = re.compile(r"(?P<stem>[A-Za-z0-9_-]{1,64})(?P<ending>\.safetensors|\.pt|\.bin)")
_KOKORO_NAME = re.compile(r"(?P<language>[abefhijpz])(?P<gender>[fm])_(?P<name>[a-z0-9_]+)")
_KOKORO_LANGUAGES = dict(zip("abefhijpz", ("en", "en", "es", "fr", "hi", "it", "ja", "pt", "zh"), strict=True))
_KOKORO_GENDERS: dict[str, Gender] = {"f": "female", "m": "male"}
_KOKORO_UNREAD = "jz"


def _read_kokoro(folder: ModelFolder) -> ModelFacts | None:
    names = folder.names()
    if "voices" not in names or not _is_kokoro(folder, names):
        return None
    files = folder.names("voices")
    # Sorted, so that for a voice in two formats the safe one stays.
    known = [found for name in files if (found := _KOKORO_FILE.fullmatch(name))]
    voices = {found["stem"]: found["ending"] for found in sorted(known, key=lambda one: one["ending"] == _SAFE)}
    odd = [name for name in files if name.endswith((_SAFE, ".pt", ".bin")) and not _KOKORO_FILE.fullmatch(name)]
    said = f"{len(odd)} file(s) in voices/ are left out, like {shown(odd[0])}: name them like `af_heart`" if odd else ""
    return ModelFacts(
        speakers=tuple(_kokoro_speaker(folder, stem, voices[stem]) for stem in sorted(voices)[:MAX_SPEAKERS]),
        sample_rate=24_000,
        problem=_kokoro_problem(folder, names),
        notes=(*filter(None, [said]), *_left_out(len(voices))),
    )


def _is_kokoro(folder: ModelFolder, names: list[str]) -> bool:
    if any(name.lower().startswith("kokoro") and name.endswith((_SAFE, ".onnx", *_PICKLES)) for name in names):
        return True
    config = folder.read_json("config.json") or {}
    return "istftnet" in config or config.get("model_type") == "style_text_to_speech_2"


def _kokoro_speaker(folder: ModelFolder, stem: str, ending: str) -> Speaker:
    found = _KOKORO_NAME.fullmatch(stem)
    problem: str | None
    if found is not None and found["language"] in _KOKORO_UNREAD:
        problem = "its Japanese and Chinese voices need reading rules that Hearth lacks"
    elif ending == _SAFE:
        problem = folder.weights_problem(f"voices/{stem}{ending}")
    else:
        problem = f"voices/{stem}{ending} may be a pickle, which can run code: convert it to {stem}{_SAFE}"
    return Speaker(
        speaker=stem,
        slug=_slug(f"kokoro {stem}"),
        name=found["name"].replace("_", " ").title() if found else None,
        gender=_KOKORO_GENDERS[found["gender"]] if found else None,
        language=_KOKORO_LANGUAGES[found["language"]] if found else None,
        problem=problem,
    )


def _kokoro_problem(folder: ModelFolder, names: list[str]) -> str | None:
    weights = [name for name in names if name.endswith(_SAFE)]
    if weights:
        return _first_problem(folder, weights) if "config.json" in names else _lacks("config.json")
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"{shown(pickles[0])} is a pickle, which can run code: `hearth voices add kokoro` fetches and converts it"
        )
    return f"there is no {_SAFE} file, and nothing else is loaded: `hearth voices add kokoro` makes one"


def _lacks(file: str) -> str:
    return f"there is no {shown(file)}; finish the download"


# Piper: `X.onnx` with `X.onnx.json` beside it, which says language and names of speakers, but no genders.
_PIPER_ENDING = ".onnx.json"
_PIPER_PHONEMES = ("espeak", "text")
_PIPER_CARD_BYTES = 64 << 10


def _read_piper(folder: ModelFolder) -> ModelFacts | None:
    names = folder.names()
    configs = [name for name in names if name.endswith(_PIPER_ENDING) and name != _PIPER_ENDING]
    if len(configs) > 1:
        raise MetadataError(f"has {len(configs)} Piper models: put each, with its .onnx.json, into a folder of its own")
    config = folder.read_json(configs[0]) if configs else None
    if config is None:
        return None
    weights = configs[0].removesuffix(".json")
    problem = _lacks(weights) if weights not in names else folder.weights_problem(weights)
    if config.get("phoneme_type", "espeak") not in _PIPER_PHONEMES:
        problem = f"only the phoneme types {' and '.join(_PIPER_PHONEMES)} work here; take another model"
    count = _number_of_speakers(config)
    return ModelFacts(
        speakers=_piper_speakers(configs[0].removesuffix(_PIPER_ENDING), config, count),
        sample_rate=_whole_number(_mapping(config, "audio").get("sample_rate"), 1, _MAX_SAMPLE_RATE),
        licence=_piper_licence(folder),
        problem=problem,
        notes=_left_out(count),
    )


def _mapping(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _piper_speakers(stem: str, config: dict[str, Any], count: int) -> tuple[Speaker, ...]:
    # The phonemes of a language that eSpeak lacks may be another language's, so eSpeak's code comes last.
    language = _mapping(config, "language")
    said = (language.get("code"), language.get("family"), _mapping(config, "espeak").get("voice"))
    code = next((code for text in said if (code := language_code(text))), None)
    if count <= 1:
        # `en_US-amy-medium`: the voice's name is between language and quality.
        parts = stem.split("-")
        name = parts[1].replace("_", " ").title() if len(parts) == 3 else None
        return (Speaker(speaker=None, slug=_slug(f"piper {stem}"), name=name, language=code),)
    labels: dict[int, str] = {}
    for label, number in _mapping(config, "speaker_id_map").items():
        if (index := _whole_number(number, 0, count - 1)) is not None:
            labels.setdefault(index, label)
    return tuple(
        Speaker(
            speaker=number,
            slug=_slug(f"piper {stem} {_slug(labels.get(number, '')) or number}"),
            label=labels.get(number),
            name=labels.get(number),
            language=code,
        )
        for number in range(min(count, MAX_SPEAKERS))
    )


def _piper_licence(folder: ModelFolder) -> str | None:
    card = folder.read_start("MODEL_CARD", _PIPER_CARD_BYTES) or b""
    for line in card.decode("utf-8", "replace").splitlines():
        key, _, value = line.strip("*# \t").partition(":")
        if key.lower() in {"license", "licence"} and value.strip():
            return value.strip()
    return None


# VITS in the layout of transformers, like Meta's MMS: language and number of voices, neither names nor genders.
def _read_vits(folder: ModelFolder) -> ModelFacts | None:
    config = folder.read_json("config.json")
    if config is None or config.get("model_type") != "vits":
        return None
    tokenizer = folder.read_json("tokenizer_config.json") or {}
    if "auto_map" in config or "auto_map" in tokenizer:
        raise MetadataError("has `auto_map`: it wants to run code of its own, which is never done here")
    count, language = _number_of_speakers(config), language_code(tokenizer.get("language"))
    numbers = [None] if count <= 1 else range(min(count, MAX_SPEAKERS))
    return ModelFacts(
        speakers=tuple(
            Speaker(speaker=number, slug=_slug(f"{folder.name} {'' if number is None else number}"), language=language)
            for number in numbers
        ),
        sample_rate=_whole_number(config.get("sampling_rate"), 1, _MAX_SAMPLE_RATE),
        problem=_vits_problem(folder, tokenizer),
        notes=_left_out(count),
    )


def _vits_problem(folder: ModelFolder, tokenizer: dict[str, Any]) -> str | None:
    if tokenizer.get("phonemize") and not is_installed("phonemizer"):
        return (
            "it was made for phonemes: pip install phonemizer and install espeak-ng, or take a model made for letters"
        )
    names = folder.names()
    weights = [name for name in names if name.endswith(_SAFE)]
    if not weights:
        return (
            "there is no .safetensors file; finish the download, or take a model that offers it (pickles like .bin and "
            ".pth can run code and are refused)"
        )
    return _first_problem(folder, weights) if "vocab.json" in names else _lacks("vocab.json")


# OmniVoice has no voices of its own: each is an instruction, attributes with commas between, that voices.yaml names as
# `speaker`. Source of the attributes: utils/voice_design.py of its package 0.2.1.
_OMNIVOICE_CODEC = "audio_tokenizer/model.safetensors"
_OMNIVOICE_ATTRIBUTES = frozenset(
    {
        *("female", "male", "child", "teenager", "young adult", "middle-aged", "elderly", "whisper"),
        *("very low pitch", "low pitch", "moderate pitch", "high pitch", "very high pitch"),
        *(f"{land} accent" for land in ("american", "british", "australian", "canadian", "indian", "chinese")),
        *(f"{land} accent" for land in ("korean", "portuguese", "russian", "japanese")),
    }
)


def _read_omnivoice(folder: ModelFolder) -> ModelFacts | None:
    config = folder.read_json("config.json")
    if config is None or config.get("model_type") != "omnivoice":
        return None
    parts = ("model.safetensors", _OMNIVOICE_CODEC, "tokenizer.json")
    lacking = next((part for part in parts if folder.read_start(part, 1) is None), None)
    problem = _lacks(lacking) if lacking else _first_problem(folder, [parts[0], _OMNIVOICE_CODEC])
    return ModelFacts(speakers=(), sample_rate=24_000, problem=problem, instructed=_omnivoice_speaker)


def _omnivoice_speaker(instruction: str, language: str | None) -> Speaker | None:
    attributes = [part.strip().lower() for part in instruction.split(",")]
    if not _OMNIVOICE_ATTRIBUTES.issuperset(attributes):
        return None
    genders: tuple[Gender, ...] = ("female", "male")
    said = [gender for gender in genders if gender in attributes]
    gender = said[0] if len(said) == 1 else None
    of = f"{language}: " if language else ""
    slug = _slug(f"omnivoice {of} {instruction}")
    return Speaker(speaker=f"{of}{', '.join(attributes)}", slug=slug, gender=gender, language=language)


# eSpeak NG: config.json has the language, and each file in voices/ is a voice in eSpeak NG's format. Its parser, in C,
# never gets a file of a model folder, only lines that were checked here: known keys, numbers within bounds.
# Source of the keys: docs/voices.md of eSpeak NG 1.52.
_ESPEAK_TYPE, _ESPEAK_RATE = "espeak-ng", 22_050
VOICE_FILE_BYTES = 4096
# For each key: the fewest and the most numbers after it, and the lowest and the highest number.
_ESPEAK_NUMBERS = {
    "pitch": (2, 2, 30, 500),
    "formant": (2, 5, -500, 500),
    "tone": (2, 8, 0, 8000),
    "flutter": (1, 1, 0, 100),
    "roughness": (1, 1, 0, 7),
    "voicing": (1, 1, 0, 200),
    "consonants": (1, 2, 0, 200),
    "breath": (1, 8, 0, 200),
    "breathw": (1, 8, 0, 1000),
    "echo": (2, 2, 0, 250),
    "speed": (1, 1, 50, 200),
    "stressAdd": (1, 8, -200, 200),
    "stressAmp": (1, 8, 0, 60),
}
_ESPEAK_NUMBER = re.compile(r"-?[0-9]{1,5}")


def _read_espeak(folder: ModelFolder) -> ModelFacts | None:
    config = folder.read_json("config.json")
    if config is None or config.get("model_type") != _ESPEAK_TYPE:
        return None
    licence, language = config.get("license"), language_code(config.get("language"))
    return ModelFacts(
        speakers=tuple(_espeak_speaker(folder, stem, language) for stem in folder.names("voices")[:MAX_SPEAKERS]),
        sample_rate=_ESPEAK_RATE,
        licence=licence if isinstance(licence, str) else None,
    )


def _espeak_speaker(folder: ModelFolder, stem: str, language: str | None) -> Speaker:
    try:
        content = folder.read(f"voices/{stem}", limit_bytes=VOICE_FILE_BYTES) or b""
        found = read_voice_file(content.decode("utf-8", "replace"))
    except MetadataError as error:
        return Speaker(speaker=stem, slug=_slug(stem), language=language, problem=f"voices/{shown(stem)}: {error}")
    return Speaker(speaker=stem, slug=_slug(stem), name=found.name, gender=found.gender, language=language)


@dataclass(frozen=True, slots=True)
class VoiceFile:
    """What a voice file says. `sound`: the lines that make its sound, checked."""

    name: str | None
    gender: Gender | None
    sound: tuple[str, ...]


def read_voice_file(text: str) -> VoiceFile:
    """Read a voice file; `//` begins a comment. Raises `MetadataError` with the line."""
    said: dict[str, str] = {}
    sound: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        key, _, value = " ".join(line.partition("//")[0].split()).partition(" ")
        if key in {"name", "gender", "language"} and value:
            said.setdefault(key, value)
        elif key in _ESPEAK_NUMBERS:
            sound.append(f"{key} {_espeak_numbers(key, value, number)}")
        elif key:
            known = ", ".join(("name", "language", "gender", *_ESPEAK_NUMBERS))
            raise MetadataError(f"line {number}: the key {shown(key)} is not read here; {known} are")
    gender = said.get("gender", "").partition(" ")[0]  # an age may follow
    return VoiceFile(
        name=said.get("name"),
        gender=cast("Gender", gender) if gender in get_args(Gender) else None,
        sound=tuple(sound),
    )


def _espeak_numbers(key: str, value: str, line: int) -> str:
    few, many, low, high = _ESPEAK_NUMBERS[key]
    words = value.split()
    good = few <= len(words) <= many and all(
        _ESPEAK_NUMBER.fullmatch(word) and low <= int(word) <= high for word in words
    )
    if not good:
        count = few if few == many else f"{few} to {many}"
        raise MetadataError(f"line {line}: {key} takes {count} whole numbers from {low} to {high}")
    return value


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models. It speaks with the packages `runtimes`; `install` is the command that installs them."""

    name: str
    wanted: str
    """What its folders have, for people."""
    runtimes: tuple[str, ...]
    install: str
    read: Callable[[ModelFolder], ModelFacts | None]
    """Returns what a model says, None if it is of another family. Raises `MetadataError`."""
    quality: Quality = "neural"

    @property
    def installed(self) -> bool:
        return all(map(is_installed, self.runtimes))


_KOKORO_FILES = "kokoro-v1_0.safetensors with voices/af_heart.safetensors and the like"
_ESPEAK_FILES = f"config.json with `model_type: {_ESPEAK_TYPE}`, and voices/"
_ESPEAK_INSTALL, _VITS_INSTALL = "./scripts/setup --espeak", "pip install transformers"
FAMILIES = (
    Family("kokoro", _KOKORO_FILES, ("transformers", "espeakng_loader"), _ESPEAK_INSTALL, _read_kokoro),
    Family("piper", "X.onnx with X.onnx.json", ("piper", "onnxruntime"), "pip install piper-tts", _read_piper),
    Family("vits", "config.json with `model_type: vits`", ("transformers",), _VITS_INSTALL, _read_vits),
    Family("omnivoice", "config.json with `model_type: omnivoice`", ("transformers",), _VITS_INSTALL, _read_omnivoice),
    Family("espeak", _ESPEAK_FILES, ("espeakng_loader",), _ESPEAK_INSTALL, _read_espeak, "formant"),
)
