"""`/v1/batches`: files of requests that are answered when there is nothing more urgent to do."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from engine import Urgency
from server.api.batches.files import TheStore, no_file
from server.api.batches.schema import BatchBody, BatchesQuery, BatchObject, BatchPage, window_seconds
from server.api.caller import Asker, BatchCaller, of_app
from server.auth.access import Access
from server.auth.metering import Meter, MeteredEngine
from server.batches.folder import is_id
from server.batches.runner import Runner
from server.errors import ApiError
from server.http.routing import StrictRoute
from server.observability.access_log import RequestRecord
from server.settings import Settings
from server.store.batches import Batch, FullError, new_id
from server.store.keys import ApiKey

router = APIRouter(prefix="/v1/batches", tags=["batch"], route_class=StrictRoute)
TheRunner = Annotated[Runner, Depends(of_app("batch_runner"))]
_MOST_UNFINISHED = 100  # of a key


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
        raise no_file("input_file_id")
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
