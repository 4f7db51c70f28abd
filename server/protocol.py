"""uvicorn's HTTP protocol, except that what is not HTTP at all is refused in our error shape as well."""

from __future__ import annotations

import secrets
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import ApiError

_MAX_HEAD_BYTES = 64 * 2**10


class JsonErrorProtocol(HttpToolsProtocol):
    """Used for every connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts = 0  # that are complete: a head, its body, the next head, ...
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Read on, but not for ever: httptools would keep a header of any length in memory, before any key is seen."""
        before = self._parts
        super().data_received(data)
        if self._parts != before or before % 2:
            return  # not all of `data` belongs to a head
        self._head_bytes += len(data)
        if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, "headers_too_large", "Address and headers are larger than 64 KiB. Send less."))

    def on_headers_complete(self) -> None:
        """Note that the body follows."""
        super().on_headers_complete()
        self._parts += 1

    def on_message_complete(self) -> None:
        """Note that the next request may follow."""
        super().on_message_complete()
        self._parts += 1
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # uvicorn's text is not ours
        """Answer bytes that cannot be parsed as HTTP, then close."""
        self._refuse(ApiError(400, "invalid_http", "This is not a valid HTTP request."))

    def _refuse(self, error: ApiError) -> None:
        error.headers.update(_headers())
        response = error.response()
        head = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
        phrase = HTTPStatus(error.status).phrase.encode()
        self.transport.write(b"HTTP/1.1 %d %b\r\n" % (error.status, phrase) + head + b"\r\n" + bytes(response.body))
        self.transport.close()


def _headers() -> dict[str, str]:
    return {"Connection": "close", "x-request-id": f"req_{secrets.token_hex(12)}"}
