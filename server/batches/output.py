"""The files that a batch ends with: its answers, and its errors, each in the order of the input."""

import secrets
from typing import Any, NamedTuple

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
    id_ = f"batch_req_{secrets.token_hex(12)}"
    return msgspec.json.encode({"id": id_, "custom_id": custom_id, "response": response, "error": error})


class Written(NamedTuple):
    """A file of a batch that is on disk."""

    id: str
    bytes: int


def write_output(folder: Folder, reader: LineReader, index: Index, ending: str) -> dict[str, Written]:
    """Write the answers, `output`, and what is an `error`, where there are any. Blocks.

    What has no record is an error by the `ending`, expired or cancelled. Raises OSError, and leaves nothing then.
    """
    writers: dict[str, FileWriter] = {}
    made: dict[str, Written] = {}
    try:
        while lines := reader.read_slice():
            for line in lines:
                ok, data = index.record(line.index) or (False, _not_done(line, ending))
                kind = "output" if ok else "error"
                if kind not in writers:
                    writers[kind] = folder.writer_now()
                writers[kind].write_now(data + b"\n")
        for kind, writer in writers.items():
            id_ = new_id("file-")
            writer.commit_now(id_)
            made[kind] = Written(id_, writer.bytes)
    except BaseException:
        for writer in writers.values():
            writer.discard_now()
        for one in made.values():
            folder.delete_now(one.id)
        raise
    return made


def _not_done(line: Line, ending: str) -> bytes:
    envelope = None if line.text is None else envelope_of(line.text)
    code, message = _NOT_DONE.get(ending, _NOT_DONE["expired"])
    return encode_line(envelope and string_in(envelope.custom_id), None, 0, None, {"code": code, "message": message})
