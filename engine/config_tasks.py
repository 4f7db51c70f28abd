"""The tasks a model may have. One is added here: its spec class joins the union."""

from __future__ import annotations

from typing import TypeAlias, get_args

from engine.config_images import ImageModelSpec
from engine.config_specs import ChatModelSpec
from engine.config_speech import SpeechModelSpec

ModelSpec: TypeAlias = ChatModelSpec | ImageModelSpec | SpeechModelSpec
SPEC_BY_TASK: dict[str, type[ModelSpec]] = {
    get_args(spec.model_fields["task"].annotation)[0]: spec for spec in get_args(ModelSpec)
}
