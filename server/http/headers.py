"""What every answer says beyond its route: its own headers, and for a browser, should one show it, what not to do.

Reads one header of a request's ASGI scope, without an object around all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Scope


# To guess nothing, run nothing, and pass nothing on. Not among them: Cross-Origin-Resource-Policy (a chat page
# elsewhere shows our images by their links) and Strict-Transport-Security (it would bind other services on the same
# host; whoever owns the name decides).
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",  # a link to an image is as good as the image
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
_SECURITY = tuple((name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items())


def add_headers(raw: list[tuple[bytes, bytes]], own: Mapping[str, str]) -> None:
    """Put `own`, by names in small letters, in place of what the route has said; add those above that nobody has."""
    said = {name for name, _ in raw}
    for name, value in own.items():
        key = name.encode()
        if key in said:
            MutableHeaders(raw=raw)[name] = value
        else:
            raw.append((key, value.encode("latin-1")))
            said.add(key)
    raw.extend(header for header in _SECURITY if header[0] not in said)


def header_of(scope: Scope, name: bytes) -> str | None:
    """Return the first header of this name, which is in lower case; None if there is none."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return None
