"""Reads an uploaded file, `multipart/form-data`, straight to the disk: a few MiB of it are in memory at a time.

Starlette's own way would spool it in the folder for temporary files, which in a container is memory.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from server.batches.folder import NO_SPACE, FileWriter, Folder
from server.errors import ApiError
from server.http.disconnect import cut_off_as_error
from server.http.forms import LONGEST_NAME, no_form, too_many
from server.http.protocol import header_of
from server.http.routing import BODY_PAUSE_SECONDS, receive_body

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it would say what a client has sent
_AT_A_TIME_BYTES = 2**20  # parsed and written in one go, beside the event loop
# Of all files together. At the speed of a local disk they would take a core, and others' answers twice as long.
_BYTES_PER_SECOND = 100e6
_CATCH_UP_SECONDS = 0.05  # what was waited for its bytes counts
_MOST_SECONDS = 4 * 3600.0
_MOST_FIELDS = 16
_MOST_FIELD_BYTES = 4096
_AROUND_BYTES = 64 * 2**10  # what may stand around a file: other fields, and the heads of all
# A client that is cut off while it still sends may never read the answer: take what is under way, within reason.
_DRAIN_BYTES = 64 * 2**20


@dataclass(slots=True)
class Upload:
    """What came: the fields, and the file's bytes in `writer`, which its owner commits or discards."""

    writer: FileWriter
    fields: dict[str, list[str]] = field(default_factory=dict)
    filename: str | None = None

    @property
    def last(self) -> dict[str, str]:
        """The fields, of those that came more than once the last."""
        return {name: values[-1] for name, values in self.fields.items()}


async def read_upload(
    request: Request, folder: Folder, *, most_bytes: int, left_bytes: int, setting: str, paced: bool = False
) -> Upload:
    """Read a body with one file in the field `file`, of at most `most_bytes`, which is `setting`'s value.

    The key may keep `left_bytes` more. `paced`: not faster than those of others allow.

    Raises `ApiError`, 413 for too large a file, 429 where the key has no room for it and 507 where the disk has none;
    nothing is left on the disk then.
    """
    boundary = _boundary(request)
    declared = int(header_of(request.scope, b"content-length") or 0) - _AROUND_BYTES
    refusal = _refusal(declared, most_bytes, left_bytes, setting)
    if refusal is None and not await folder.run(folder.has_room, max(declared, 0)):
        refusal = disk_full()
    if refusal is not None:  # what still comes uvicorn drops, within reason: the client reads the answer
        raise _closing(refusal, close=declared > _DRAIN_BYTES)
    upload = Upload(await folder.run(folder.writer_now))
    form = _Form(boundary, upload, min(most_bytes, left_bytes))
    try:
        with cut_off_as_error(request.app.state.drain):
            await _read(request, folder, form, paced=paced)
        form.check(_refusal(form.size, most_bytes, left_bytes, setting))
    except BaseException as error:
        _ = asyncio.get_running_loop().run_in_executor(None, upload.writer.discard_now)
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise disk_full() from error
        raise
    return upload


def disk_full() -> ApiError:
    sentence = "The file cannot be stored: the server's disk is full. Tell your administrator."
    return ApiError(507, "insufficient_storage", sentence, headers={"x-should-retry": "false"})


def key_full() -> ApiError:
    sentence = "The files of your key take as much as they may together. Delete some (DELETE /v1/files/{id})."
    return ApiError(429, "insufficient_quota", sentence, param="file", headers={"x-should-retry": "false"})


class _Pace:
    """Lets `_BYTES_PER_SECOND` through, whoever waits; a client that sends more is held up by TCP."""

    _free_at = 0.0

    async def wait(self, size: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now - _CATCH_UP_SECONDS) + size / _BYTES_PER_SECOND
        await asyncio.sleep(self._free_at - now)  # below 0: only lets others go first


_pace = _Pace()


async def _read(request: Request, folder: Folder, form: "_Form", *, paced: bool) -> None:
    """Read all of it; what comes after an error is dropped, so that the client reads the answer."""
    failure: Exception | None = None
    dropped = 0
    async for piece in _pieces(request):
        if failure is None and not form.full:
            try:
                await folder.run(form.take_now, piece)
                if paced:
                    await _pace.wait(len(piece))
            except (ApiError, OSError) as error:
                failure = error
        else:
            dropped += len(piece)
            if dropped > _DRAIN_BYTES:
                break
    if failure is not None:
        raise failure


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the body in pieces of about a MiB."""
    parts: list[bytes] = []
    size = 0
    paused = f"No byte of the file came for {BODY_PAUSE_SECONDS:.0f} s. Send it again."
    async for part in receive_body(request, _MOST_SECONDS, paused=paused, late=paused):
        parts.append(part)
        size += len(part)
        if size >= _AT_A_TIME_BYTES:
            piece, parts, size = b"".join(parts), [], 0
            yield piece
    if parts:
        yield b"".join(parts)


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(header_of(request.scope, b"content-type"))
    if header_of(request.scope, b"content-encoding") not in {None, "identity"}:
        raise ApiError(415, "unsupported_media_type", "Compressed bodies are not accepted. Send the file as it is.")
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 200:
        sentence = "Send the file as `multipart/form-data`, in the field `file`, with the other fields beside it."
        raise ApiError(415, "unsupported_media_type", sentence)
    return boundary


def _refusal(size: int, most_bytes: int, left_bytes: int, setting: str) -> ApiError | None:
    if size > most_bytes:
        sentence = f"The file is larger than the limit of {most_bytes} bytes ({most_bytes / 2**20:.0f} MiB)."
        advice = f"Send several smaller ones, or ask your administrator to raise {setting}."
        return ApiError(413, "request_too_large", f"{sentence} {advice}", param="file")
    return key_full() if size > left_bytes else None


def _closing(error: ApiError, *, close: bool) -> ApiError:
    if close:
        error.headers["Connection"] = "close"
    return error


class _Form:
    """The parser's callbacks. All of it runs on one thread at a time."""

    def __init__(self, boundary: bytes, upload: Upload, most_bytes: int) -> None:
        self._came = 0
        self._most_bytes = most_bytes
        self._upload = upload
        self._delimiter = b"\r\n--" + boundary
        self._delimiters = 0
        self._headers: dict[bytes, bytes] = {}
        self._header = self._value = b""
        self._name: str | None = None  # of the part that is being read; None: of one that nobody asked for
        self._is_file = False
        self._field = bytearray()
        self._parts = 0
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    @property
    def size(self) -> int:
        """Bytes of the file, or of the body without what may stand around it: whichever is more."""
        return max(self._upload.writer.bytes, self._came - _AROUND_BYTES)

    @property
    def full(self) -> bool:
        """Whether more has come than there may."""
        return self.size > self._most_bytes

    def take_now(self, piece: bytes) -> None:
        """Parse a piece, and write what of it is the file's. Raises `ApiError` and OSError."""
        self._came += len(piece)
        self._delimiters += piece.count(self._delimiter)
        if self._delimiters > _MOST_FIELDS + 1:  # where no part ends with one, the parser goes on byte by byte
            raise too_many(_MOST_FIELDS, "fields")
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise no_form() from error

    def check(self, refusal: ApiError | None) -> None:
        """Raise `ApiError` unless all of it has come, with a file that is not refused."""
        if refusal is not None:
            raise refusal
        if not self._ended:
            raise no_form()
        if self._upload.filename is None:
            raise ApiError(400, "missing_field", "`file` is missing.", param="file")
        if not self._upload.writer.bytes:
            raise ApiError(400, "invalid_value", "`file` is empty.", param="file")

    def _on_part_begin(self) -> None:
        self._headers, self._header, self._value, self._name = {}, b"", b"", None
        self._field.clear()
        self._parts += 1
        if self._parts > _MOST_FIELDS:
            raise too_many(_MOST_FIELDS, "fields")

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self._upload.filename is not None:
                raise ApiError(400, "invalid_value", "`file` must be one file.", param="file")
            self._upload.filename = _shown(options.get(b"filename", b""))
        elif b"filename" in options:
            self._name = None  # a file that nobody asked for

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            if not self.full:
                self._upload.writer.write_now(data[start:end])
        elif len(self._field) <= _MOST_FIELD_BYTES:
            self._field += data[start:end][: _MOST_FIELD_BYTES + 1]

    def _on_part_end(self) -> None:
        if not self._is_file and self._name is not None:
            if len(self._field) > _MOST_FIELD_BYTES:
                sentence = f"A field of the form is longer than {_MOST_FIELD_BYTES} bytes."
                raise ApiError(400, "invalid_value", sentence, param=self._name[:LONGEST_NAME])
            self._upload.fields.setdefault(self._name, []).append(self._field.decode("utf-8", "replace"))
        self._is_file = False

    def _on_end(self) -> None:
        self._ended = True


def _shown(name: bytes) -> str:
    """Return a file's name as it is shown to its owner, and used for nothing else."""
    text = "".join(letter for letter in name.decode("utf-8", "replace") if letter.isprintable())
    return text[-255:] or "file"
