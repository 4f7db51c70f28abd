"""Reads one header of a request's ASGI scope, without an object around all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope


def header_of(scope: Scope, name: bytes) -> str | None:
    """Return the first header of this name, which is in lower case; None if there is none."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return None
