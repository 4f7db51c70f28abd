"""The load generator, a process of its own: it sends requests over HTTP and notes when each piece of an answer arrived.

Cheap on purpose, because it may share cores with the server: a stream is kept as it was read, and parsed after the
clock has stopped. With `run_vllm` it runs `vllm bench serve` instead.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TypeAlias, cast

import httptools
import msgspec
import uvloop

NUMBER = "#N#"  # in a body: replaced by the job's label and the request's number, so that no prompt is sent twice
CHAT = "/v1/chat/completions"
TEXT = "Write a few sentences about the weather, the garden and the people who meet there in the evening."
_LONGEST_JOB_SECONDS = 3600.0
_PAUSE_SECONDS = 0.05  # after a refusal
_SHOWN_BYTES = 300
_LOG_LINES = 15
_EVENT_END = re.compile(rb"\n\r?\n")
_TEXT = re.compile(rb'"content":\s*"[^"]')  # the role chunk that some servers send first has an empty one
_USAGE = re.compile(rb'"usage":\s*\{')
_SPAWN = multiprocessing.get_context("spawn")
Work: TypeAlias = Callable[[Any], Coroutine[Any, Any, Any]]  # does a job and returns its result; raises `BenchError`


class BenchError(Exception):
    """The benchmark cannot go on; the message says why and what to do."""


class LoadJob(msgspec.Struct, frozen=True):
    """What is sent: the `bodies` in order, over and over.

    The keys are `key` and `more_keys`, in turns. Closed loop: `streams` connections, each of which sends its next
    request when its last is answered, until `requests` are sent or `seconds` are over; then the rest is aborted.
    Open loop: one request at each of `moments` (seconds from the start), whether earlier ones are answered or not.
    A client disconnects after `leave_after_seconds`. A `strict` job ends with the first answer that is not a success.
    `beside` is a closed loop that begins `lead_seconds` earlier and is aborted at the end; only answers that ended
    meanwhile count.
    """

    host: str
    port: int
    key: str
    label: str
    bodies: list[Any]
    path: str = CHAT
    streams: int = 0
    requests: int = 0
    seconds: float = 0.0
    moments: list[float] = []
    leave_after_seconds: float | None = None
    more_keys: list[str] = []
    strict: bool = True
    keep_bodies: bool = False
    beside: "LoadJob | None" = None
    lead_seconds: float = 0.0


class Answer(msgspec.Struct):
    """One answer. Times are seconds from the start of the job; `asked` is when the request should have been sent."""

    number: int
    asked: float
    started: float
    finished: float = 0.0
    status: int = 0
    retry_after: str = ""
    streamed: bool = False
    text_times: list[float] = []  # of a stream
    tokens: int = 0  # by the server's own count
    left: bool = False
    problem: str = ""  # why it is not a complete success
    body: str = ""
    first_piece: float = 0.0
    pieces: list[tuple[float, bytes]] = []  # of the body, each with the moment at which it came; until it is parsed

    @property
    def seconds(self) -> float:
        """How long it took, counted from when it should have been sent."""
        return self.finished - self.asked

    @property
    def refused(self) -> bool:
        """Whether it was refused correctly, with a time to retry."""
        return self.status in {429, 503} and self.retry_after.isdigit()


class LoadResult(msgspec.Struct):
    """The answers that ended within the job; `cpu_seconds` is what the load generator itself used."""

    wall_seconds: float
    cpu_seconds: float
    answers: list[Answer]
    beside: "LoadResult | None" = None

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def latencies(self) -> list[float]:
        return [answer.seconds for answer in self.answers]

    @property
    def first_texts(self) -> list[float]:
        return [answer.text_times[0] - answer.asked for answer in self.answers if answer.text_times]

    @property
    def gaps(self) -> list[float]:
        return [after - before for answer in self.answers for before, after in pairwise(answer.text_times)]


def chat_body(model: str, max_tokens: int, *, streamed: bool = True, text: str = TEXT) -> dict[str, Any]:
    """Return a request for an answer of exactly `max_tokens` tokens, with a prompt that is new each time."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"{NUMBER}. {text}"}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": streamed,
    }
    return body | ({"stream_options": {"include_usage": True}} if streamed else {})


def beats(seconds: float, every_seconds: float, seed: int, jitter: float = 1.0) -> list[float]:
    """Return one moment in each interval; `seed` decides where in its first part `jitter`."""
    source, count = random.Random(seed), max(1, round(seconds / every_seconds))  # noqa: S311  # repeatable on purpose
    return [(number + jitter * source.random()) * every_seconds for number in range(count)]


class Connection(asyncio.Protocol):
    """A keep-alive connection for one request at a time; it keeps the pieces of an answer and their times."""

    transport: asyncio.Transport
    _answer: Answer
    _start = 0.0

    def __init__(self) -> None:
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def send(self, request: bytes, answer: Answer, start: float) -> None:
        """Send a request and fill in `answer`; times count from `start`."""
        self._answer, self._start = answer, start
        self._parser = httptools.HttpResponseParser(self)
        self._end = asyncio.get_running_loop().create_future()
        answer.problem = "it has no end"
        answer.started = time.perf_counter() - start
        self.transport.write(request)
        try:
            answer.problem = await self._end
        finally:
            answer.finished = time.perf_counter() - start
            if answer.problem or not self._parser.should_keep_alive():
                self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(f"the connection was closed before the end ({exc or 'no error'})")

    def data_received(self, data: bytes) -> None:
        self._came_at = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"not HTTP/1.1: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._answer.streamed = value.startswith(b"text/event-stream")
        elif name.lower() == b"retry-after":
            self._answer.retry_after = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._answer.pieces.append((self._came_at - self._start, body))

    def on_message_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        self._finish("")

    def _finish(self, problem: str) -> None:
        if not self._end.done():
            self._end.set_result(problem)


def parse(answer: Answer, *, keep_body: bool = False) -> None:
    """Fill in an answer from the pieces of its body."""
    pieces, answer.pieces = answer.pieces, []
    body = last = b"".join(data for _, data in pieces)
    answer.first_piece = pieces[0][0] if pieces else answer.finished
    complete = answer.status == 200
    if answer.streamed:
        begun, complete = b"", False
        for moment, data in pieces:
            *events, begun = _EVENT_END.split(begun + data)
            for event in events:
                if _TEXT.search(event):
                    answer.text_times.append(moment)
                elif event.startswith(b"data: [DONE]"):
                    complete = answer.status == 200
                elif _USAGE.search(event) or b'"error"' in event:
                    last = event
    answer.body = body.decode(errors="replace") if keep_body else ""
    if not complete:
        shown = last[:_SHOWN_BYTES].decode(errors="replace").strip()
        answer.problem = answer.problem or f"status {answer.status}: {shown or 'not complete'}"
    elif _USAGE.search(last):
        with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
            content: Any = msgspec.json.decode(last.removeprefix(b"data:"))
            answer.tokens = int(content["usage"]["completion_tokens"])


class Load:
    def __init__(self, job: LoadJob) -> None:
        self._job = job
        self._bodies = [msgspec.json.encode(body) for body in job.bodies]
        self._numbers: Iterator[int] = iter(range(job.requests)) if job.requests else count()
        self._idle: list[Connection] = []
        self._done: list[Answer] = []
        self.start = 0.0

    async def open(self) -> None:
        """Open the connections of streams before the clock starts. Raises `BenchError`."""
        self._idle += await asyncio.gather(*(self._open() for _ in range(self._job.streams)))

    async def run(self) -> None:
        """Send everything. Raises `BenchError` for the first answer of a strict job that is not a success."""
        self.start = time.perf_counter()
        try:
            if self._job.moments:
                await asyncio.gather(*(self._ask(number, moment) for number, moment in enumerate(self._job.moments)))
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._job.seconds or None):
                        await asyncio.gather(*(self._stream() for _ in range(self._job.streams)))
        finally:
            for connection in self._idle:
                connection.transport.abort()

    async def _stream(self) -> None:
        for number in self._numbers:
            answer = await self._ask(number, self._now())
            if answer.refused:
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _ask(self, number: int, asked: float) -> Answer:
        if (early := asked - self._now()) > 0:
            await asyncio.sleep(early)
        while self._idle and self._idle[-1].transport.is_closing():
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await self._open()
        answer = Answer(number, asked, 0.0)
        try:
            async with asyncio.timeout(self._job.leave_after_seconds):
                await connection.send(self._encode(number), answer, self.start)
        except TimeoutError:
            answer.left, answer.pieces = True, []
        finally:
            if not connection.transport.is_closing():
                self._idle.append(connection)
        if self._job.strict and answer.status != 200 and not answer.left:
            parse(answer)
            raise BenchError(f"an answer is not a success. {answer.problem}")
        self._done.append(answer)
        return answer

    async def _open(self) -> Connection:
        try:
            loop = asyncio.get_running_loop()
            return (await loop.create_connection(Connection, self._job.host, self._job.port))[1]
        except OSError as error:
            raise BenchError(f"cannot connect to {self._job.host} port {self._job.port}: {error}") from error

    def _encode(self, number: int) -> bytes:
        body = self._bodies[number % len(self._bodies)].replace(NUMBER.encode(), f"{self._job.label}-{number}".encode())
        keys = [self._job.key, *self._job.more_keys]
        head = (
            f"POST {self._job.path} HTTP/1.1\r\nHost: {self._job.host}\r\n"
            f"Authorization: Bearer {keys[number % len(keys)]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _now(self) -> float:
        return time.perf_counter() - self.start

    def answers(self, since: float = 0.0) -> list[Answer]:
        """Return the answers that ended at `since` or later. Raises `BenchError`, as `run` does."""
        for answer in self._done:
            parse(answer, keep_body=self._job.keep_bodies)
        answers = [answer for answer in self._done if answer.finished >= since]
        problem = next((one.problem for one in answers if one.problem and not one.left), "")
        if self._job.strict and problem:
            raise BenchError(f"an answer is not a success. {problem}")
        return answers


async def run_load(job: LoadJob) -> LoadResult:
    """Do one job. Raises `BenchError`."""
    load, beside, background = Load(job), Load(job.beside or job), None
    if job.beside is not None:
        await beside.open()
        background = asyncio.create_task(beside.run())
        await asyncio.sleep(job.lead_seconds)
    try:
        await load.open()
        cpu = time.process_time()
        await load.run()
        wall, cpu = time.perf_counter() - load.start, time.process_time() - cpu
        if background is not None and background.done():
            background.result()
    finally:
        if background is not None:
            background.cancel()
            await asyncio.wait([background])
    result = LoadResult(wall, cpu, load.answers())
    if job.beside is not None:
        result.beside = LoadResult(wall, 0.0, beside.answers(since=load.start - beside.start))
    return result


async def run_vllm(job: tuple[str, list[str]]) -> dict[str, Any]:
    """Do one run of `vllm bench serve` with a key and command line arguments. Raises `BenchError`.

    Return its result document and `load_cpu_seconds`.
    """
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    os.environ["OPENAI_API_KEY"], arguments = job  # not on a command line, where `ps` shows it
    cpu = time.process_time()
    result: dict[str, Any] = await serve.main_async(parser.parse_args(arguments))
    result["load_cpu_seconds"] = time.process_time() - cpu
    if result["failed"] or not result["completed"]:
        raise BenchError(f"{result['failed']} of {result['num_prompts']} requests of vllm bench serve failed.")
    return json.loads(json.dumps(result, default=float))  # type: ignore[no-any-return]  # numpy's numbers


@contextmanager
def load_generator(environment: dict[str, str], log: Path, work: Work = run_load) -> Iterator[Work]:
    """Run a process that does `work`, one job at a time, and ends at the block's end; its output goes to `log`."""
    pool = ProcessPoolExecutor(1, _SPAWN, _begin, (environment, log))

    async def generator(job: Any) -> Any:
        try:
            async with asyncio.timeout(_LONGEST_JOB_SECONDS):
                return await asyncio.wrap_future(pool.submit(_do, work, job))
        except (BenchError, BrokenProcessPool, TimeoutError) as error:
            why = str(error) or f"no sign of it for {_LONGEST_JOB_SECONDS:.0f} s"
            raise BenchError(f"The load generator reports: {why}{tail(log)}") from None

    try:
        yield generator
    finally:
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown()


def _begin(environment: dict[str, str], log: Path) -> None:
    os.setsid()  # Ctrl-C reaches only the parent, which ends its children in order
    os.environ.clear()
    os.environ.update(environment)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # a connection is an open file
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def _do(work: Work, job: Any) -> Any:
    return uvloop.run(work(job))


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
    return "\n" + "\n".join(f"  | {line}" for line in lines) if lines else ""
