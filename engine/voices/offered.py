"""Which voices each speech model of models.yaml offers: its catalogue, the demo voices beside it, and its aliases."""

from __future__ import annotations

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
        for spec in self._specs.values():
            demos = [] if spec.demo is None else [demo.weights_dir(spec.demo)]
            try:
                read = read_catalogue([weights_dir / spec.weights], demos)
            except LoadError as error:
                known = None if before is None else before._catalogues.get(spec.id)  # noqa: SLF001  # its own kind
                if isinstance(known, Catalogue):
                    _log.error("%s: its voices stay as they were. %s", spec.id, error.message)
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

    def log_warnings(self) -> None:
        """Tell the operator."""
        for model in self._specs:
            for warning in self.warnings(model):
                _log.warning("%s: %s", model, warning.message)

    def problem(self, model: str) -> LoadError | None:
        """Why a speech model cannot be loaded, if so."""
        catalogue = self._catalogues.get(model)
        return catalogue if isinstance(catalogue, LoadError) else None

    def find(self, model: str, voice: str) -> Voice:
        """Return a voice by its id or alias. Raises `RequestError`."""
        name = self._specs[model].aliases.get(voice, voice)
        found = next((one for one in self.of(model) if one.id == name), None)
        if found is None:
            raise RequestError(
                "This model has no such voice. GET /v1/audio/voices lists the ones there are.", param="voice"
            )
        if not found.available:
            raise RequestError(
                "This voice cannot speak on this server: what runs its model is not installed. Choose another; GET "
                "/v1/audio/voices says which are `available`.",
                param="voice",
            )
        return found
