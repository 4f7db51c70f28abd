"""Reads bodies that are forms, `multipart/form-data`: capped while they arrive like JSON, and kept in memory."""

import asyncio
import logging
from abc import ABC, abstractmethod

from fastapi.routing import APIRoute
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from server.errors import ApiError
from server.http.protocol import header_of
from server.http.routing import Bodies, check_scope, read_body

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it would say what a client has sent
LONGEST_NAME = 64  # of a field, in an error: the client chose it
_MOST_PARTS = 64
_LONGEST_BOUNDARY_BYTES = 200

Form = list[tuple[str, bytes]]
"""Names and contents of the parts, in their order. Files are parts like others."""


class FormRoute(APIRoute):
    """A route whose body is a form, given to it in `request.state.form`. Use as `route_class` of a router."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key's scope, read the body, and count it until the answer is complete: what waits keeps its files.

        A wrong method is refused as everywhere.
        """
        if scope["method"] not in self.methods:
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive)
        check_scope(self, request)
        boundary = boundary_of(scope)
        bodies: Bodies = request.app.state.bodies
        with bodies.held_for(request.state.record.key) as held:
            body = await read_body(request, held)
            request.state.form = await asyncio.to_thread(parse_form, body, boundary)
            del body
            await super().handle(scope, receive, send)


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
    reader = _WholeForm(boundary)
    reader.feed(body)
    reader.check_end()
    form, reader.form = reader.form, []  # the reader and its parser refer to each other: it may live on for a while
    return form


class FormReader(ABC):
    """Reads a form as it comes; subclasses say what becomes of its parts, of which it has at most `most_parts`."""

    most_parts = _MOST_PARTS

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._delimiters = self._parts = 0
        self._ended = False
        self._headers: dict[bytes, bytes] = {}
        self._header = self._value = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": lambda data, start, end: self.take(data[start:end]),
                "on_part_end": self.end_part,
                "on_end": self._on_end,
            },
        )

    def feed(self, piece: bytes) -> None:
        """Parse what comes next. Raises `ApiError` 400, and what the methods below do."""
        self._delimiters += piece.count(self._delimiter)
        if self._delimiters > self.most_parts + 1:  # where none ends a part, the parser goes on byte by byte
            raise self._too_many()
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _no_form() from error

    def check_end(self) -> None:
        """Raise `ApiError` 400 unless all of it has come."""
        if not self._ended:
            raise _no_form()

    @abstractmethod
    def begin_part(self, name: str, filename: bytes | None) -> None:
        """A part begins; `filename` is None for one that is no file."""

    @abstractmethod
    def take(self, data: bytes) -> None:
        """Take more of the part."""

    @abstractmethod
    def end_part(self) -> None:
        """The part is complete."""

    def _on_part_begin(self) -> None:
        self._headers, self._header, self._value = {}, b"", b""
        self._parts += 1
        if self._parts > self.most_parts:
            raise self._too_many()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self.begin_part(options.get(b"name", b"").decode("utf-8", "replace"), options.get(b"filename"))

    def _on_end(self) -> None:
        self._ended = True

    def _too_many(self) -> ApiError:
        return ApiError(400, "invalid_value", f"The form has more than {self.most_parts} parts.")


class _WholeForm(FormReader):
    def __init__(self, boundary: bytes) -> None:
        super().__init__(boundary)
        self.form: Form = []
        self._name = ""
        self._pieces: list[bytes] = []

    def begin_part(self, name: str, filename: bytes | None) -> None:  # noqa: ARG002  # files are parts like others
        self._name, self._pieces = name, []

    def take(self, data: bytes) -> None:
        self._pieces.append(data)

    def end_part(self) -> None:
        self.form.append((self._name, b"".join(self._pieces)))


def _no_form() -> ApiError:
    return ApiError(400, "invalid_value", "The body is not a complete `multipart/form-data`. Send it again.")
