"""Whether a model can do what a request asks for. Pure: the entry in models.yaml against the request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import RequestError, UnsupportedCapabilityError

if TYPE_CHECKING:
    from engine.config import ModelSpec
    from engine.types import ChatRequest


def check_request(spec: ModelSpec, request: ChatRequest) -> None:
    """Raise `UnsupportedCapabilityError`, naming the field, or `RequestError` for a limit of the model."""
    if "chat" not in spec.capabilities:
        raise UnsupportedCapabilityError("This model does not chat.", param="model")
    if request.tools and "function_calling" not in spec.capabilities:
        raise UnsupportedCapabilityError(
            "This model cannot call tools. Pick a model with the capability `function_calling`.",
            param="tools",
        )
    if "vision" not in spec.capabilities and (part := _first_image(request)) is not None:
        raise UnsupportedCapabilityError(
            "This model cannot see images. Pick a model with the capability `vision`.", param=part
        )
    most = spec.engine.max_output_tokens
    if most is not None and request.max_tokens is not None and request.max_tokens > most:
        raise RequestError(f"`max_tokens` is at most {most} for this model.", param="max_tokens")


def _first_image(request: ChatRequest) -> str | None:
    for position, message in enumerate(request.messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for index, part in enumerate(content):
            if part.get("type") == "image_url":
                return f"messages[{position}].content[{index}]"
    return None
