"""Which voices each speech model of models.yaml offers: its catalogue, the demo voices beside it, and its aliases."""

from __future__ import annotations

import difflib
import logging
from typing import TYPE_CHECKING

from engine import demo
from engine.config import SpeechModelSpec
from engine.errors import LoadError, RequestError
from engine.voices.catalogue import Catalogue, read_catalogue

if TYPE_CHECKING:
    from pathlib import Path

    from engine.config import Config
    from engine.voices.types import Voice, VoiceWarning

_log = logging.getLogger("hearth.voices")


class Voices:
    """Read when it is made, which blocks: a reload makes a new one from the one `before`."""

    def __init__(self, config: Config, weights_dir: Path, before: Voices | None = None) -> None:
        self._specs = {spec.id: spec for spec in config.models.values() if isinstance(spec, SpeechModelSpec)}
        self._catalogues: dict[str, Catalogue | LoadError] = {}
        self._kept: dict[str, str] = {}
        for spec in self._specs.values():
            demos = [] if spec.demo is None else [demo.weights_dir(spec.demo)]
            try:
                read = read_catalogue([weights_dir / spec.weights], demos)
            except LoadError as error:
                known = None if before is None else before._catalogues.get(spec.id)  # noqa: SLF001  # its own kind
                if isinstance(known, Catalogue):
                    self._kept[spec.id] = f"its voices stay as they were. {error.message}"
                    _log.error("%s: %s", spec.id, self._kept[spec.id])
                self._catalogues[spec.id] = known if isinstance(known, Catalogue) else error
                continue
            self._catalogues[spec.id] = read

    def of(self, model: str) -> tuple[Voice, ...]:
        """The voices of a speech model; none of other models."""
        catalogue = self._catalogues.get(model)
        return catalogue.voices if isinstance(catalogue, Catalogue) else ()

    def warnings(self, model: str) -> tuple[VoiceWarning, ...]:
        """Why voices of a speech model are hidden or cannot speak."""
        catalogue = self._catalogues.get(model)
        return catalogue.warnings if isinstance(catalogue, Catalogue) else ()

    def only_demos(self, model: str) -> bool:
        """Whether a speech model has voices, and all of them are for trying out."""
        voices = self.of(model)
        return bool(voices) and all(voice.demo for voice in voices)

    def told(self, model: str) -> tuple[str, ...]:
        """All that the operator should know of a speech model's voices: the warnings, and what is wrong with all."""
        problem = self.problem(model)
        whole = [self._kept[model]] if model in self._kept else [] if problem is None else [problem.message]
        return (*whole, *(warning.message for warning in self.warnings(model)))

    def log_warnings(self) -> None:
        """Tell the operator."""
        for model in self._specs:
            for warning in self.warnings(model):
                _log.warning("%s: %s", model, warning.message)

    def problem(self, model: str) -> LoadError | None:
        """Why a speech model cannot be loaded, if so."""
        catalogue = self._catalogues.get(model)
        return catalogue if isinstance(catalogue, LoadError) else None

    def near(self, model: str, voice: str) -> list[str]:
        """Up to three ids and aliases that look like this one, of voices that can speak."""
        ids = [one.id for one in self.of(model) if one.available]
        aliases = [name for name, of in self._specs[model].aliases.items() if of in ids]
        return difflib.get_close_matches(voice.lower()[:64], [*ids, *aliases], n=3)

    def find(self, model: str, voice: str) -> Voice:
        """Return a voice by its id or alias. Raises `RequestError`."""
        name = self._specs[model].aliases.get(voice, voice)
        found = next((one for one in self.of(model) if one.id == name), None)
        if found is None:
            near = self.near(model, voice)
            meant = f" Did you mean {' or '.join(f'`{one}`' for one in near)}?" if near else ""
            sentence = f"This model has no such voice.{meant} GET /v1/audio/voices lists the ones there are."
            raise RequestError(sentence, param="voice")
        if not found.available:
            raise RequestError(
                "This voice cannot speak on this server: what runs its model is not installed. Choose another; GET "
                "/v1/audio/voices says which are `available`.",
                param="voice",
            )
        return found
