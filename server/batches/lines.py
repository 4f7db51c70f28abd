"""The lines of a batch's files: its input is read within bounds of memory and checked beforehand, its output written.

Of an input line only the envelope is checked here; its body is checked when the line is answered. A batch ends with a
file of answers and one of errors, both in the order of the input.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from server.batches.folder import FileWriter, Folder
from server.batches.journal import Index
from server.store.batches import new_id

_MOST_ERRORS = 100
_MOST_ID_LETTERS = 512
_SLICE_BYTES = 2**20
_SKIP_BYTES = 2**20
_NOT_DONE = {
    "expired": ("batch_expired", "This line was not answered before the window of its batch had passed."),
    "cancelled": ("batch_cancelled", "This line was not answered before its batch was cancelled."),
}


class Envelope(msgspec.Struct):
    """The fields around a request in its line, not parsed: making millions of lists would take seconds."""

    custom_id: msgspec.Raw = msgspec.Raw()
    method: msgspec.Raw = msgspec.Raw()
    url: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()


@dataclass(slots=True)
class Line:
    """A line that has more than white space: the `index`-th of them, from 0; `number` counts all lines, from 1.

    `text` None: it is longer than a line may be.
    """

    index: int
    number: int
    offset: int
    size: int
    text: bytes | None
    deaths: int = 0  # of engines, while this line was being answered
    deaths_alone: int = 0  # those while no other line of this server's batches was
    failures: int = 0  # of ours, while it was being answered


class TooManyLinesError(Exception):
    """The file has too many lines, even if they are empty."""


class LineReader:
    """Reads lines from a file, which its maker closes. Blocks."""

    def __init__(self, path: Path, *, most_lines: int, most_line_bytes: int) -> None:
        self._file: BinaryIO = path.open("rb", 2**20)
        self._most_lines = 2 * most_lines + 1000
        self._most_line_bytes = most_line_bytes
        self._index = self._number = self._offset = 0

    def close(self) -> None:
        self._file.close()

    def read_slice(self, wanted: Callable[[int], bool] = lambda _: True) -> list[Line]:
        """Return the next lines, about a MiB of them; those whose index is not wanted are left out. At the end: none.

        Raises `TooManyLinesError`.
        """
        lines: list[Line] = []
        kept = 0
        while kept < _SLICE_BYTES and (line := self._next()) is not None:
            if wanted(line.index):
                lines.append(line)
                kept += line.size
        return lines

    def read_again(self, line: Line) -> bytes:
        return os.pread(self._file.fileno(), line.size, line.offset)

    def _next(self) -> Line | None:
        while text := self._file.readline(self._most_line_bytes + 1):
            size = len(text)
            too_long = size > self._most_line_bytes and not text.endswith(b"\n")
            while too_long and (piece := self._file.readline(_SKIP_BYTES)):
                size += len(piece)
                if piece.endswith(b"\n"):
                    break
            self._number += 1
            self._offset += size
            if self._number > self._most_lines:
                raise TooManyLinesError
            if too_long or not text.isspace():
                self._index += 1
                return Line(self._index - 1, self._number, self._offset - size, size, None if too_long else text)
        return None


def envelope_of(text: bytes) -> Envelope | None:
    """Take a line apart; None for what is not a JSON object in UTF-8."""
    try:
        str(text, "utf-8")  # msgspec does not check what it does not parse
        return msgspec.json.decode(text, type=Envelope)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def string_in(value: msgspec.Raw) -> str | None:
    """Return the string that this is; None for another value, and for one that is left out."""
    try:
        return msgspec.json.decode(value, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def model_of(body: msgspec.Raw) -> str | None:
    """Return the string in `model` of a body, which is an object, checked or not."""
    return string_in(msgspec.json.decode(body, type=_Body).model)


@dataclass(slots=True)
class Check:
    """Checks the envelopes of a file, line by line. `known_model` says the id of a model that the key may use."""

    endpoint: str
    most_lines: int
    most_line_bytes: int
    known_model: Callable[[str], str | None]
    lines: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    _models: dict[str, str | None] = field(default_factory=dict)
    _ids: set[int] = field(default_factory=set)  # hashes of 8 bytes: two ids with the same one are improbable

    @property
    def model(self) -> str | None:
        """The id of the model that all lines name; None if they name several."""
        ids = {id_ for id_ in self._models.values() if id_ is not None}
        return next(iter(ids)) if len(ids) == 1 else None

    @property
    def ended(self) -> bool:
        return len(self.errors) >= _MOST_ERRORS or self.lines > self.most_lines

    def take(self, line: Line) -> None:
        self.lines += 1
        if self.lines > self.most_lines:
            self.too_many()
            return
        for code, sentence, param in self._problems(line):
            self.add(code, sentence, line.number, param)

    def end(self) -> None:
        if not self.lines and not self.errors:
            self.add("empty_file", "The file has no lines.", None)

    def too_many(self) -> None:
        sentence = f"The file has more than {self.most_lines} lines. Send several smaller ones."
        self.add("too_many_lines", sentence, None)

    def add(self, code: str, message: str, line: int | None, param: str | None = None) -> None:
        if len(self.errors) < _MOST_ERRORS:
            self.errors.append({"code": code, "line": line, "message": message, "param": param})

    def _problems(self, line: Line) -> Iterator[tuple[str, str, str | None]]:
        """Yield what is wrong: code, sentence, field. No text of the client's is repeated."""
        if line.text is None:
            most = f"{self.most_line_bytes} bytes (HEARTH_MAX_BODY_BYTES)"
            yield "line_too_long", f"This line is longer than {most}.", None
            return
        envelope = envelope_of(line.text)
        if envelope is None:
            yield "invalid_json_line", "This line is not a JSON object in UTF-8.", None
            return
        id_ = string_in(envelope.custom_id)
        if id_ is None or not 1 <= len(id_) <= _MOST_ID_LETTERS:
            sentence = f"`custom_id` must be a string of 1 to {_MOST_ID_LETTERS} characters."
            yield "invalid_custom_id", sentence, "custom_id"
        elif hash(id_) in self._ids:
            yield "duplicate_custom_id", "An earlier line has the same `custom_id`.", "custom_id"
        else:
            self._ids.add(hash(id_))
        if string_in(envelope.method) != "POST":
            yield "invalid_method", "`method` must be `POST`.", "method"
        if string_in(envelope.url) != self.endpoint:
            yield "mismatched_endpoint", "`url` must be the `endpoint` of the batch.", "url"
        try:
            model = model_of(envelope.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            yield "invalid_body", "`body` must be an object.", "body"
            return
        if model is None or not self._knows(model):
            sentence = "There is no such model, or your key may not use it. GET /v1/models lists the ones that you may."
            yield "model_not_found", sentence, "body.model"

    def _knows(self, model: str) -> bool:
        if model not in self._models and len(self._models) < 1000:
            self._models[model] = self.known_model(model)
        return self._models.get(model) is not None


def usage_of(body: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return what an answer says of its tokens: input, output, cached input and reasoning, by either convention."""
    used = body.get("usage") or {}
    read = used.get("prompt_tokens", used.get("input_tokens", 0))
    written = used.get("completion_tokens", used.get("output_tokens", 0))
    details = used.get("prompt_tokens_details", used.get("input_tokens_details")) or {}
    more = used.get("completion_tokens_details", used.get("output_tokens_details")) or {}
    return read, written, details.get("cached_tokens") or 0, more.get("reasoning_tokens") or 0


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

    A line without a record gets the error of the `ending`, expired or cancelled. Leaves nothing if it raises OSError.
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
