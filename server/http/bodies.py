"""Reads request bodies, capped while they arrive: strict JSON, and forms (`multipart/form-data`), kept in memory."""

import asyncio
import logging
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.auth.access import RequiresScope
from server.errors import ApiError, overloaded
from server.http.disconnect import ClientDisconnectedError, cut_off_as_error
from server.http.protocol import header_of

_MOST_PARTS = 100_000  # objects and arrays of JSON: checking them takes half a second
_MOST_KEYS = 400_000  # of objects: parsing them takes half a second
_MAX_DEPTH = 64
_LARGE_BODY_BYTES = 256 * 2**10  # parsed beside the event loop
BODY_PAUSE_SECONDS = 30.0  # without a byte; then the client counts as gone
_BODY_SECONDS = 300.0  # for all of it
_PARSED_AT_A_TIME = 2  # of large bodies
_INT64 = range(-(2**63), 2**63)
_PLACE = re.compile(r" at line \d+ column \d+$")  # of the parser's message
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
# A client that is cut off while it still sends never reads the answer: read and drop this much of its body.
DRAIN_BYTES = 64 * 2**20
LONGEST_NAME = 64  # of a field, in an error: the client chose it
_MOST_FORM_PARTS = 64
_LONGEST_BOUNDARY_BYTES = 200
_HELD = "hearth.held"  # in a request's scope: a function that counts bytes of its body
GIVE_BACK = "hearth.give_back"  # likewise: a function that stops counting the body
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it would log what a client has sent

Form = list[tuple[str, bytes]]
"""Names and contents of the parts, in their order. Files are parts like others."""


class StrictRoute(APIRoute):
    """A route whose body, if it has one, is strict JSON. Use as `route_class` of a router."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Check the key's scope, then read and check the body, before FastAPI looks at it."""
        handler = super().get_route_handler()

        async def strict_handler(request: Request) -> Response:
            _check_scope(self, request)
            _check_content_type(request.scope)
            held = request.scope[_HELD]
            body = await read_body(request, held)
            request.scope[GIVE_BACK] = partial(held, -len(body))
            # Where Starlette keeps what it has read: FastAPI finds both and does not parse again.
            request._body = body  # noqa: SLF001
            if len(body) <= _LARGE_BODY_BYTES:
                request._json = parse_strict_json(body)  # noqa: SLF001
            else:
                async with request.app.state.bodies.parsing:
                    request._json = await asyncio.to_thread(parse_strict_json, body)  # noqa: SLF001
            response = await handler(request)
            request._body, request._json = b"", None  # noqa: SLF001  # free it: a stream lasts for minutes
            return response

        return handler if self.body_field is None else strict_handler

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the body until a stream has begun, or the answer is complete: until then it is in memory."""
        if self.body_field is None:
            await super().handle(scope, receive, send)
            return
        with scope["app"].state.bodies.held_for(scope["state"]["record"].key) as scope[_HELD]:
            await super().handle(scope, receive, send)


def _check_scope(route: APIRoute, request: Request) -> None:
    """Raise `ApiError` 403 if the key lacks a scope that the route requires."""
    for below in route.dependant.dependencies:
        if isinstance(below.call, RequiresScope):
            below.call.check(request)


class Bodies:
    """The bodies in memory, of all requests together. Belongs to one event loop.

    Beyond `most_bytes`, bodies of keys with more than an equal share are refused.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes: Counter[str | None] = Counter()
        # Parsing holds the GIL: more at a time would leave little of it to the event loop.
        self.parsing = asyncio.Semaphore(_PARSED_AT_A_TIME)

    @contextmanager
    def held_for(self, owner: str | None) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes of a body until the block ends. It raises `ApiError` 503 at the limit."""
        held = 0

        def add(size: int) -> None:
            nonlocal held
            held += size
            self._bytes[owner] += size
            if not self._bytes[owner]:
                del self._bytes[owner]
            elif size > 0 and self._bytes.total() > self._most_bytes < self._bytes[owner] * len(self._bytes):
                sentence = "Too many large request bodies are in memory here. Send fewer at the same time."
                raise overloaded(sentence, limit="bodies_in_memory")

        try:
            yield add
        finally:
            add(-held)


def _check_content_type(scope: Scope) -> None:
    codings = (header_of(scope, b"content-encoding"), header_of(scope, b"transfer-encoding"))
    if codings[0] not in {None, "identity"} or (codings[1] or "chunked").strip().lower() != "chunked":
        raise ApiError(415, "unsupported_media_type", "Compressed bodies are not accepted. Send the JSON as it is.")
    given = header_of(scope, b"content-type")
    content_type = "application/json" if given is None else given.partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        sentence = "The body must be JSON. Send the header `Content-Type: application/json`."
        raise ApiError(415, "unsupported_media_type", sentence)


async def receive_body(request: Request, seconds: float, *, paused: str, late: str) -> AsyncIterator[bytes]:
    """Yield the body as it comes.

    Raises `ApiError` 408 with the text `paused` if nothing comes for `BODY_PAUSE_SECONDS`, and with `late` if the end
    has not come within `seconds`. Raises `ClientDisconnectedError`.
    """
    more = True
    now = asyncio.get_running_loop().time
    deadline = now() + seconds
    while more:
        try:
            async with asyncio.timeout_at(min(now() + BODY_PAUSE_SECONDS, deadline)):
                message = await request.receive()
        except TimeoutError as error:
            sentence = late if now() >= deadline else paused
            raise ApiError(408, "request_timeout", sentence, headers={"Connection": "close"}) from error
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def read_body(request: Request, held: Callable[[int], None], *, seconds: float = _BODY_SECONDS) -> bytes:
    """Return the body. Raises `ApiError` if it is too large, takes too long, or a drain cuts it off."""
    limit = request.app.state.settings.max_body_bytes
    declared = int(header_of(request.scope, b"content-length") or 0)  # the parser has checked its digits
    if declared > limit:  # uvicorn drops the body, so that the client reads the answer
        raise _too_large(limit, close=declared > limit + DRAIN_BYTES)
    chunks: list[bytes] = []
    size = 0
    paused = f"No byte of the body came for {BODY_PAUSE_SECONDS:.0f} s. Send the request again."
    late = f"The body did not arrive within {seconds:.0f} s. Send less at once."
    with cut_off_as_error(request.app.state.drain):
        async for chunk in receive_body(request, seconds, paused=paused, late=late):
            size += len(chunk)
            if size <= limit:
                held(len(chunk))
                chunks.append(chunk)
            elif size > limit + DRAIN_BYTES:
                break
    if size > limit:
        raise _too_large(limit, close=True)
    return b"".join(chunks)


def _too_large(limit: int, *, close: bool) -> ApiError:
    sentence = f"The body is larger than the limit of {limit} bytes ({limit / 2**20:.0f} MiB)."
    advice = "Send less at once, or ask your administrator to raise HEARTH_MAX_BODY_BYTES."
    return ApiError(413, "request_too_large", f"{sentence} {advice}", headers={"Connection": "close"} if close else {})


def parse_strict_json(body: bytes) -> Any:
    """Parse UTF-8 JSON. Raises `ApiError` 400 for anything else.

    Refused beyond the grammar: NaN and infinities (also 1e999), lone surrogates, a byte order mark, more than
    64 levels, integers beyond int64.
    """
    parts = body.count(b"[") + body.count(b"{")  # base64 has none of these
    # More would block the event loop for seconds. Colons in texts count as keys.
    if parts > _MOST_PARTS or body.count(b":") > _MOST_KEYS:
        head = body.lstrip()[:_LARGE_BODY_BYTES]
        opened = head[: max(head.rfind(b"["), head.rfind(b"{")) + 1]
        _parsed(opened or head, partial=True)  # nested too deep, or no JSON
        most = f"{_MOST_PARTS:,} objects and arrays" if parts > _MOST_PARTS else f"{_MOST_KEYS:,} keys or colons"
        sentence = f"The body has more than {most}. Send less at once, in several requests."
        raise ApiError(413, "request_too_large", sentence)
    value = _parsed(body)
    if parts > _MAX_DEPTH or _may_hold_big_numbers(body):
        _check_values(value)
    return value


def _parsed(body: bytes, *, partial: bool = False) -> Any:
    """Parse JSON, or its beginning. Raises `ApiError`."""
    try:
        return from_json(body, allow_inf_nan=False, allow_partial="trailing-strings" if partial else "off")
    except ValueError as error:
        if not body.strip():
            raise _invalid("The body is empty. Send a JSON object.") from error
        place = found[0] if (found := _PLACE.search(str(error))) else ""
        raise _invalid(
            f"The body is not valid JSON in UTF-8{place}. NaN, infinities, lone surrogates, byte order marks are not"
            " allowed."
        ) from error


def _may_hold_big_numbers(body: bytes) -> bool:
    """Whether there are 19 digits in a row, or three in an exponent. A regular expression takes ten times as long."""
    shape = body.translate(_DIGITS, b"+")
    return b"0" * 19 in shape or b"e000" in shape


def _check_values(value: Any) -> None:
    """Raise `ApiError` 400 for deep nesting or large numbers. Walks level by level, without recursion."""
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        for item in level:
            if isinstance(item, (dict, list)):
                if depth == _MAX_DEPTH:
                    raise _invalid(f"The body is nested more than {_MAX_DEPTH} levels deep.")
                below.extend(item.values() if isinstance(item, dict) else item)
            elif isinstance(item, float) and math.isinf(item):
                raise _invalid("The body has a number that is too large.")
            elif isinstance(item, int) and item not in _INT64:
                raise _invalid("The body has an integer beyond 64 bits.")
        level, depth = below, depth + 1


def _invalid(message: str) -> ApiError:
    return ApiError(400, "invalid_json", message)


class FormRoute(APIRoute):
    """A route whose body is a form, given to it in `request.state.form`. Use as `route_class` of a router."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key's scope, read the body, and count it until the answer is complete.

        A wrong method is refused first, like on all routes.
        """
        if scope["method"] not in self.methods:
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive)
        _check_scope(self, request)
        boundary = boundary_of(scope)
        bodies: Bodies = request.app.state.bodies
        with bodies.held_for(request.state.record.key) as held:
            body = await read_body(request, held)
            request.state.form = await asyncio.to_thread(parse_form, body, boundary)
            del body
            await super().handle(scope, receive, send)


def boundary_of(scope: Scope) -> bytes:
    """Return the boundary of the parts. Raises `ApiError` 415 for a body that is not a form."""
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
    form, reader.form = reader.form, []  # the reader and its parser form a cycle, which is freed later
    return form


def field_text(name: str, data: bytes | bytearray, most_bytes: int) -> str:
    """Return a form field as text. Raises `ApiError` 400 if it is longer than `most_bytes`, or not UTF-8."""
    param = name[:LONGEST_NAME]
    if len(data) > most_bytes:
        raise ApiError(400, "invalid_value", f"A field of the form is longer than {most_bytes} bytes.", param=param)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ApiError(400, "invalid_value", "A field of the form is not UTF-8.", param=param) from None


class FormReader(ABC):
    """Parses a form as it arrives, of at most `most_parts` parts. Subclasses take the parts."""

    most_parts = _MOST_FORM_PARTS

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
        if self._delimiters > self.most_parts + 1:  # the parser is slow on delimiters that end no part
            raise self._too_many()
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _no_form() from error

    def check_end(self) -> None:
        """Raise `ApiError` 400 unless the form is complete."""
        if not self._ended:
            raise _no_form()

    @abstractmethod
    def begin_part(self, name: str, filename: bytes | None) -> None:
        """A part begins; `filename` is None if it is not a file."""

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
