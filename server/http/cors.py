"""Lets web pages of named origins call us from a browser. Off unless a setting names some."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from server.errors import ApiError

_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
_PREFLIGHT_SECONDS = 600
# What a page may read of an answer besides its body: the request's id, and when to come again.
EXPOSED_HEADERS = (
    "x-request-id",
    "Retry-After",
    "x-should-retry",
    *(f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
)


class Cors(CORSMiddleware):
    """Answers a browser's preflight before any key is asked for: browsers send none with it.

    Keys come in headers and never in cookies, so credentials in the browser's sense are not allowed: a page has
    no more rights than the key that its user gave it.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=("*",),  # client libraries send a dozen of their own
            allow_private_network=True,  # a page from elsewhere to this house: its origin has been named
            expose_headers=EXPOSED_HEADERS,
            max_age=_PREFLIGHT_SECONDS,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the answer to a preflight: in our error shape where it is no."""
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        origin_is_named = self.is_allowed_origin(request_headers["origin"])
        sentence = (
            "This method may not be used from a web page."
            if origin_is_named
            else "Web pages of this origin may not call this server. Whoever runs it can add the origin to the "
            "setting HEARTH_CORS_ORIGINS."
        )
        refusal = ApiError(403, "origin_not_allowed", sentence, type="permission_error").response()
        refusal.headers["vary"] = answer.headers["vary"]
        return refusal
