"""The files that a batch ends with: its answers, and its errors, each in the order of the input."""

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from server.batches.folder import FileWriter, Folder
from server.batches.journal import Index
from server.batches.lines import Line, LineReader, envelope_of, string_in
from server.store.batches import new_id

_NOT_DONE = {
    "expired": ("batch_expired", "This line was not answered before the window of its batch had passed."),
    "cancelled": ("batch_cancelled", "This line was not answered before its batch was cancelled."),
}


def encode_line(
    custom_id: Any, request_id: str | None, status: int, body: Any, error: dict[str, str] | None = None
) -> bytes:
    """Return a line of an output or error file, without its end."""
    response = None if request_id is None else {"status_code": status, "request_id": request_id, "body": body}
    line = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line)


@dataclass(frozen=True, slots=True)
class Written:
    """A file of a batch that is on disk."""

    id: str
    bytes: int


def write_output(
    folder: Folder, reader: LineReader, index: Index, ending: str
) -> tuple[Written | None, Written | None]:
    """Write the answers, and the errors; None where there are none. Blocks. Raises OSError, and leaves nothing then.

    What has no record is an error by the `ending`, expired or cancelled.
    """
    answers, errors = _Part(folder), _Part(folder)
    try:
        while lines := reader.read_slice():
            for line in lines:
                ok, data = index.record(line.index) or (False, _not_done(line, ending))
                (answers if ok else errors).write(data)
        return answers.commit(), errors.commit()
    except BaseException:
        for part in (answers, errors):
            part.discard()
        raise


def _not_done(line: Line, ending: str) -> bytes:
    envelope = None if line.text is None else envelope_of(line.text)
    code, message = _NOT_DONE.get(ending, _NOT_DONE["expired"])
    return encode_line(envelope and string_in(envelope.custom_id), None, 0, None, {"code": code, "message": message})


class _Part:
    """A file that is made with its first line."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._writer: FileWriter | None = None
        self._committed: str | None = None

    def write(self, data: bytes) -> None:
        self._writer = self._writer or self._folder.writer_now()
        self._writer.write_now(data)
        self._writer.write_now(b"\n")

    def commit(self) -> Written | None:
        if self._writer is None:
            return None
        id_ = new_id("file-")
        self._writer.commit_now(id_)
        self._committed = id_
        return Written(id_, self._writer.bytes)

    def discard(self) -> None:
        if self._committed is not None:
            self._folder.delete_now(self._committed)
        elif self._writer is not None:
            self._writer.discard_now()
