"""Runs the batches of one place: fair between keys, within bounds of memory, and across restarts of the server.

A batch is validated, its lines are answered at background priority, each answer goes into the journal, and at its end
the journal becomes its files. Every step may be cut off: a line that was being answered is answered again, and still
has one record. Limits, loads and restarts are waited for. A line that is wrong itself gets an error, and so does one
whose engine dies twice while no other line runs.
"""

import asyncio
import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from engine.errors import EngineDiedError
from server.batches.folder import Folder
from server.batches.journal import Index, Journal, Tally, encode
from server.batches.lines import (
    Check,
    Line,
    LineReader,
    TooManyLinesError,
    encode_line,
    envelope_of,
    model_of,
    string_in,
    usage_of,
    write_output,
)
from server.errors import ApiError, to_api_error
from server.http.bodies import parse_strict_json
from server.observability.metrics import BatchLoad
from server.store import KeyNotFoundError, StoreUnavailableError
from server.store.batches import UNFINISHED, Batch, BatchStore, Status, StoredFile
from server.store.database import SideTasks
from server.store.keys import ApiKey, KeyStore

_log = logging.getLogger("hearth.batches")
Ending = Literal["completed", "expired", "cancelled"]

_LOOK_SECONDS = 2.0
_KEEP_UP_SECONDS = 1.0
_LEASE_SECONDS = 30.0
_RENEW_SECONDS = 10.0
_SWEEP_SECONDS = 3600.0
_LONGEST_PAUSE_SECONDS = 60.0
_DEATH_PAUSE_SECONDS = 1.0
_MOST_RUNS = 32  # batches at the same time; each has some open files
_MOST_RUNS_OF_KEY = 4
_MOST_DEATHS = 2  # then a line runs alone; after as many alone it gets an error
_MOST_FAILURES = 3
_IDS_PER_QUERY = 500
_SLICE_PAUSE_SECONDS = 0.003  # after each MiB that is checked, for 1 ms: others' requests need the interpreter, too
_PARSED_BESIDE_BYTES = 256 * 2**10


class Lines(Protocol):
    """How lines are answered: by the app, which knows the endpoints."""

    @property
    def endpoints(self) -> Mapping[str, Any]:
        """The endpoints that lines may name."""

    def model_id(self, key: ApiKey, name: str, /) -> str | None:
        """Return the id of a model that the key may use; None for any other name."""

    async def answer(self, endpoint: str, key: ApiKey, request_id: str, body: Any, /) -> dict[str, Any]:
        """Answer the body of one line. Raises what such a request fails with."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`most_bytes` and `most_running` limit the running lines of all batches together.

    A key is checked every `key_seconds`. A batch that could not go on is tried again after `pause_seconds`.
    """

    most_lines: int = 50_000
    most_line_bytes: int = 25 * 2**20
    most_bytes: int = 64 * 2**20
    most_running: int = 512
    retention_seconds: float = 30 * 86400.0
    key_seconds: float = 10.0
    pause_seconds: float = 10.0


class Window:
    """The running lines. Belongs to one event loop.

    Keys that could begin more lines have equal shares. A line that may have killed its engine runs while no other line
    of a batch runs in its model.
    """

    def __init__(self, most_running: int, most_bytes: int) -> None:
        self._most_running, self._most_bytes = most_running, most_bytes
        self._bytes = 0
        self._by_key: Counter[str] = Counter()
        self._by_model: Counter[str] = Counter()
        self._alone: Counter[str] = Counter()  # those that run alone, or wait to
        self._changed = asyncio.Event()
        self._waiting: list[tuple[str, Callable[[], bool]]] = []

    async def enter(self, key: str, model: str, size: int, *, alone: bool, most: Callable[[], bool]) -> None:
        """Wait until one more line fits and `most` is true."""
        self._alone[model] += alone
        waiter = (key, most)
        self._waiting.append(waiter)
        try:
            await self.until(lambda: most() and self._fits(key, model, size, alone=alone))
        except BaseException:
            self._alone[model] -= alone
            self.wake()
            raise
        finally:
            self._waiting.remove(waiter)
        self._bytes += size
        self._by_key[key] += 1
        self._by_model[model] += 1

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until the condition is true; it is checked again whenever a line ends."""
        while not true():
            await self._changed.wait()

    def leave(self, key: str, model: str, size: int, *, alone: bool) -> None:
        self._bytes -= size
        self._by_key[key] -= 1
        self._by_model[model] -= 1
        self._alone[model] -= alone
        self.wake()

    def wake(self) -> None:
        """Have all waiters check again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _fits(self, key: str, model: str, size: int, *, alone: bool) -> bool:
        if (self._by_model[model] if alone else self._alone[model]) > 0:
            return False
        running = self._by_key.total()
        keys = {key, *(other for other, could in self._waiting if could())}
        share = self._by_key[key] * len(keys) < self._most_running
        return running == 0 or (share and running < self._most_running and self._bytes + size <= self._most_bytes)


class Runner:
    """All batches of a folder. Use as `async with`, on one event loop; what runs at its end goes on at the next start.

    `draining` says whether the server ends: then no line is begun.
    """

    def __init__(  # noqa: PLR0913  # what a batch is made of
        self,
        store: BatchStore,
        folder: Folder,
        keys: KeyStore,
        lines: Lines,
        limits: BatchLimits = BatchLimits(),
        *,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.store, self.folder, self.keys, self.lines, self.limits = store, folder, keys, lines, limits
        self.draining = draining
        self.window = Window(limits.most_running, limits.most_bytes)
        self.name = secrets.token_hex(16)
        self.answered = Counter[str]()  # lines since the start: ok, error
        self._seen: list[Batch] = []  # that have not ended, as of the last look
        self._runs: dict[str, _Run] = {}
        self._not_before: dict[str, float] = {}
        self._woken = asyncio.Event()
        self._tasks = SideTasks()

    async def __aenter__(self) -> Self:
        await self.folder.open()
        if not self.folder.shared:  # no other process has this data directory
            with suppress(StoreUnavailableError):
                await self.store.release_all(self.folder.place)
        self._tasks.start(self._look_after_all())
        self._tasks.every(_SWEEP_SECONDS, self.sweep)
        self._tasks.start(self.sweep())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop what runs. Its progress is on disk when this returns."""
        await self._tasks.cancel()

    def wake(self, batch: str) -> None:
        """Look now: this batch is new, or has been changed."""
        self._woken.set()
        if run := self._runs.get(batch):
            run.changed.set()

    def load(self) -> BatchLoad:
        """Return what is left to do and what is done, as of the last look."""
        rows = self._seen
        return BatchLoad(
            unfinished=len(rows),
            waiting_lines=sum(row.total - row.completed - row.failed for row in rows),
            oldest_seconds=max((self.store.clock() - row.created_at for row in rows), default=0.0),
            lines=self.answered,
        )

    async def sweep(self) -> None:
        """Delete what has expired, and what no row names."""
        try:
            batches_before = self.store.clock() - self.limits.retention_seconds
            for id_ in await self.store.forget_old(self.folder.place, batches_before=batches_before):
                await self.folder.delete(id_)
            old = await self.folder.run(self.folder.old_now)
            known = {batch.id for batch in await self.store.unfinished(self.folder.place)}
            for first in range(0, len(old), _IDS_PER_QUERY):
                known |= await self.store.known_files(old[first : first + _IDS_PER_QUERY])
            for id_ in old:
                if id_ not in known:
                    await self.folder.delete(id_)
        except (StoreUnavailableError, OSError) as error:
            _log.warning("Old files of batches could not be deleted: %s", getattr(error, "message", error.args[-1:]))

    async def _look_after_all(self) -> None:
        while True:
            self._woken.clear()
            with suppress(StoreUnavailableError):  # its own log says so
                if not self.draining():
                    await self._start_due()
            with suppress(TimeoutError):  # by `timeout`: Python 3.11's `wait_for` loses a cancelling at the same moment
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._woken.wait()

    async def _start_due(self) -> None:
        """Take up batches that are due: the oldest of each key, the keys in turn."""
        rows = await self.store.unfinished(self.folder.place)
        self._seen = rows
        ranks = Counter[str]()
        due: list[tuple[int, str, Batch]] = []
        for row in rows:
            if run := self._runs.get(row.id):
                run.see(row)
            ranks[row.key_id] += 1
            due.append((0 if row.status == "cancelling" else ranks[row.key_id], row.id, row))
        running = Counter(run.row.key_id for run in self._runs.values())
        for rank, id_, row in sorted(due, key=lambda one: one[:2]):
            if id_ in self._runs or self._not_before.get(id_, 0.0) > time.monotonic():
                continue
            full = len(self._runs) >= _MOST_RUNS or running[row.key_id] >= _MOST_RUNS_OF_KEY
            if (full and rank) or not await self.store.lease(id_, self.name, _LEASE_SECONDS):
                continue
            running[row.key_id] += 1
            self._runs[id_] = run = _Run(self, row)
            self._tasks.start(self._run(run))

    async def _run(self, run: "_Run") -> None:
        id_ = run.row.id
        try:
            await run.go()
            self._not_before.pop(id_, None)
        except (StoreUnavailableError, OSError) as error:
            self._not_before[id_] = time.monotonic() + self.limits.pause_seconds
            why = error.message if isinstance(error, StoreUnavailableError) else error.strerror
            _log.warning("The batch %s cannot go on, and will be tried again: %s", id_, why)
        except Exception:  # noqa: BLE001  # of this batch alone; the others go on
            self._not_before[id_] = time.monotonic() + _LONGEST_PAUSE_SECONDS
            _log.exception("the batch %s cannot go on, and will be tried again", id_)
        finally:
            del self._runs[id_]
            await self.folder.run(self.folder.leave_now, id_)
            with suppress(StoreUnavailableError):
                await self.store.release(id_, self.name)
            self._woken.set()


class _Run:
    """The run of one batch in this process, from where it was left."""

    _reader: LineReader  # these are there once its lines are to be answered
    _index: Index
    _journal: Journal

    def __init__(self, runner: Runner, row: Batch) -> None:
        self.row = row
        self.changed = asyncio.Event()
        self._runner = runner
        self._store, self._folder, self._limits = runner.store, runner.folder, runner.limits
        self._key: ApiKey | None = None
        self._key_read_at = -math.inf
        self._renewed_at = time.monotonic()
        self._tally = Tally()
        self._written: tuple[int, ...] = ()
        self._retries: deque[Line] = deque()
        self._at_work = 0
        self._width = float(runner.limits.most_running)
        self._resume_at = 0.0

    def see(self, row: Batch) -> None:
        if row.status == "cancelling" != self.row.status:
            self.changed.set()

    async def go(self) -> None:
        """Run the batch to its end. Raises StoreUnavailableError and OSError: then it is to be taken up again later."""
        if self.row.status == "validating" and not await self._validated():
            return
        if self.row.in_progress_at is None:  # cancelled before anything was begun
            await self._move(("cancelling",), "cancelled")
            return
        try:
            reader = await self._folder.run(self._open_input)
        except FileNotFoundError:
            gone = {"code": "file_not_found", "line": None, "message": "The input file is gone.", "param": None}
            await self._move(UNFINISHED, "failed", errors=[gone])
            return
        with closing(reader) as self._reader, closing(await self._folder.run(self._read_journal)) as self._index:
            self._tally = self._index.tally
            if self.row.status == "cancelling":
                ending: Ending | None = "cancelled"
            elif self.row.status == "finalizing" or self._store.clock() >= self.row.expires_at:
                ending = "expired"
            else:
                ending = "cancelled" if await self._usable_key() is None else await self._answered()
            if ending is not None:
                await self._finish(ending)

    async def _validated(self) -> bool:
        """Check the envelopes of all lines; False if the batch has ended with that."""
        key = await self._usable_key()
        if key is None:
            return False
        check = Check(
            self.row.endpoint,
            self._limits.most_lines,
            self._limits.most_line_bytes,
            lambda name: self._runner.lines.model_id(key, name),
        )
        try:
            reader = await self._folder.run(self._open_input)
        except FileNotFoundError:
            check.add("file_not_found", "The input file is gone.", None)
        else:
            with closing(reader):
                while not check.ended and await self._folder.run(_check_slice, check, reader):
                    await asyncio.sleep(_SLICE_PAUSE_SECONDS)
                    await self._renew()
            check.end()
        if check.errors:
            await self._move(("validating",), "failed", errors=check.errors)
            return False
        if not await self._move(("validating",), "in_progress", total=check.lines, model=check.model):
            return False  # cancelled meanwhile: the next look takes it up
        self.row = await self._store.batch(self.row.id) or self.row
        return True

    async def _move(self, expected: Iterable[Status], status: Status, **fields: Any) -> bool:
        """Move the batch from one of these states to another; False if it is in none, or another process runs it."""
        return await self._store.move(self.row.id, expected, status, runner=self._runner.name, **fields)

    def _read_journal(self) -> Index:
        return Index(self._folder.journal_now(self.row.id), self.row.total)

    def _open_input(self) -> LineReader:
        file = self._folder.input_now(self.row.id, self.row.input_file_id)
        return LineReader(file, most_lines=self._limits.most_lines, most_line_bytes=self._limits.most_line_bytes)

    async def _answered(self) -> Ending | None:
        """Answer the lines; None: this process must not go on with the batch."""
        async with Journal(self._folder, self.row.id, self._index.next_segment) as self._journal:
            tasks = {asyncio.create_task(self._feed()), asyncio.create_task(self._watch())}
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            return next(iter(done)).result()

    async def _watch(self) -> Ending | None:
        """Save the progress. Return why the batch ends early, or None if another process may run it."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_KEEP_UP_SECONDS):
                    await self.changed.wait()
            changed = self.changed.is_set()
            self.changed.clear()
            if self._store.clock() >= self.row.expires_at:
                return "expired"
            try:
                if await self._usable_key() is None:
                    return "cancelled"
                counted = (self._tally.completed, self._tally.failed)
                if counted == self._written and time.monotonic() - self._renewed_at < _RENEW_SECONDS and not changed:
                    continue
                row = await self._store.keep_up(self.row.id, self._runner.name, _LEASE_SECONDS, self._progress())
            except StoreUnavailableError:
                if self._folder.shared and time.monotonic() - self._renewed_at > _LEASE_SECONDS:
                    return None  # another process may have it by now
                continue
            self._renewed_at, self._written = time.monotonic(), counted
            if row is None:
                return None
            self.row = row
            if row.status == "cancelling":
                return "cancelled"

    def _progress(self) -> dict[str, Any]:
        return {"completed": self._tally.completed, "failed": self._tally.failed, "usage": self._tally.usage()}

    async def _renew(self) -> None:
        if time.monotonic() - self._renewed_at < _RENEW_SECONDS:
            return
        self._renewed_at = time.monotonic()
        if await self._store.keep_up(self.row.id, self._runner.name, _LEASE_SECONDS, {}) is None:
            raise StoreUnavailableError("Another server runs it.")

    async def _usable_key(self) -> ApiKey | None:
        """Return the key of the batch, or its successor; None: no key is usable, so the batch is cancelled.

        The last answer of the store counts for some seconds.
        """
        if self._key is not None and time.monotonic() - self._key_read_at < self._limits.key_seconds:
            return self._key
        now, name = self._runner.keys.clock(), self.row.key_id
        key = None
        with suppress(KeyNotFoundError):
            key = await self._runner.keys.find(name)
            while not key.usable_at(now) and key.replaced_by is not None:
                key = await self._runner.keys.find(key.replaced_by)
        if key is None or not key.usable_at(now) or "batch" not in key.scopes:
            sentence = "The key that made this batch is revoked, has expired, or may run no batches any more."
            error = {"code": "key_revoked", "line": None, "message": sentence, "param": None}
            await self._move(("validating", "in_progress"), "cancelling", errors=[error])
            return None
        self._key, self._key_read_at = key, time.monotonic()
        return key

    async def _feed(self) -> Ending | None:
        """Answer every line that has no record, as many at a time as the window allows."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._feed_to(group)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return "completed"

    async def _feed_to(self, group: asyncio.TaskGroup) -> None:
        ahead: deque[Line] = deque()
        more = True
        while True:
            if more and not ahead:
                found = await self._folder.run(self._reader.read_slice, lambda number: not self._index.has(number))
                ahead.extend(found)
                more = bool(found)
            if not ahead and not self._retries:
                if not self._at_work and not more:
                    return
                await self._runner.window.until(lambda: bool(self._retries) or not self._at_work)
                continue
            await self._journal.room()
            if (pause := self._resume_at - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            line = self._retries.popleft() if self._retries else ahead.popleft()
            if line.text is None:
                line.text = await self._folder.run(self._reader.read_again, line)
            await self._begin(line, group)

    async def _begin(self, line: Line, group: asyncio.TaskGroup) -> None:
        envelope = envelope_of(line.text or b"")
        model = "" if envelope is None else model_of(envelope.body) or ""
        alone = line.deaths >= _MOST_DEATHS
        window = self._runner.window
        await window.enter(self.row.key_id, model, line.size, alone=alone, most=self._may_begin)
        self._at_work += 1
        task = group.create_task(self._answer(line, envelope, alone=alone))
        task.add_done_callback(lambda _: self._ended(line, model, alone=alone))
        await asyncio.sleep(0)  # checking all of them without a pause would hold up other requests

    def _may_begin(self) -> bool:
        return self._at_work < self._width and not self._runner.draining()

    def _ended(self, line: Line, model: str, *, alone: bool) -> None:
        self._at_work -= 1
        self._runner.window.leave(self.row.key_id, model, line.size, alone=alone)

    async def _answer(self, line: Line, envelope: Any, *, alone: bool) -> None:
        """Answer one line and append its record, or put the line back."""
        assert self._key is not None  # noqa: S101  # it was asked for before the lines
        request_id = f"req_{secrets.token_hex(12)}"
        tokens: tuple[int, ...] = (0, 0, 0, 0)
        try:
            body = await self._parsed(envelope.body)
            answer = await self._runner.lines.answer(self.row.endpoint, self._key, request_id, body)
        except Exception as error:  # noqa: BLE001  # a line's failure is its own, whatever it is
            api_error = to_api_error(error)
            if self._put_back(line, error, api_error, alone=alone):
                line.text = None
                self._retries.append(line)
                return
            status, answer = api_error.status, {"error": api_error.body()}
        else:
            status, tokens = 200, usage_of(answer)
            self._width = min(self._width + 1, self._limits.most_running)
        ok = status < 400
        data = encode_line(string_in(envelope.custom_id), request_id, status, answer)
        self._journal.append(encode(line.index, data, ok=ok, tokens=tokens))
        self._tally.add(ok=ok, tokens=tokens)
        self._runner.answered["ok" if ok else "error"] += 1

    async def _parsed(self, body: Any) -> Any:
        text = bytes(body)
        if len(text) <= _PARSED_BESIDE_BYTES:
            return parse_strict_json(text)
        return await self._folder.run(parse_strict_json, text)

    def _put_back(self, line: Line, error: Exception, api_error: ApiError, *, alone: bool) -> bool:
        """Whether to answer the line again later; if not, its record is the error."""
        cause = error.__cause__ if isinstance(error, ApiError) else error
        if isinstance(cause, EngineDiedError):
            line.deaths += 1
            line.deaths_alone += alone
            self._slow_down(_DEATH_PAUSE_SECONDS)
            return line.deaths_alone < _MOST_DEATHS
        never = api_error.headers.get("x-should-retry") == "false"
        if (api_error.status == 429 and not never) or api_error.status == 503:
            self._slow_down(_LONGEST_PAUSE_SECONDS if never else float(api_error.headers.get("Retry-After", 5)))
            return True
        if api_error.status >= 500:
            line.failures += 1
            return line.failures < _MOST_FAILURES
        return False

    def _slow_down(self, seconds: float) -> None:
        """Begin no line for so long, and then fewer at a time."""
        now = time.monotonic()
        if now >= self._resume_at:
            self._width = max(1.0, min(self._width, self._at_work) / 2)
        self._resume_at = max(self._resume_at, now + min(seconds, _LONGEST_PAUSE_SECONDS))

    async def _finish(self, ending: Ending) -> None:
        """Make the files of the batch. If lines have no record, it has expired or was cancelled."""
        id_ = self.row.id
        if ending != "cancelled" and not await self._move(("in_progress", "finalizing"), "finalizing"):
            ending = "cancelled"
        index = await self._folder.run(Index, self._folder.journal(id_), self.row.total)
        with closing(index), closing(await self._folder.run(self._open_input)) as reader:
            made = await self._folder.run(write_output, self._folder, reader, index, ending)
        self._tally = index.tally
        if ending == "expired" and index.tally.completed + index.tally.failed == self.row.total:
            ending = "completed"
        now = int(self._store.clock())
        seconds = self.row.output_seconds or int(self._limits.retention_seconds)
        files = [
            StoredFile(
                id=one.id,
                key_id=self.row.key_id,
                place=self._folder.place,
                purpose="batch_output",
                filename=f"{id_}_{kind}.jsonl",
                bytes=one.bytes,
                created_at=now,
                expires_at=now + seconds,
            )
            for kind, one in made.items()
        ]
        fields = self._progress() | {f"{kind}_file_id": one.id for kind, one in made.items()}
        before: Status = "cancelling" if ending == "cancelled" else "finalizing"
        if await self._move((before,), ending, files=files, **fields):
            await self._folder.delete(id_)
        else:
            for one in files:
                await self._folder.delete(one.id)


def _check_slice(check: Check, reader: LineReader) -> bool:
    """Check about a MiB of lines; False at the end of the file. Blocks."""
    try:
        lines = reader.read_slice()
    except TooManyLinesError:
        check.too_many()
        return False
    for line in lines:
        if check.ended:
            break
        check.take(line)
    return bool(lines)
