"""What a folder of a Whisper-shaped model says about the sound that it takes and the tokens that it writes."""

from dataclasses import dataclass
from pathlib import Path

from engine.config.yaml import shown
from engine.errors import LoadError
from engine.weights.safety import check_chat_folder, read_object, saved_in

# Newer folders have the second, in which the first is a part.
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
_LONGEST_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class WhisperFolder:
    """`piece_seconds`: the longest sound that it hears at once. `suppressed`: tokens that it shall never write."""

    piece_seconds: float
    saved_in: str | None
    multilingual: bool
    suppressed: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> "WhisperFolder":
        """Read a folder that is safe to load. Raises `LoadError`, naming a file."""
        check_chat_folder(folder)
        config = read_object(folder / "config.json")
        if config.get("model_type") != "whisper":
            raise LoadError(
                f"{folder.name}/config.json has the model_type {shown(str(config.get('model_type')))}: only Whisper is "
                "served for transcription. Use another model, or name the `task` of this one in models.yaml."
            )
        said = read_object(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
        suppressed = said.get("suppress_tokens", config.get("suppress_tokens"))
        tokens = suppressed if isinstance(suppressed, list) else []
        return cls(
            _piece_seconds(folder),
            saved_in(config),
            said.get("is_multilingual") is not False,
            tuple(token for token in tokens if type(token) is int and token >= 0),
        )


def _piece_seconds(folder: Path) -> float:
    for name in _PREPROCESSORS:
        if (folder / name).exists():
            content = read_object(folder / name)
            content = content.get("feature_extractor", content)
            seconds = content.get("chunk_length", _LONGEST_SECONDS) if isinstance(content, dict) else None
            if not isinstance(seconds, int | float) or not 1 <= seconds <= _LONGEST_SECONDS:
                raise LoadError(f"{folder.name}/{name}: `chunk_length` must be from 1 to {_LONGEST_SECONDS:g} seconds.")
            return float(seconds)
    raise LoadError(f"{folder.name} has no {_PREPROCESSORS[0]}: not a complete model folder. Finish the download.")
