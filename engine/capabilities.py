"""Whether a model can do what a request asks for. Pure: the entry in models.yaml against the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from engine.config import ChatModelSpec, ImageModelSpec, SpeechModelSpec
from engine.errors import RequestError, UnsupportedCapabilityError
from engine.media.images import image_path, image_places

if TYPE_CHECKING:
    from engine.config import ModelSpec
    from engine.types import ChatRequest, TextRequest

_Spec = TypeVar("_Spec", ChatModelSpec, ImageModelSpec, SpeechModelSpec)
_LACKS: dict[type, tuple[str, str]] = {
    ChatModelSpec: ("does not chat", "chat"),
    ImageModelSpec: ("makes no images", "image_generation"),
    SpeechModelSpec: ("does not speak", "speech"),
}


def of_kind(spec: ModelSpec | None, kind: type[_Spec]) -> _Spec:
    """Return the entry of a model that does this task. Raises `UnsupportedCapabilityError` for another one's."""
    if not isinstance(spec, kind):
        lacks, capability = _LACKS[kind]
        raise UnsupportedCapabilityError(
            f"This model {lacks}. Pick a model with the capability `{capability}`.", param="model"
        )
    return spec


def check_request(spec: ChatModelSpec, request: ChatRequest) -> None:
    """Raise `UnsupportedCapabilityError`, naming the field, or `RequestError` for a limit of the model."""
    if request.tools and "function_calling" not in spec.capabilities:
        raise UnsupportedCapabilityError(
            "This model cannot call tools. Pick a model with the capability `function_calling`.",
            param="tools",
        )
    if "vision" not in spec.capabilities and (places := image_places(request)):
        raise UnsupportedCapabilityError(
            "This model cannot see images. Pick a model with the capability `vision`.", param=image_path(*places[0])
        )
    _check_max_tokens(spec, request.max_tokens)


def check_text(spec: ChatModelSpec, request: TextRequest) -> None:
    """The same for plain texts."""
    _check_max_tokens(spec, request.max_tokens)


def _check_max_tokens(spec: ChatModelSpec, asked: int | None) -> None:
    most = spec.engine.max_output_tokens
    if most is not None and asked is not None and asked > most:
        raise RequestError(f"`max_tokens` is at most {most} for this model.", param="max_tokens")
