"""A runner of batches on a real database and a real folder, whose lines are answered here instead of by a model."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving import async_poll_until

from server.batches.folder import Folder
from server.batches.runner import BatchLimits, Runner
from server.store.batches import ENDED, Batch, BatchStore, StoredFile, new_id
from server.store.database import Database
from server.store.keys import ApiKey, KeyStore

ENDPOINT = "/v1/chat/completions"
MODEL = "service-plus"
LONG_SECONDS = 60.0


def line(custom_id: str, /, url: str = ENDPOINT, **body: Any) -> dict[str, Any]:
    """One line of an input file, for a short answer."""
    content = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 2} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": content}


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def read_jsonl(text: bytes) -> list[dict[str, Any]]:
    assert not text or text.endswith(b"\n")
    return [json.loads(one) for one in text.splitlines()]


def answered(body: Any) -> dict[str, Any]:
    return {"object": "chat.completion", "echo": body.get("n"), "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


@dataclass
class Answers:
    """Answers lines by `one`, and counts them. `most` is how many were at work at the same time.

    Each takes so many `turns` of the event loop, one of the `steps`, and then until the `gate` is open.
    """

    one: Callable[[Any], Any] = answered
    gate: asyncio.Event | None = None
    turns: int = 1
    steps: asyncio.Semaphore | None = None
    endpoints: Mapping[str, Any] = field(default_factory=lambda: {ENDPOINT: None})
    asked: list[Any] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def until(self, *, finished: int, running: int) -> None:
        await async_poll_until(lambda: (len(self.asked) - self.running, self.running) == (finished, running), 60)

    def model_id(self, _key: ApiKey, name: str) -> str | None:
        return name if name == MODEL else None

    async def answer(self, _endpoint: str, _key: ApiKey, _request_id: str, body: Any) -> dict[str, Any]:
        self.asked.append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.steps is not None:
                await self.steps.acquire()
            if self.gate is not None:
                await self.gate.wait()
            for _ in range(self.turns):
                await asyncio.sleep(0)
            answer = self.one(body)
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            self.running -= 1


@dataclass
class House:
    """The parts around a runner, on one database and folder."""

    database: Database
    folder: Folder
    answers: Answers
    limits: BatchLimits = field(default_factory=BatchLimits)
    ahead_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.store = BatchStore(self.database, clock=self._now)
        self.keys = KeyStore(self.database)
        self.runners: list[Runner] = []

    def _now(self) -> float:
        return time.time() + self.ahead_seconds

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Runner]:
        async with Runner(self.store, self.folder, self.keys, self.answers, self.limits) as runner:
            self.runners.append(runner)
            yield runner
            self.runners.remove(runner)

    async def key(self, name: str = "one") -> ApiKey:
        _, key = await self.keys.create(name, "standard")
        return key

    async def add(self, key: ApiKey, content: bytes, *, window: int = 86400, endpoint: str = ENDPOINT) -> str:
        """Store a file, and make a batch of it; return the batch's id."""
        await self.folder.open()
        writer, file = self.folder.writer_now(), new_id("file-")
        writer.write_now(content)
        writer.commit_now(file)
        now = int(self.store.clock())
        row = StoredFile(file, key.public_id, self.folder.place, "batch", "in.jsonl", len(content), now, now + 10**6)
        await self.store.add_file(row, [key.public_id], most_bytes=2**40)
        batch = Batch(
            id=new_id("batch_"),
            key_id=key.public_id,
            place=self.folder.place,
            input_file_id=file,
            endpoint=endpoint,
            completion_window="24h",
            status="validating",
            created_at=now,
            expires_at=now + window,
        )
        await self.store.add_batch(batch, [key.public_id], most=1000)
        for runner in self.runners:
            runner.wake(batch.id)
        return batch.id

    async def see(self, batch: str, true: Callable[[Batch], bool]) -> Batch:
        """The batch's row as soon as this holds for it."""
        async with asyncio.timeout(LONG_SECONDS):
            while True:
                row = await self.store.batch(batch)
                assert row is not None
                if true(row):
                    return row
                await asyncio.sleep(0.01)

    async def ended(self, batch: str) -> Batch:
        return await self.see(batch, lambda row: row.status in ENDED)

    def output(self, row: Batch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The lines of its output and of its error file."""
        texts = [b"" if id_ is None else self._content(id_) for id_ in (row.output_file_id, row.error_file_id)]
        return read_jsonl(texts[0]), read_jsonl(texts[1])

    def _content(self, id_: str) -> bytes:
        bucket = getattr(self.folder, "bucket", None)
        return self.folder.file(id_).read_bytes() if bucket is None else bucket.get(f"files/{id_}")


def house_at(database: Database, path: Path, **parts: Any) -> House:
    return House(database, Folder(path), **{"answers": Answers(), **parts})


def assert_each_once(wanted: Iterable[str], *files: list[dict[str, Any]]) -> None:
    """Every line has exactly one record, in the order of the input within its file."""
    wanted = list(wanted)
    found = [one["custom_id"] for file in files for one in file]
    assert sorted(found) == sorted(wanted)
    places = {id_: place for place, id_ in enumerate(wanted)}
    for file in files:
        order = [places[one["custom_id"]] for one in file]
        assert order == sorted(order)
