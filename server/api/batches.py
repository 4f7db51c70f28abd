"""`/v1/files` and `/v1/batches`: files of requests that are answered when nothing more urgent runs.

Each key sees its own, and those of keys that it has replaced. Bodies and answers are OpenAI's.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from engine import Urgency
from server.api.caller import Asker, BatchCaller, Caller, checked, of_app
from server.api.schema import Asked, Labels, Shown, Strict, refused
from server.api.uploads import Upload, disk_full, key_full, read_upload
from server.auth.access import Access
from server.auth.metering import Meter, MeteredEngine
from server.batches.folder import NO_SPACE, Folder, is_id
from server.batches.runner import Runner
from server.errors import ApiError, overloaded, storage_failed
from server.http.bodies import StrictRoute
from server.http.streaming import StreamedResponse
from server.observability.access_log import RequestRecord
from server.settings import Settings
from server.store.batches import Batch, BatchStore, FullError, InUseError, Status, StoredFile, new_id
from server.store.keys import ApiKey

files = APIRouter(prefix="/v1/files", tags=["batch"])
router = APIRouter(prefix="/v1/batches", tags=["batch"], route_class=StrictRoute)
_TheStore = Annotated[BatchStore, Depends(of_app("batch_store"))]
_TheFolder = Annotated[Folder, Depends(of_app("batch_folder"))]
_TheRunner = Annotated[Runner, Depends(of_app("batch_runner"))]
_MOST_UNFINISHED = 100  # of a key
_TEXT = {"type": "string"}
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSON Lines: one request in each line."},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {**_TEXT, "description": "3600 to 2592000. Default: as the server keeps files."},
    },
}
_Purpose = Literal["batch", "batch_output"]
_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
_HOURS = {"h": 1, "d": 24}
_LONGEST_WINDOW_HOURS = 7 * 24
_Id = Annotated[str, BeforeValidator(refused("is not an id of this server", lambda value: not is_id(str(value))))]


def _window_seconds(window: str) -> int:
    """Return the length of a window like `24h`; 0 if it is none."""
    found = _WINDOW.fullmatch(window)
    return int(found[1]) * _HOURS[found[2]] * 3600 if found else 0


def _window(value: str) -> str:
    if not 3600 <= _window_seconds(value) <= _LONGEST_WINDOW_HOURS * 3600:
        raise ValueError("must be from `1h` to `7d`, like `24h`")
    return value


class Expiry(Strict):
    """How long files are kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class FileBody(Strict):
    """The fields of `POST /v1/files` beside its file."""

    purpose: Literal["batch"]
    expires_after: Expiry | None = None


class BatchBody(Strict):
    input_file_id: str
    """A file of yours with `purpose` `batch`: JSON Lines, one request in each."""
    endpoint: str
    """The endpoint of all lines, like `/v1/chat/completions`."""
    completion_window: Annotated[str, AfterValidator(_window)]
    """How long it may take, `1h` to `7d`. What is not done by then is an error in its error file."""
    metadata: Labels | None = None
    output_expires_after: Expiry | None = None


class FilesQuery(Asked):
    after: _Id | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: _Purpose | None = None


class BatchesQuery(Asked):
    after: _Id | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class FileObject(Shown):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: _Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchError(BaseModel):
    """Why a batch has failed: an error of one line, or of the whole file."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(BaseModel):
    """The first hundred errors."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Lines: all, those with an answer, and those with an error of their own."""

    total: int
    completed: int
    failed: int


class InputDetails(BaseModel):
    """How many of the input tokens were in the prefix cache."""

    cached_tokens: int


class OutputDetails(BaseModel):
    """How many of the output tokens are reasoning."""

    reasoning_tokens: int


class BatchUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchObject(BaseModel):
    """A batch and its progress."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    """The model of all lines; null where they differ, and until they are checked."""
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, row: Batch) -> Self:
        same = {name: getattr(row, name) for name in cls.model_fields if hasattr(row, name)}
        return cls(
            **same
            | {
                "errors": None if row.errors is None else BatchErrors(data=[BatchError(**one) for one in row.errors]),
                "request_counts": RequestCounts(total=row.total, completed=row.completed, failed=row.failed),
                "usage": None if row.usage is None else _usage(row.usage),
                "metadata": row.labels,
            }
        )


_T = TypeVar("_T", FileObject, BatchObject)


class _Page(BaseModel, Generic[_T]):
    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool
    data: list[_T]

    @classmethod
    def of(cls, found: list[_T], limit: int) -> Self:
        """Make a page of rows, which were read with one more than `limit`."""
        data = found[:limit]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return cls(first_id=first, last_id=last, has_more=len(found) > limit, data=data)


class FilePage(_Page[FileObject]):
    pass


class BatchPage(_Page[BatchObject]):
    pass


def _usage(counted: dict[str, int]) -> BatchUsage:
    read, written = counted["input_tokens"], counted["output_tokens"]
    return BatchUsage(
        input_tokens=read,
        input_tokens_details=InputDetails(cached_tokens=counted["cached_tokens"]),
        output_tokens=written,
        output_tokens_details=OutputDetails(reasoning_tokens=counted["reasoning_tokens"]),
        total_tokens=read + written,
    )


@files.post(
    "", openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
)
async def create_file(caller: BatchCaller, store: _TheStore, folder: _TheFolder) -> FileObject:
    """Store a file, `multipart/form-data` with the fields `file` and `purpose`. It is written while it arrives."""
    settings = caller.settings
    owners = await store.owners(caller.key.public_id)
    most = int(settings.key_files_gib * 2**30)
    with caller.engine.running():
        left = most - await store.kept_bytes(owners)
        upload = await read_upload(
            caller.request,
            folder,
            most_bytes=settings.max_file_bytes,
            left_bytes=left,
            setting="HEARTH_MAX_FILE_BYTES",
            paced=True,
        )
        return await _add(upload, caller, store, folder, owners, most)


async def _add(
    upload: Upload, caller: Caller, store: BatchStore, folder: Folder, owners: tuple[str, ...], most_bytes: int
) -> FileObject:
    """Store an uploaded file, or discard it."""
    writer, id_ = upload.writer, new_id("file-")
    try:
        now = int(store.clock())
        expiry = _checked(upload.last).expires_after
        seconds = int(caller.settings.file_retention_days * 86400) if expiry is None else expiry.seconds
        row = StoredFile(
            id=id_,
            key_id=caller.key.public_id,
            place=folder.place,
            purpose="batch",
            filename=upload.filename or "file",
            bytes=writer.bytes,
            created_at=now,
            expires_at=now + seconds,
        )
        await folder.run(writer.commit_now, id_)
        await store.add_file(row, owners, most_bytes=most_bytes)
    except BaseException as error:
        await folder.run(writer.discard_now)
        await folder.delete(id_)
        if isinstance(error, FullError):
            raise key_full() from error
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise disk_full() from error
        if isinstance(error, OSError) and folder.shared:
            raise storage_failed() from error
        raise
    return FileObject.model_validate(row)


async def _content(folder: Folder, id_: str) -> AsyncIterator[bytes]:
    try:
        async for piece in folder.read(id_):
            yield piece
    except FileNotFoundError as error:
        raise _no_file() from error
    except OSError as error:
        raise storage_failed() from error


def _checked(fields: dict[str, str]) -> FileBody:
    expiry = {name: fields[key] for name in Expiry.model_fields if (key := f"expires_after[{name}]") in fields}
    return checked(FileBody, {**fields, "expires_after": expiry} if expiry else fields, form=True)


@files.get("")
async def list_files(query: Annotated[FilesQuery, Query()], caller: BatchCaller, store: _TheStore) -> FilePage:
    """List your files, newest first."""
    rows = await store.files(
        await store.owners(caller.key.public_id),
        limit=query.limit + 1,
        after=query.after,
        ascending=query.order == "asc",
        purpose=query.purpose,
    )
    return FilePage.of([FileObject.model_validate(row) for row in rows], query.limit)


@files.get("/{file_id}")
async def retrieve_file(file_id: str, caller: BatchCaller, store: _TheStore) -> FileObject:
    """Show one file."""
    return FileObject.model_validate(await _found(file_id, caller, store))


@files.get("/{file_id}/content", response_class=Response)
async def read_file(file_id: str, caller: BatchCaller, store: _TheStore, folder: _TheFolder) -> Response:
    """Return the content of a file."""
    row = await _found(file_id, caller, store)
    if row.place != folder.place:
        raise overloaded("This file is on another server. Send the request there.", 60)
    return StreamedResponse(_content(folder, row.id), media_type="application/octet-stream", failure=None)


@files.delete("/{file_id}")
async def delete_file(file_id: str, caller: BatchCaller, store: _TheStore, folder: _TheFolder) -> FileDeleted:
    """Delete a file for good. While a batch reads it, this is refused."""
    owners = await store.owners(caller.key.public_id)
    try:
        row = await store.delete_file(file_id, owners) if is_id(file_id) else None
    except InUseError as error:
        sentence = f"The batch {error.batch} reads this file. Cancel it, or wait until it has ended."
        raise ApiError(409, "file_in_use", sentence, headers={"x-should-retry": "false"}) from error
    if row is None:
        raise _no_file()
    if row.place == folder.place:
        await folder.delete(row.id)  # else the sweep of its own place does
    return FileDeleted(id=row.id)


async def _found(file_id: str, caller: Caller, store: BatchStore) -> StoredFile:
    row = await store.file(file_id, await store.owners(caller.key.public_id)) if is_id(file_id) else None
    if row is None:
        raise _no_file()
    return row


def _no_file(param: str | None = None) -> ApiError:
    sentence = "There is no such file, or it is not your key's. GET /v1/files lists yours."
    return ApiError(404, "not_found", sentence, param=param)


@dataclass(frozen=True, slots=True)
class LineEndpoint:
    """An endpoint that lines may name. `scope`: one that the key needs beside `batch`.

    `answer` answers a line like a single request, and raises the same errors.
    """

    answer: Callable[[Any, Asker], Awaitable[dict[str, Any]]]
    scope: str | None = None

    def check(self, key: ApiKey) -> None:
        """Raise `ApiError` 403 for a key that lacks the scope."""
        if self.scope is not None and self.scope not in key.scopes:
            sentence = f"This key lacks the scope `{self.scope}`. Ask your administrator for a key that has it."
            raise ApiError(403, "insufficient_permissions", sentence, param="endpoint")


@dataclass(frozen=True, slots=True)
class EndpointLines:
    """Answers the lines of batches like requests of their own, at background priority and metered as the key's."""

    endpoints: Mapping[str, LineEndpoint]
    meter: Meter
    access: Access
    settings: Settings

    def model_id(self, key: ApiKey, name: str) -> str | None:
        try:
            return self.access.model_id(key, name)
        except ApiError:
            return None

    async def answer(self, endpoint: str, key: ApiKey, request_id: str, body: Any) -> dict[str, Any]:
        asked = self.endpoints[endpoint]
        asked.check(key)
        record = RequestRecord(request_id, "POST", None, key=key.public_id)
        engine = MeteredEngine(self.access.engine, self.meter, key, record, kind="batch", background=True)
        asker = Asker(
            record=record,
            key=key,
            engine=engine,
            access=self.access,
            settings=self.settings,
            urgency=Urgency.BACKGROUND,
        )
        return await asked.answer(body, asker)


@router.post("")
async def create_batch(body: BatchBody, caller: BatchCaller, store: _TheStore, runner: _TheRunner) -> BatchObject:
    """Start a batch that answers the lines of a file. Errors are in the batch, or in its error file."""
    endpoints = runner.lines.endpoints
    if body.endpoint not in endpoints:
        sentence = f"`endpoint` must be one of {', '.join(endpoints)}."
        raise ApiError(400, "invalid_value", sentence, param="endpoint")
    endpoints[body.endpoint].check(caller.key)
    owners = await store.owners(caller.key.public_id)
    file = await store.file(body.input_file_id, owners) if is_id(body.input_file_id) else None
    if file is None:
        raise _no_file("input_file_id")
    if file.purpose != "batch":
        sentence = "`input_file_id` must be a file of the purpose `batch`."
        raise ApiError(400, "invalid_value", sentence, param="input_file_id")
    now = int(store.clock())
    expiry = body.output_expires_after
    row = Batch(
        id=new_id("batch_"),
        key_id=caller.key.public_id,
        place=file.place,
        input_file_id=file.id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        labels=body.metadata,
        output_seconds=None if expiry is None else expiry.seconds,
        status="validating",
        created_at=now,
        expires_at=now + _window_seconds(body.completion_window),
    )
    try:
        await store.add_batch(row, owners, most=_MOST_UNFINISHED)
    except FullError as error:
        sentence = f"Your key has {_MOST_UNFINISHED} batches that have not ended. Wait for one of them, or cancel one."
        raise ApiError(429, "rate_limit_exceeded", sentence, headers={"Retry-After": "60"}) from error
    runner.wake(row.id)
    return BatchObject.of(row)


@router.get("")
async def list_batches(query: Annotated[BatchesQuery, Query()], caller: BatchCaller, store: _TheStore) -> BatchPage:
    """List your batches, newest first."""
    owners = await store.owners(caller.key.public_id)
    rows = await store.batches(owners, limit=query.limit + 1, after=query.after)
    return BatchPage.of([BatchObject.of(row) for row in rows], query.limit)


@router.get("/{batch_id}")
async def retrieve_batch(batch_id: str, caller: BatchCaller, store: _TheStore) -> BatchObject:
    """Show one batch and its progress."""
    owners = await store.owners(caller.key.public_id)
    row = await store.batch(batch_id, owners) if is_id(batch_id) else None
    if row is None:
        sentence = "There is no such batch, or it is not your key's. GET /v1/batches lists yours."
        raise ApiError(404, "not_found", sentence)
    return BatchObject.of(row)


@router.post("/{batch_id}/cancel")
async def cancel_batch(batch_id: str, caller: BatchCaller, store: _TheStore, runner: _TheRunner) -> BatchObject:
    """End a batch. Lines that have an answer by then keep it; the others are errors."""
    before = await retrieve_batch(batch_id, caller, store)
    if not await store.move(before.id, ("validating", "in_progress"), "cancelling"):
        now = await retrieve_batch(batch_id, caller, store)
        if now.status in {"cancelling", "cancelled"}:
            return now
        sentence = f"This batch cannot be cancelled any more: it is {now.status}."
        raise ApiError(409, "batch_ended", sentence, headers={"x-should-retry": "false"})
    runner.wake(before.id)
    return await retrieve_batch(batch_id, caller, store)
