"""uvicorn's HTTP protocol, except that what is not HTTP at all is refused in our error shape as well."""

from __future__ import annotations

import secrets

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import ApiError


class JsonErrorProtocol(HttpToolsProtocol):
    """Used for every connection."""

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # uvicorn's text is not ours
        """Answer bytes that cannot be parsed as HTTP, then close."""
        response = ApiError(400, "invalid_http", "This is not a valid HTTP request.", headers=_headers()).response()
        head = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + bytes(response.body))
        self.transport.close()


def _headers() -> dict[str, str]:
    return {"Connection": "close", "x-request-id": f"req_{secrets.token_hex(12)}"}
