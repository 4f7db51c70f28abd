"""`/v1/files` and `/v1/batches`: files of requests that are answered when there is nothing more urgent to do.

Each key sees its own, and those of keys that it has replaced.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from engine import Urgency
from server.api.batches.schema import (
    BatchBody,
    BatchesQuery,
    BatchObject,
    BatchPage,
    Expiry,
    FileBody,
    FileDeleted,
    FileObject,
    FilePage,
    FilesQuery,
    window_seconds,
)
from server.api.caller import Asker, BatchCaller, Caller, checked, of_app
from server.api.uploads import Upload, disk_full, key_full, read_upload
from server.auth.access import Access
from server.auth.metering import Meter, MeteredEngine
from server.batches.folder import NO_SPACE, Folder, is_id
from server.batches.runner import Runner
from server.errors import ApiError, overloaded
from server.http.routing import StrictRoute
from server.http.streaming import StreamedResponse
from server.observability.access_log import RequestRecord
from server.settings import Settings
from server.store.batches import Batch, BatchStore, FullError, InUseError, StoredFile, new_id
from server.store.keys import ApiKey

files = APIRouter(prefix="/v1/files", tags=["batch"])
router = APIRouter(prefix="/v1/batches", tags=["batch"], route_class=StrictRoute)
TheStore = Annotated[BatchStore, Depends(of_app("batch_store"))]
TheFolder = Annotated[Folder, Depends(of_app("batch_folder"))]
TheRunner = Annotated[Runner, Depends(of_app("batch_runner"))]
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


@files.post(
    "", openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
)
async def create_file(caller: BatchCaller, store: TheStore, folder: TheFolder) -> FileObject:
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
    """Make a file of what was uploaded, or discard it."""
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
            raise _storage_failed() from error
        raise
    return FileObject.model_validate(row)


async def _content(folder: Folder, id_: str) -> AsyncIterator[bytes]:
    try:
        async for piece in folder.read(id_):
            yield piece
    except FileNotFoundError as error:
        raise _no_file() from error
    except OSError as error:
        raise _storage_failed() from error


def _storage_failed() -> ApiError:
    return overloaded("The storage for files does not answer. Try again in a moment.", 10)


def _checked(fields: dict[str, str]) -> FileBody:
    expiry = {name: fields[key] for name in Expiry.model_fields if (key := f"expires_after[{name}]") in fields}
    return checked(FileBody, {**fields, "expires_after": expiry} if expiry else fields, form=True)


@files.get("")
async def list_files(query: Annotated[FilesQuery, Query()], caller: BatchCaller, store: TheStore) -> FilePage:
    """List your files, the newest first."""
    rows = await store.files(
        await store.owners(caller.key.public_id),
        limit=query.limit + 1,
        after=query.after,
        ascending=query.order == "asc",
        purpose=query.purpose,
    )
    return FilePage.of([FileObject.model_validate(row) for row in rows], query.limit)


@files.get("/{file_id}")
async def retrieve_file(file_id: str, caller: BatchCaller, store: TheStore) -> FileObject:
    """Show one file."""
    return FileObject.model_validate(await _found(file_id, caller, store))


@files.get("/{file_id}/content", response_class=Response)
async def read_file(file_id: str, caller: BatchCaller, store: TheStore, folder: TheFolder) -> Response:
    """Give what is in a file."""
    row = await _found(file_id, caller, store)
    if row.place != folder.place:
        raise overloaded("This file is on another server. Send the request there.", 60)
    return StreamedResponse(_content(folder, row.id), media_type="application/octet-stream", failure=None)


@files.delete("/{file_id}")
async def delete_file(file_id: str, caller: BatchCaller, store: TheStore, folder: TheFolder) -> FileDeleted:
    """Delete a file, for good. One that a batch reads is not deleted before the batch has ended."""
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
    """An endpoint that lines may ask. `scope`: one that the key needs beside `batch`.

    `answer` answers a line like a single request, and raises what such a request fails with.
    """

    answer: Callable[[Any, Asker], Awaitable[dict[str, Any]]]
    scope: str | None = None

    def check(self, key: ApiKey) -> None:
        """Raise `ApiError` 403 for a key that may not ask it."""
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
async def create_batch(body: BatchBody, caller: BatchCaller, store: TheStore, runner: TheRunner) -> BatchObject:
    """Have the lines of a file answered. What is wrong with them shows in the batch, or in its error file."""
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
        expires_at=now + window_seconds(body.completion_window),
    )
    try:
        await store.add_batch(row, owners, most=_MOST_UNFINISHED)
    except FullError as error:
        sentence = f"Your key has {_MOST_UNFINISHED} batches that have not ended. Wait for one of them, or cancel one."
        raise ApiError(429, "rate_limit_exceeded", sentence, headers={"Retry-After": "60"}) from error
    runner.wake(row.id)
    return BatchObject.of(row)


@router.get("")
async def list_batches(query: Annotated[BatchesQuery, Query()], caller: BatchCaller, store: TheStore) -> BatchPage:
    """List your batches, the newest first."""
    owners = await store.owners(caller.key.public_id)
    rows = await store.batches(owners, limit=query.limit + 1, after=query.after)
    return BatchPage.of([BatchObject.of(row) for row in rows], query.limit)


@router.get("/{batch_id}")
async def retrieve_batch(batch_id: str, caller: BatchCaller, store: TheStore) -> BatchObject:
    """Show one batch, and how far it is."""
    owners = await store.owners(caller.key.public_id)
    row = await store.batch(batch_id, owners) if is_id(batch_id) else None
    if row is None:
        sentence = "There is no such batch, or it is not your key's. GET /v1/batches lists yours."
        raise ApiError(404, "not_found", sentence)
    return BatchObject.of(row)


@router.post("/{batch_id}/cancel")
async def cancel_batch(batch_id: str, caller: BatchCaller, store: TheStore, runner: TheRunner) -> BatchObject:
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
