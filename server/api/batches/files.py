"""`/v1/files`: files that batches read and write. Each key sees its own, and those of keys that it has replaced."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from server.api.batches.schema import Expiry, FileBody, FileDeleted, FileObject, FilePage, FilesQuery
from server.api.caller import BatchCaller, Caller, checked, of_app
from server.api.uploads import Upload, disk_full, key_full, read_upload
from server.batches.folder import NO_SPACE, Folder, is_id
from server.errors import ApiError, overloaded
from server.http.streaming import StreamedResponse
from server.store.batches import BatchStore, FullError, InUseError, StoredFile, new_id

router = APIRouter(prefix="/v1/files", tags=["batch"])
TheStore = Annotated[BatchStore, Depends(of_app("batch_store"))]
TheFolder = Annotated[Folder, Depends(of_app("batch_folder"))]
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


@router.post(
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
        raise no_file() from error
    except OSError as error:
        raise _storage_failed() from error


def _storage_failed() -> ApiError:
    return overloaded("The storage for files does not answer. Try again in a moment.", 10)


def _checked(fields: dict[str, str]) -> FileBody:
    expiry = {name: fields[key] for name in Expiry.model_fields if (key := f"expires_after[{name}]") in fields}
    return checked(FileBody, {**fields, "expires_after": expiry} if expiry else fields, form=True)


@router.get("")
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


@router.get("/{file_id}")
async def retrieve_file(file_id: str, caller: BatchCaller, store: TheStore) -> FileObject:
    """Show one file."""
    return FileObject.model_validate(await _found(file_id, caller, store))


@router.get("/{file_id}/content", response_class=Response)
async def read_file(file_id: str, caller: BatchCaller, store: TheStore, folder: TheFolder) -> Response:
    """Give what is in a file."""
    row = await _found(file_id, caller, store)
    if row.place != folder.place:
        raise overloaded("This file is on another server. Send the request there.", 60)
    return StreamedResponse(_content(folder, row.id), media_type="application/octet-stream", failure=None)


@router.delete("/{file_id}")
async def delete_file(file_id: str, caller: BatchCaller, store: TheStore, folder: TheFolder) -> FileDeleted:
    """Delete a file, for good. One that a batch reads is not deleted before the batch has ended."""
    owners = await store.owners(caller.key.public_id)
    try:
        row = await store.delete_file(file_id, owners) if is_id(file_id) else None
    except InUseError as error:
        sentence = f"The batch {error.batch} reads this file. Cancel it, or wait until it has ended."
        raise ApiError(409, "file_in_use", sentence, headers={"x-should-retry": "false"}) from error
    if row is None:
        raise no_file()
    if row.place == folder.place:
        await folder.delete(row.id)  # else the sweep of its own place does
    return FileDeleted(id=row.id)


async def _found(file_id: str, caller: Caller, store: BatchStore) -> StoredFile:
    row = await store.file(file_id, await store.owners(caller.key.public_id)) if is_id(file_id) else None
    if row is None:
        raise no_file()
    return row


def no_file(param: str | None = None) -> ApiError:
    sentence = "There is no such file, or it is not your key's. GET /v1/files lists yours."
    return ApiError(404, "not_found", sentence, param=param)
