"""The bodies, queries and answers of `/v1/files` and `/v1/batches`, in the convention's form."""

import re
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from server.api.schema import Asked, Labels, Shown, Strict, refused
from server.batches.folder import is_id
from server.store.batches import Batch, Status

Purpose = Literal["batch", "batch_output"]
_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
_HOURS = {"h": 1, "d": 24}
_LONGEST_WINDOW_HOURS = 7 * 24

Id = Annotated[str, BeforeValidator(refused("is not an id of this server", lambda value: not is_id(str(value))))]


def window_seconds(window: str) -> int:
    """Return how long a window is that has been checked."""
    found = _WINDOW.fullmatch(window)
    return int(found[1]) * _HOURS[found[2]] * 3600 if found else 0


def _window(value: str) -> str:
    if not 3600 <= window_seconds(value) <= _LONGEST_WINDOW_HOURS * 3600:
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
    """What all lines ask for, like `/v1/chat/completions`."""
    completion_window: Annotated[str, AfterValidator(_window)]
    """How long it may take, `1h` to `7d`. What is not done by then is an error in its error file."""
    metadata: Labels | None = None
    output_expires_after: Expiry | None = None


class FilesQuery(Asked):
    after: Id | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: Purpose | None = None


class BatchesQuery(Asked):
    after: Id | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class FileObject(Shown):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchError(BaseModel):
    """Why a batch has failed: something in a line, or in all of it."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(BaseModel):
    """The first hundred of them."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Lines: all, those with an answer, and those with an error of their own."""

    total: int
    completed: int
    failed: int


class InputDetails(BaseModel):
    """Of the input tokens, those that were in the prefix cache."""

    cached_tokens: int


class OutputDetails(BaseModel):
    """Of the output tokens, those of reasoning."""

    reasoning_tokens: int


class BatchUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchObject(BaseModel):
    """A batch, and how far it is."""

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
        """Make a page of what was found, of which one more than `limit` was asked for."""
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
