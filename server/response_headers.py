"""What every answer tells a browser, should one show it: to guess nothing, run nothing, and pass nothing on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.datastructures import MutableHeaders

# Not among them: Cross-Origin-Resource-Policy (a chat page elsewhere shows our images by their links) and
# Strict-Transport-Security (it would bind other services on the same host; whoever owns the name decides).
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",  # a link to an image is as good as the image
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


def add_security_headers(headers: MutableHeaders) -> None:
    """Add what the route has not decided for itself."""
    for name, value in SECURITY_HEADERS.items():
        headers.setdefault(name, value)
