"""Compiles every new JSON schema once outside the engine, in a process that can be killed, before the engine sees it.

vLLM compiles schemas in its engine process, on few threads, and nothing stops it: one schema that takes minutes would
hold up everybody's structured output. Here it costs its own sender 10 s. What a process does is in
grammar_process.py, which schemas need none of this in grammars.py.

Measured with a vocabulary of 151,000 tokens: a schema below the line of `is_light` takes 5 ms of the event loop once
(the same check that vLLM makes there) and at most 0.4 s of one core in the engine; one above it is compiled twice,
which is 50 ms more for ten properties with `$defs`, and nothing the second time. A process is forked in 0.5 s (spawned
on CUDA: as long as importing vLLM takes) when it is first needed, and ends after five idle minutes.

What vLLM is given to compile: JSON without endless whitespace, and which of it is too small to be a danger.

Pure functions over requests and structural tags; nothing is compiled here.

The processes that compile grammars: started when needed, killed at a deadline, replaced when gone.

Knows nothing of requests or of what was asked before: that is grammars.py.

Lets a few jobs run at a time, a bounded number of them for one owner; those who wait go in turn, owner by owner.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from engine.backends.vllm import compat
from engine.backends.vllm.grammar_process import LENGTH, serve
from engine.backends.vllm.processes import process_context
from engine.errors import GrammarTooComplexError, OverloadedError, RequestError, UnavailableError, engine_died

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.backends.vllm.processes import StarterThread


COMPILE_SECONDS = 10.0
# Three keys with two bombs each fill all of these. They are niced, so that engines do not feel them.
_COMPILERS = 6
_PER_OWNER = 2
_MOST_WAITING = 128
_WAIT_SECONDS = 30.0
_REMEMBERED = 4096
# A verdict "too complex" may have been a busy machine's fault.
_FORGET_SECONDS = 600.0
# From here on the turn is kept for as long again: the engine now compiles the same.
_SLOW_SECONDS = 0.25


@dataclass(slots=True)
class _Job:
    """A grammar that is being judged, and how many requests wait for it."""

    task: asyncio.Task[Verdict]
    waiting: int = 0
    began: bool = False


class Grammars:
    """Judges the grammars of one loaded model. Made and used in one event loop."""

    def __init__(self, config: Any, starter: StarterThread, *, compile_seconds: float = COMPILE_SECONDS) -> None:
        self._compilers = Compilers(config, starter)
        self._compile_seconds = compile_seconds
        self._turns = FairTurns(
            _COMPILERS, per_owner=_PER_OWNER, most_waiting=_MOST_WAITING, wait_seconds=_WAIT_SECONDS
        )
        self._verdicts: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()
        self._jobs: dict[tuple[str, bytes], _Job] = {}

    async def bind_format(self, request: Any, owner: str) -> None:
        """Put the `response_format` of vLLM's request into the form that is compiled, and `check` that."""
        tag = format_tag(request.response_format)
        if tag is None:
            return
        if _asks_too_much(request.response_format.json_schema):
            raise RequestError(
                "`response_format` is `strict`, but its JSON schema uses keywords that cannot be enforced (such as "
                "`multipleOf`, `uniqueItems`, `contains`, several schemas in `allOf`, `pattern` together with "
                "`minLength` or `maxLength`). Take them out, or leave `strict` out to have the rest enforced.",
                param="response_format",
            )
        await self._bind(request, tag, owner, "response_format")

    async def bind_tools(self, request: Any, owner: str) -> None:
        """Do the same with what vLLM's parsers have made of the tools. After rendering."""
        made = request.structured_outputs
        if made is None or made._backend is not None:  # noqa: SLF001  # nothing, or as `bind_format` left it
            return
        field = "tools" if request.tools else "response_format"
        if made.structural_tag is not None:
            await self._bind(request, without_padding(made.structural_tag), owner, field)
            return
        from vllm.v1.structured_output.request import get_structured_output_key

        kind, grammar = get_structured_output_key(made)
        await self.check(kind.name, grammar, owner=owner, field=field)
        _choose_backend(made)

    async def check(self, kind: str, grammar: str, *, owner: str, field: str) -> None:
        """Return when the engine may compile `grammar`; `kind` is the name of vLLM's option. At once for known ones.

        `field` is what the errors name. Raises `GrammarTooComplexError`, `RequestError` for what is no schema,
        `OverloadedError` when too many wait, `UnavailableError`. Cancelling gives up the place in the queue.
        """
        digest = hashlib.sha256(f"{kind} {grammar}".encode()).digest()
        verdict = self._remembered(digest)
        if verdict is None and kind == "STRUCTURAL_TAG" and is_light(grammar):
            verdict = _parsed(grammar)
            self._remember(digest, verdict)
        if verdict is None:
            verdict = await self._judged(kind, grammar, owner, digest)
        if verdict == Verdict.TOO_COMPLEX:
            raise GrammarTooComplexError(
                f"`{field}` holds a JSON schema that cannot be prepared for this model within "
                f"{self._compile_seconds:.0f} seconds and bounded memory. Make it simpler: fewer optional properties "
                "and alternatives (`anyOf`), no long or nested repeats in patterns, a smaller `maxLength` and "
                "`maxItems`.",
                param=field,
            )
        if verdict == Verdict.INVALID:
            raise RequestError(
                f"`{field}` holds a JSON schema that cannot be followed: it is not valid, or uses keywords that are "
                "not supported.",
                param=field,
            )

    def close(self) -> None:
        """End all processes at once; whoever waits gets `EngineDiedError`."""
        self._compilers.close()

    async def _bind(self, request: Any, tag: str, owner: str, field: str) -> None:
        from vllm.sampling_params import StructuredOutputsParams

        await self.check("STRUCTURAL_TAG", tag, owner=owner, field=field)
        request.structured_outputs = StructuredOutputsParams(structural_tag=tag)
        _choose_backend(request.structured_outputs)
        request.response_format = None

    async def _judged(self, kind: str, grammar: str, owner: str, digest: bytes) -> Verdict:
        """Share one judgement among the owner's requests with the same grammar. It ends with the last that waits."""
        job = self._jobs.get((owner, digest))
        if job is None:
            job = _Job(asyncio.create_task(self._judge(kind, grammar, owner, digest)))
            self._jobs[owner, digest] = job
            job.task.add_done_callback(lambda _: self._jobs.pop((owner, digest), None))
            job.task.add_done_callback(_looked_at)
        job.waiting += 1
        try:
            return await asyncio.shield(job.task)
        finally:
            job.waiting -= 1
            # What runs goes on: leaving and coming back must not buy a second attempt.
            if not job.waiting and not job.began and not job.task.done():
                self._jobs.pop((owner, digest), None)
                job.task.cancel()

    async def _judge(self, kind: str, grammar: str, owner: str, digest: bytes) -> Verdict:
        await self._turns.enter(owner)
        seconds = 0.0
        try:
            if job := self._jobs.get((owner, digest)):
                job.began = True
            known = self._remembered(digest)
            if known is not None:
                return known
            verdict, seconds = await self._compilers.compile(kind, grammar, self._compile_seconds)
            self._remember(digest, verdict)
            return verdict
        finally:
            kept_seconds = seconds if seconds >= _SLOW_SECONDS else 0.0
            asyncio.get_running_loop().call_later(kept_seconds, self._turns.leave, owner)

    def _remembered(self, digest: bytes) -> Verdict | None:
        verdict, until = self._verdicts.get(digest, (None, 0.0))
        if verdict is None or until < asyncio.get_running_loop().time():
            return None
        self._verdicts.move_to_end(digest)
        return verdict

    def _remember(self, digest: bytes, verdict: Verdict) -> None:
        forever = verdict != Verdict.TOO_COMPLEX
        until = float("inf") if forever else asyncio.get_running_loop().time() + _FORGET_SECONDS
        self._verdicts[digest] = (verdict, until)
        if len(self._verdicts) > _REMEMBERED:
            self._verdicts.popitem(last=False)


def _choose_backend(made: Any) -> None:
    """Spare vLLM its own choice, a check that runs on the event loop: ours has run. See build_chat."""
    if compat.fits("grammar check"):
        made._backend = "xgrammar"  # noqa: SLF001


def _asks_too_much(form: Any) -> bool:
    if form is None or not form.strict or not isinstance(form.json_schema, dict):
        return False
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    return bool(has_xgrammar_unsupported_json_features(form.json_schema))


def _parsed(tag: str) -> Verdict:
    """What vLLM would check on the event loop: a light one takes 5 ms."""
    import xgrammar

    try:
        xgrammar.Grammar.from_structural_tag(tag)
    except Exception:  # noqa: BLE001  # xgrammar raises many kinds, all of them about the grammar
        return Verdict.INVALID
    return Verdict.FINE


def _looked_at(task: asyncio.Task[Verdict]) -> None:
    if not task.cancelled():
        task.exception()  # also where nobody waits any more


# A weak model pads with spaces and newlines until `max_tokens` where the grammar lets it: one at a time is enough.
_MOST_WHITESPACE = 1

_LIGHT_BYTES = 16 * 2**10
_LIGHT_NODES = 24
_LIGHT_ENUM = 64
# Keywords that make no grammar, and those that make one no larger than what is written down.
_SILENT = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "deprecated", "readOnly", "strict"}
)
_PLAIN = frozenset({"type", "required", "const"})
_NESTED = frozenset({"items", "additionalProperties", "anyOf", "oneOf", "properties"})


def format_tag(form: Any) -> str | None:
    """Return the structural tag of a `response_format` (vLLM's object), None where it asks for text."""
    if form is None or form.type not in {"json_object", "json_schema"}:
        return None
    schema: Any = {"type": "object"}
    if form.type == "json_schema":
        schema = form.json_schema.json_schema
        schema = True if schema is None else schema
    return json.dumps(
        {
            "type": "structural_tag",
            "format": {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_WHITESPACE},
        }
    )


def without_padding(tag: str) -> str:
    """Bound the whitespace of all JSON in a structural tag, like the one that a tool parser makes.

    The XML-like styles of some models are left alone: whitespace is part of what these were trained on.
    """
    whole = json.loads(tag)
    for node in _schemas(whole):
        if node.get("style", "json") == "json":
            node["max_whitespace_cnt"] = _MOST_WHITESPACE
    return json.dumps(whole)


def is_light(tag: str) -> bool:
    """Whether a structural tag compiles in no time, whatever it says.

    The line is drawn at keywords whose grammar is no larger than their text, `_LIGHT_NODES` schemas in all.
    """
    if len(tag) > _LIGHT_BYTES:
        return False
    left = _LIGHT_NODES
    waiting = [node["json_schema"] for node in _schemas(json.loads(tag))]
    while waiting:
        schema = waiting.pop()
        left -= 1
        if left < 0 or not _is_plain(schema):
            return False
        if isinstance(schema, dict):
            waiting += _parts(schema)
    return True


def _schemas(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the formats of a structural tag that hold a JSON schema. What is within a schema is the client's."""
    if isinstance(node, list):
        for item in node:
            yield from _schemas(item)
    elif isinstance(node, dict) and node.get("type") == "json_schema" and "json_schema" in node:
        yield node
    elif isinstance(node, dict):
        for item in node.values():
            yield from _schemas(item)


def _is_plain(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    enum = schema.get("enum", [])
    known = set(schema) <= _SILENT | _PLAIN | _NESTED | {"enum"}
    # Any other name means a grammar that excludes all the named ones: 1.6 s for 38 of them.
    open_ended = schema.get("additionalProperties", False) is not False and "properties" in schema
    return known and not open_ended and isinstance(enum, list) and len(enum) <= _LIGHT_ENUM


def _parts(schema: dict[str, Any]) -> list[Any]:
    parts: list[Any] = []
    for keyword in _NESTED & set(schema):
        value = schema[keyword]
        if isinstance(value, list):
            parts += value
        elif keyword == "properties" and isinstance(value, dict):
            parts += value.values()
        else:
            parts.append(value)
    return parts


_log = logging.getLogger("hearth.engine")

_START_SECONDS = 120.0
# Of one that is kept at hand, and of any more than that.
_IDLE_SECONDS = 300.0
_SPARE_SECONDS = 20.0


class Verdict(Enum):
    """What became of a grammar."""

    FINE = "fine"
    INVALID = "invalid"
    TOO_COMPLEX = "too complex"


class Compilers:
    """As many processes as there are compilations at the same time. The caller bounds these."""

    def __init__(self, config: Any, starter: StarterThread) -> None:
        self._config = config
        self._starter = starter
        self._idle: list[_Compiler] = []
        self._all: set[_Compiler] = set()
        self._closed = False

    async def compile(self, kind: str, grammar: str, limit_seconds: float) -> tuple[Verdict, float]:
        """Return the verdict and how many seconds the compilation took.

        A process that dies is not the grammar's fault the first time. Raises `EngineDiedError` once closed, and
        `UnavailableError` when no process can be started.
        """
        loop = asyncio.get_running_loop()
        left = limit_seconds
        for _ in range(2):
            compiler = await self._take()
            began = loop.time()
            try:
                async with asyncio.timeout(left):
                    answer = await compiler.ask(kind, grammar)
            except TimeoutError:
                return Verdict.TOO_COMPLEX, 0.0
            except (OSError, EOFError):
                left -= loop.time() - began
                continue
            else:
                self._give_back(compiler)
                return _verdict(answer)
            finally:
                if compiler not in self._idle:
                    self._discard(compiler)
        self._check_open()
        return Verdict.TOO_COMPLEX, 0.0

    def close(self) -> None:
        """Kill all of them, whatever they do."""
        self._closed = True
        for compiler in list(self._all):
            self._discard(compiler)

    async def _take(self) -> _Compiler:
        self._check_open()
        while self._idle:
            compiler = self._idle.pop()
            compiler.rest(None)
            if compiler.is_alive():
                return compiler
            self._discard(compiler)
        compiler = _Compiler()
        self._all.add(compiler)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await compiler.start(self._config, self._starter)
        except (OSError, EOFError, TimeoutError) as error:
            self._discard(compiler)
            self._check_open()
            _log.exception("the schema compiler does not start")
            raise UnavailableError(
                "JSON schemas cannot be prepared right now. Try again in a few seconds.", retry_after_seconds=5
            ) from error
        except BaseException:
            self._discard(compiler)
            raise
        self._check_open()
        return compiler

    def _give_back(self, compiler: _Compiler) -> None:
        if self._closed:
            return
        seconds = _SPARE_SECONDS if self._idle else _IDLE_SECONDS
        self._idle.append(compiler)
        compiler.rest(asyncio.get_running_loop().call_later(seconds, self._discard, compiler))

    def _discard(self, compiler: _Compiler) -> None:
        compiler.kill()
        self._all.discard(compiler)
        if compiler in self._idle:
            self._idle.remove(compiler)

    def _check_open(self) -> None:
        if self._closed:
            raise engine_died()


class _Compiler:
    """One process and our end of the socket to it."""

    def __init__(self) -> None:
        self._process: Any = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._end: asyncio.TimerHandle | None = None
        self._killed = False

    async def start(self, config: Any, starter: StarterThread) -> None:
        """Return when it waits for a grammar. Raises OSError or EOFError when it ends before that."""
        ours, theirs = socket.socketpair()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._process = process_context().Process(target=serve, args=(theirs, config), daemon=True)
        await starter.run(lambda: self._start(theirs))
        await self._answer()

    async def ask(self, kind: str, grammar: str) -> dict[str, Any]:
        """Send one grammar, return what came of it. Raises OSError or EOFError when the process ends instead."""
        assert self._writer is not None  # noqa: S101  # started
        frame = json.dumps([kind, grammar]).encode()
        self._writer.write(LENGTH.pack(len(frame)) + frame)
        await self._writer.drain()
        return await self._answer()

    def is_alive(self) -> bool:
        assert self._reader is not None  # noqa: S101  # started
        return not self._reader.at_eof()

    def rest(self, end: asyncio.TimerHandle | None) -> None:
        """Remember (or call off) when it is to end."""
        if self._end is not None:
            self._end.cancel()
        self._end = end

    def kill(self) -> None:
        self.rest(None)
        self._killed = True
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.pid is not None and self._process.is_alive():
            self._process.kill()

    def _start(self, theirs: socket.socket) -> None:
        """On the starter thread. A kill that came first would have found no process."""
        with theirs:
            self._process.start()
        if self._killed:
            self._process.kill()

    async def _answer(self) -> dict[str, Any]:
        assert self._reader is not None  # noqa: S101  # started
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        return answer


def _verdict(answer: dict[str, Any]) -> tuple[Verdict, float]:
    if "problem" in answer:
        return (Verdict.INVALID if answer["problem"] == "invalid" else Verdict.TOO_COMPLEX), 0.0
    return Verdict.FINE, answer["seconds"]


class FairTurns:
    """`total` turns, at most `per_owner` of them for one owner. With fewer than all, no owner ever stops the others."""

    def __init__(self, total: int, *, per_owner: int, most_waiting: int, wait_seconds: float) -> None:
        self._free = total
        self._per_owner = per_owner
        self._most_waiting = most_waiting
        self._wait_seconds = wait_seconds
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def enter(self, owner: str) -> None:
        """Wait for a turn; `leave` gives it back. Raises `OverloadedError` when too many wait, or for too long."""
        line = self._waiting.setdefault(owner, deque())
        if len(line) >= self._most_waiting:
            raise _overloaded()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        self._admit()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # its turn came in the same moment
                self.leave(owner)
            elif turn in line:
                line.remove(turn)
                self._admit()
            if isinstance(error, TimeoutError):
                raise _overloaded() from None
            raise

    def leave(self, owner: str) -> None:
        """Give back a turn of the owner's."""
        self._free += 1
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._admit()

    def _admit(self) -> None:
        """Give out the free turns. Whoever got one goes to the end of the owners."""
        for owner in list(self._waiting):
            line = self._waiting[owner]
            while line and line[0].cancelled():  # it is about to leave
                line.popleft()
            if line and self._free and self._running[owner] < self._per_owner:
                turn = line.popleft()
                self._free -= 1
                self._running[owner] += 1
                turn.set_result(None)
                self._waiting.move_to_end(owner)
            if not line:
                del self._waiting[owner]


def _overloaded() -> OverloadedError:
    return OverloadedError(
        "Too many new JSON schemas are waiting to be prepared. Try again in a few seconds, and send fewer different "
        "schemas at the same time.",
        retry_after_seconds=10,
    )
