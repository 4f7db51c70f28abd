"""Reads an uploaded file, `multipart/form-data`, straight to the disk: a few MiB of it are in memory at a time.

Starlette would write it to the folder for temporary files, which may be in memory in a container.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from starlette.requests import Request

from server.batches.folder import NO_SPACE, FileWriter, Folder
from server.errors import ApiError
from server.http.bodies import BODY_PAUSE_SECONDS, DRAIN_BYTES, FormReader, boundary_of, field_text, receive_body
from server.http.disconnect import cut_off_as_error
from server.http.protocol import header_of

_AT_A_TIME_BYTES = 2**20  # parsed and written in one go, beside the event loop
# Of all uploads together. At the speed of a local disk they would use a core, and double the time of other answers.
_BYTES_PER_SECOND = 100e6
_CATCH_UP_SECONDS = 0.05  # a pause in the upload counts for up to this time
_MOST_SECONDS = 4 * 3600.0
_MOST_FIELDS = 16
_MOST_FIELD_BYTES = 4096
_AROUND_BYTES = 64 * 2**10  # of a body beside its file: other fields, and the headers of all parts


@dataclass(slots=True)
class Upload:
    """The fields of an upload, and the file in `writer`, which the caller commits or discards."""

    writer: FileWriter
    fields: dict[str, list[str]] = field(default_factory=dict)
    filename: str | None = None

    @property
    def last(self) -> dict[str, str]:
        """The fields; of one that was sent several times, the last."""
        return {name: values[-1] for name, values in self.fields.items()}


async def read_upload(
    request: Request, folder: Folder, *, most_bytes: int, left_bytes: int, setting: str, paced: bool = False
) -> Upload:
    """Read a body with one file in the field `file`, of at most `most_bytes`, which is `setting`'s value.

    The key may store `left_bytes` more. `paced`: all paced uploads together are limited to `_BYTES_PER_SECOND`.

    Raises `ApiError`: 413 for too large a file, 429 if it exceeds `left_bytes`, 507 if the disk is full. Then nothing
    is left on the disk.
    """
    boundary = boundary_of(request.scope)
    declared = int(header_of(request.scope, b"content-length") or 0) - _AROUND_BYTES
    refusal = _refusal(declared, most_bytes, left_bytes, setting)
    if refusal is None and not await folder.run(folder.has_room, max(declared, 0)):
        refusal = disk_full()
    if refusal is not None:  # uvicorn drops some of what still comes, so that the client reads the answer
        if declared > DRAIN_BYTES:
            refusal.headers["Connection"] = "close"
        raise refusal
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
    sentence = "The files of your key have reached their limit together. Delete some (DELETE /v1/files/{id})."
    return ApiError(429, "insufficient_quota", sentence, param="file", headers={"x-should-retry": "false"})


class _Pace:
    """Limits all uploads together to `_BYTES_PER_SECOND`; TCP slows down a client that sends more."""

    _free_at = 0.0

    async def wait(self, size: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now - _CATCH_UP_SECONDS) + size / _BYTES_PER_SECOND
        await asyncio.sleep(self._free_at - now)  # 0 or less: only yields to other tasks


_pace = _Pace()


async def _read(request: Request, folder: Folder, form: "_Form", *, paced: bool) -> None:
    """Read the whole body; after an error the rest is dropped, so that the client reads the answer."""
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
            if dropped > DRAIN_BYTES:
                break
    if failure is not None:
        raise failure


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the body in pieces of about a MiB."""
    parts: list[bytes] = []
    size = 0
    paused = f"No byte of the file came for {BODY_PAUSE_SECONDS:.0f} s. Send it again."
    late = f"The file did not come within {_MOST_SECONDS / 3600:.0f} hours. Send it in several smaller ones."
    async for part in receive_body(request, _MOST_SECONDS, paused=paused, late=late):
        parts.append(part)
        size += len(part)
        if size >= _AT_A_TIME_BYTES:
            piece, parts, size = b"".join(parts), [], 0
            yield piece
    if parts:
        yield b"".join(parts)


def _refusal(size: int, most_bytes: int, left_bytes: int, setting: str) -> ApiError | None:
    if size > most_bytes:
        sentence = f"The file is larger than the limit of {most_bytes} bytes ({most_bytes / 2**20:.0f} MiB)."
        advice = f"Send several smaller ones, or ask your administrator to raise {setting}."
        return ApiError(413, "request_too_large", f"{sentence} {advice}", param="file")
    return key_full() if size > left_bytes else None


class _Form(FormReader):
    """Keeps fields and writes the file. All of it runs on one thread at a time."""

    most_parts = _MOST_FIELDS

    def __init__(self, boundary: bytes, upload: Upload, most_bytes: int) -> None:
        super().__init__(boundary)
        self._came = 0
        self._most_bytes = most_bytes
        self._upload = upload
        self._name: str | None = None  # of the current part; None: an unexpected file
        self._is_file = False
        self._field = bytearray()

    @property
    def size(self) -> int:
        """Bytes of the file, or of the body less `_AROUND_BYTES`: whichever is more."""
        return max(self._upload.writer.bytes, self._came - _AROUND_BYTES)

    @property
    def full(self) -> bool:
        """Whether the size is above the limit."""
        return self.size > self._most_bytes

    def take_now(self, piece: bytes) -> None:
        """Parse a piece, and write the file's part of it. Raises `ApiError` and OSError."""
        self._came += len(piece)
        self.feed(piece)

    def check(self, refusal: ApiError | None) -> None:
        """Raise `refusal`, if any, or `ApiError` 400 if the form is incomplete or has no file."""
        if refusal is not None:
            raise refusal
        self.check_end()
        if self._upload.filename is None:
            raise ApiError(400, "missing_field", "`file` is missing.", param="file")
        if not self._upload.writer.bytes:
            raise ApiError(400, "invalid_value", "`file` is empty.", param="file")

    def begin_part(self, name: str, filename: bytes | None) -> None:
        self._field.clear()
        self._name, self._is_file = name, name == "file"
        if self._is_file:
            if self._upload.filename is not None:
                raise ApiError(400, "invalid_value", "`file` must be one file.", param="file")
            self._upload.filename = _shown(filename or b"")
        elif filename is not None:
            self._name = None

    def take(self, data: bytes) -> None:
        if self._is_file:
            if not self.full:
                self._upload.writer.write_now(data)
        elif len(self._field) <= _MOST_FIELD_BYTES:
            self._field += data[: _MOST_FIELD_BYTES + 1]

    def end_part(self) -> None:
        if not self._is_file and self._name is not None:
            value = field_text(self._name, self._field, _MOST_FIELD_BYTES)
            self._upload.fields.setdefault(self._name, []).append(value)
        self._is_file = False


def _shown(name: bytes) -> str:
    """Return a file's name, printable and cut. It is only shown to its owner."""
    text = "".join(letter for letter in name.decode("utf-8", "replace") if letter.isprintable())
    return text[-255:] or "file"
