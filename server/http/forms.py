"""Reads bodies that are forms, `multipart/form-data`: capped while they arrive like JSON, and kept in memory."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError
from server.http.protocol import header_of
from server.http.routing import Bodies, check_scope, read_body

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it would say what a client has sent
LONGEST_NAME = 64  # of a field, in an error: the client chose it
_MOST_PARTS = 64
_LONGEST_HEAD_BYTES = 16 * 2**10  # of one part
_LONGEST_BOUNDARY_BYTES = 200

Form = list[tuple[str, bytes]]
"""Names and contents of the parts, in their order. Files are parts like others."""


class FormRoute(APIRoute):
    """A route whose body is a form, given to it in `request.state.form`. Use as `route_class` of a router."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the body until the answer is complete: what waits for its turn keeps its files."""
        request = Request(scope)
        bodies: Bodies = request.app.state.bodies
        with bodies.held_for(request.state.record.key) as request.state.held:
            await super().handle(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Check the key's scope, then read the body, before FastAPI looks at the rest."""
        handler = super().get_route_handler()

        async def form_handler(request: Request) -> Response:
            check_scope(self, request)
            boundary = boundary_of(request.scope)
            body = await read_body(request, request.state.held)
            request.state.form = await asyncio.to_thread(parse_form, body, boundary)
            del body
            return await handler(request)

        return form_handler


async def form_of(request: Request) -> Form:
    """Give a route the form that has come."""
    form: Form = request.state.form
    return form


def boundary_of(scope: Scope) -> bytes:
    """Return what separates the parts. Raises `ApiError` for a body that is no form."""
    kind, options = parse_options_header(header_of(scope, b"content-type"))
    if header_of(scope, b"content-encoding") not in {None, "identity"}:
        raise ApiError(415, "unsupported_media_type", "Compressed bodies are not accepted. Send the form as it is.")
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= _LONGEST_BOUNDARY_BYTES:
        sentence = "The body must be a form. Send it as `multipart/form-data`, with its boundary in `Content-Type`."
        raise ApiError(415, "unsupported_media_type", sentence)
    return boundary


def parse_form(body: bytes, boundary: bytes) -> Form:
    """Return the parts of a whole body. Raises `ApiError` 400 for one that is cut off, or has too many."""
    parts = _Parts()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": parts.begin,
            "on_header_field": parts.header_name,
            "on_header_value": parts.header_value,
            "on_header_end": parts.header_end,
            "on_headers_finished": parts.headers_end,
            "on_part_data": parts.data,
            "on_part_end": parts.part_end,
            "on_end": parts.end,
        },
    )
    if body.count(b"\r\n--" + boundary) > _MOST_PARTS + 1:  # where none ends, the parser goes on byte by byte
        raise too_many(_MOST_PARTS, "parts")
    try:
        parser.write(body)
    except FormParserError as error:
        raise no_form() from error
    if not parts.ended:
        raise no_form()
    return parts.form


def no_form() -> ApiError:
    return ApiError(400, "invalid_value", "The body is not a complete `multipart/form-data`. Send it again.")


def too_many(most: int, parts: str) -> ApiError:
    return ApiError(400, "invalid_value", f"The form has more than {most} {parts}.")


class _Parts:
    """The parser's callbacks."""

    def __init__(self) -> None:
        self.form: Form = []
        self.ended = False
        self._headers: dict[bytes, bytes] = {}
        self._header = self._value = b""
        self._head_bytes = 0
        self._name = ""
        self._pieces: list[bytes] = []

    def begin(self) -> None:
        self._headers, self._header, self._value, self._head_bytes = {}, b"", b"", 0
        self._name, self._pieces = "", []
        if len(self.form) == _MOST_PARTS:
            raise too_many(_MOST_PARTS, "parts")

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += self._of_head(data, start, end)

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._of_head(data, start, end)

    def _of_head(self, data: bytes, start: int, end: int) -> bytes:
        self._head_bytes += end - start
        if self._head_bytes > _LONGEST_HEAD_BYTES:
            raise no_form()
        return data[start:end]

    def header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")

    def data(self, data: bytes, start: int, end: int) -> None:
        self._pieces.append(data[start:end])

    def part_end(self) -> None:
        self.form.append((self._name, b"".join(self._pieces)))

    def end(self) -> None:
        self.ended = True
