"""Compiles every new JSON schema once outside the engine, in a process that can be killed, before the engine gets it.

vLLM compiles schemas in its engine process, on few threads, and nothing can stop it: a schema that takes minutes would
delay the structured output of all requests. The processes import this file, so vLLM and xgrammar are imported only in
functions.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from engine.backends.vllm import compat
from engine.backends.vllm.processes import StarterThread, process_context
from engine.backends.vllm.schemas import applicable, enforceable, malformed, of_the_type, parts, unenforced
from engine.errors import GrammarTooComplexError, OverloadedError, RequestError, UnavailableError, engine_died
from engine.process.child import confine

_log = logging.getLogger("hearth.engine")

_PROCESS_NAME = "hearth-schemas"
# Of one compilation, and of the start of a process.
_COMPILE_SECONDS = 10.0
_START_SECONDS = 120.0
# The memory of a compilation beside the process itself. The largest schemas that compile in time take a tenth.
_MEMORY_BYTES = 2**30
_IDLE_SECONDS = 300.0
# Three keys with two slow schemas each take all of these. They have a low priority, not to slow down engines.
_COMPILERS = 6
_PER_OWNER = 2
_MOST_WAITING = 128
_WAIT_SECONDS = 30.0
# After a compilation this long, the turn is kept for the same time again: the engine now compiles the grammar too.
_SLOW_SECONDS = 0.25
# In the engine: one thread more than slow compilations at a time, so that quick ones find a thread.
ENGINE_THREADS = _COMPILERS + 1
_VERDICTS_KEPT = 4096
# "Too complex" is forgotten: the machine may have been busy.
_TOO_COMPLEX_SECONDS = 600.0


Verdict: TypeAlias = Literal["fine", "invalid", "too complex"]


class Grammars:
    """Checks the grammars of one loaded model. Used in one event loop."""

    def __init__(self, config: Any, starter: StarterThread) -> None:
        self._compilers = _Compilers(config, starter)
        self.close = self._compilers.close
        self._turns = FairTurns(_COMPILERS, _PER_OWNER, most_waiting=_MOST_WAITING, wait_seconds=_WAIT_SECONDS)
        self._verdicts: dict[bytes, Verdict] = {}
        self._running: dict[bytes, asyncio.Task[Verdict]] = {}

    async def bind_format(self, request: Any, owner: str) -> None:
        """Replace the `response_format` of vLLM's request by a structural tag, once that has been checked."""
        tag = format_tag(request.response_format)
        if tag is None:
            return
        form = request.response_format.json_schema
        if form is not None and form.strict:
            _check_strict(form.json_schema, "response_format")
        await self._bind(request, tag, owner, "response_format")

    async def bind_outputs(self, request: Any, wanted: Mapping[str, Any], owner: str) -> None:
        """Do the same with one constraint of vLLM's own field: `json`, `json_object`, `choice` or `regex`."""
        field = "structured_outputs"
        ((kind, value),) = wanted.items()
        if kind == "regex":
            await self._bind(request, value, owner, field, kind="regex")
            return
        if kind == "json":
            keyword = unenforced(_well_formed(value, field))
            if keyword is not None:
                raise RequestError(
                    f"`{field}` has a JSON schema with `{keyword}` in a way that cannot be enforced. Write it "
                    "otherwise, or send it as `response_format` without `strict` to have the rest enforced.",
                    param=field,
                )
        await self._bind(request, _tag_of(kind, value, field), owner, field)

    async def bind_tools(self, request: Any, owner: str) -> None:
        """Do the same with the constraint that vLLM's parsers have made of the tools. Call after rendering."""
        for tool in request.tools or ():
            if tool.function.strict:
                _check_strict(tool.function.parameters, "tools")
        parameters = request.structured_outputs
        if parameters is None or parameters._backend is not None:  # noqa: SLF001  # no constraint, or checked already
            return
        field = "tools" if request.tools else "response_format"
        if parameters.structural_tag is not None:
            await self._bind(request, without_padding(parameters.structural_tag, field), owner, field)
            return
        from vllm.v1.structured_output.request import get_structured_output_key

        kind, grammar = get_structured_output_key(parameters)
        if kind.name == "JSON":  # of a parser that makes no tag: its whitespace is bounded too
            await self._bind(request, _tag_of("json", json.loads(grammar), field), owner, field)
            return
        await self._check(kind.name, grammar, owner, field)
        _choose_backend(parameters)

    async def _check(self, kind: str, grammar: str, owner: str, field: str) -> None:
        """Return when the engine may compile `grammar`, at once for known ones. `kind` is the name of vLLM's option.

        Raises `GrammarTooComplexError`, `RequestError` for an invalid schema, `OverloadedError` if too many wait,
        `UnavailableError`. Cancelling gives up the place in the queue.
        """
        digest = hashlib.sha256(f"{kind} {grammar}".encode()).digest()
        verdict = self._remembered(digest)
        if verdict is None and kind == "STRUCTURAL_TAG" and is_light(grammar):
            verdict = _parsed(grammar)
            self._remember(digest, verdict)
        if verdict is None:
            verdict = await self._compiled(kind, grammar, owner, digest)
        if verdict == "too complex":
            raise GrammarTooComplexError(
                f"`{field}` has {_held(field)} that cannot be prepared for this model within "
                f"{_COMPILE_SECONDS:.0f} seconds and bounded memory. Make it simpler: fewer optional properties "
                "and alternatives (`anyOf`), no long or nested repeats in patterns, a smaller `maxLength` and "
                "`maxItems`.",
                param=field,
            )
        if verdict == "invalid":
            raise invalid_schema(field)

    async def _bind(self, request: Any, grammar: str, owner: str, field: str, kind: str = "structural_tag") -> None:
        from vllm.sampling_params import StructuredOutputsParams

        await self._check(kind.upper(), grammar, owner, field)
        request.structured_outputs = StructuredOutputsParams(**{kind: grammar})
        _choose_backend(request.structured_outputs)
        request.response_format = None

    async def _compiled(self, kind: str, grammar: str, owner: str, digest: bytes) -> Verdict:
        """Compile a grammar in the owner's turn, or wait for another request's compilation of it.

        Cancelling does not stop a running compilation: a repeated request must not start a second one.
        """
        if digest not in self._running:
            await self._turns.enter(owner)
            verdict = self._remembered(digest)
            if verdict is not None or digest in self._running:
                self._turns.leave(owner)
            else:
                task = asyncio.create_task(self._compile(kind, grammar, owner, digest))
                task.add_done_callback(lambda done: done.cancelled() or done.exception())  # if all requests have left
                self._running[digest] = task
            if verdict is not None:
                return verdict
        return await asyncio.shield(self._running[digest])

    async def _compile(self, kind: str, grammar: str, owner: str, digest: bytes) -> Verdict:
        seconds = 0.0
        try:
            verdict, seconds = await self._compilers.compile(kind, grammar)
            self._remember(digest, verdict)
            return verdict
        finally:
            del self._running[digest]
            kept_seconds = seconds if seconds >= _SLOW_SECONDS else 0.0
            asyncio.get_running_loop().call_later(kept_seconds, self._turns.leave, owner)

    def _remembered(self, digest: bytes) -> Verdict | None:
        verdict = self._verdicts.pop(digest, None)
        if verdict is not None:
            self._verdicts[digest] = verdict  # the last used is dropped last
        return verdict

    def _remember(self, digest: bytes, verdict: Verdict) -> None:
        self._verdicts[digest] = verdict
        if verdict == "too complex":
            asyncio.get_running_loop().call_later(_TOO_COMPLEX_SECONDS, self._verdicts.pop, digest, None)
        if len(self._verdicts) > _VERDICTS_KEPT:
            del self._verdicts[next(iter(self._verdicts))]


def invalid_schema(field: str) -> RequestError:
    """Return the error for a `field` whose JSON schema is invalid or makes no grammar."""
    return RequestError(
        f"`{field}` has {_held(field)} that cannot be followed: it is not valid, or uses what is not supported.",
        param=field,
    )


def _held(field: str) -> str:
    return "a grammar" if field == "structured_outputs" else "a JSON schema"


def _choose_backend(parameters: Any) -> None:
    """Set the backend that vLLM would choose by a check on the event loop: ours has run. See `build_serving`."""
    if compat.fits("grammar check"):
        parameters._backend = "xgrammar"  # noqa: SLF001


def _check_strict(schema: Any, field: str) -> None:
    """Raise `RequestError` for a schema with a keyword that the grammar does not enforce."""
    keyword = None if schema is None else unenforced(_well_formed(schema, field))
    if keyword is not None:
        raise RequestError(
            f"`{field}` is `strict`, but its JSON schema uses `{keyword}` in a way that cannot be enforced. Write it "
            "otherwise, or leave `strict` out to have the rest enforced.",
            param=field,
        )


def _well_formed(schema: Any, field: str) -> Any:
    if malformed(schema):
        raise invalid_schema(field)
    return enforceable(schema)


def _parsed(tag: str) -> Verdict:
    """Parse a light grammar, as vLLM would on the event loop."""
    import xgrammar

    try:
        xgrammar.Grammar.from_structural_tag(tag)
    except Exception:  # noqa: BLE001  # xgrammar raises many kinds, all of them about the grammar
        return "invalid"
    return "fine"


# Weak models pad with spaces and newlines until `max_tokens` if the grammar lets them: one at a time is enough.
_MOST_WHITESPACE = 1

_LIGHT_BYTES = 16 * 2**10
_LIGHT_NODES = 24
_LIGHT_ENUM = 64
# Keywords that make no grammar, and those whose grammar is no larger than their text.
_LIGHT = {"title", "description", "default", "examples", "$schema", "$id", "deprecated", "readOnly", "strict"}
_LIGHT |= {"type", "required", "const", "enum", "items", "additionalProperties", "anyOf", "oneOf", "properties"}


def format_tag(form: Any) -> str | None:
    """Return the structural tag of a `response_format` (vLLM's object), None if it is for text."""
    if form is None or form.type not in {"json_object", "json_schema"}:
        return None
    if form.type == "json_schema":
        return _tag_of("json", form.json_schema.json_schema, "response_format")
    return _tag_of("json_object", {}, "response_format")


def _tag_of(kind: str, value: Any, field: str) -> str:
    """Return the structural tag of a JSON schema (`json`), of any object (`json_object`), or of one of many texts."""
    content: dict[str, Any]
    if kind == "choice":
        content = {"type": "or", "elements": [{"type": "const_string", "value": each} for each in value]}
    else:
        schema: Any = {"type": "object"}
        if kind == "json":
            schema = True if value is None else of_the_type(_well_formed(applicable(value), field))
        content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MOST_WHITESPACE}
    return json.dumps({"type": "structural_tag", "format": content})


def without_padding(tag: str, field: str) -> str:
    """Bound the whitespace of all JSON in a structural tag, also of a tool parser's.

    Of the XML-like styles only Qwen's is bounded: in the others models have learned the whitespace.
    """
    whole = json.loads(tag)
    for node in _formats(whole, "tag"):
        # Of gpt-oss: the mark could also be spelled in letters, which would become part of the arguments
        end, content = node.get("end"), node["content"].get("type")
        if content == "json_schema" and isinstance(end, list) and "" in end:
            node["end"] = [""]
    for node in _formats(whole, "json_schema"):
        if node.get("style") == "qwen_xml":
            node["max_whitespace_cnt"] = _MOST_WHITESPACE
        if node.get("style", "json") == "json":
            node["max_whitespace_cnt"] = _MOST_WHITESPACE
            node["json_schema"] = of_the_type(_well_formed(applicable(node["json_schema"]), field))
    return json.dumps(whole)


def is_light(tag: str) -> bool:
    """Whether a structural tag is sure to compile at once: few schemas, with grammars no larger than their text."""
    if len(tag) > _LIGHT_BYTES:
        return False
    schemas = [node["json_schema"] for node in _formats(json.loads(tag), "json_schema")]
    for schema in schemas:  # the list grows meanwhile
        if len(schemas) > _LIGHT_NODES or not _is_plain(schema):
            return False
        schemas += parts(schema) if isinstance(schema, dict) else []
    return True


def _formats(node: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the nodes of one type in a structural tag, but none within JSON schemas, which are the client's."""
    own = node.get("type") if isinstance(node, dict) else None
    if own == kind:
        yield node
    if own != "json_schema" and isinstance(node, dict | list):
        for item in node.values() if isinstance(node, dict) else node:
            yield from _formats(item, kind)


def _is_plain(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    # If any other name is allowed, the grammar excludes all named ones: 1.6 s for 38 of them.
    open_ended = schema.get("additionalProperties", False) is not False and "properties" in schema
    return schema.keys() <= _LIGHT and not open_ended and len(schema.get("enum", ())) <= _LIGHT_ENUM


class _Compilers:
    """One process per compilation at a time. The caller bounds their number."""

    def __init__(self, config: Any, starter: StarterThread) -> None:
        self._config, self._starter = config, starter
        self._all: set[_Compiler] = set()
        self._idle: dict[_Compiler, asyncio.TimerHandle] = {}  # with the timer that ends it
        self._closed = False

    async def compile(self, kind: str, grammar: str) -> tuple[Verdict, float]:
        """Return the verdict, and the seconds it took. Raises `EngineDiedError` once closed, and `UnavailableError`."""
        loop = asyncio.get_running_loop()
        left = _COMPILE_SECONDS
        for _ in range(2):  # the first death of a process may not be the grammar's fault
            compiler = await self._take()
            began = loop.time()
            try:
                async with asyncio.timeout(left):
                    verdict = await compiler.ask(kind, grammar)
            except TimeoutError:
                break
            except (OSError, EOFError):
                left -= loop.time() - began
            else:
                self._idle[compiler] = loop.call_later(_IDLE_SECONDS, self._discard, compiler)
                return verdict, loop.time() - began
            finally:
                if self._closed or compiler not in self._idle:
                    self._discard(compiler)
        self._check_open()
        return "too complex", 0.0

    def close(self) -> None:
        """End all processes at once; requests that wait for one get `EngineDiedError`."""
        self._closed = True
        for compiler in list(self._all):
            self._discard(compiler)

    async def _take(self) -> _Compiler:
        self._check_open()
        while self._idle:
            compiler, end = self._idle.popitem()
            end.cancel()
            if not compiler.reader.at_eof():
                return compiler
            self._discard(compiler)
        compiler = _Compiler()
        self._all.add(compiler)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await compiler.start(self._config, self._starter)
        except BaseException as error:
            self._discard(compiler)
            if not isinstance(error, OSError | EOFError):  # a TimeoutError is an OSError
                raise
            self._check_open()
            _log.exception("the schema compiler does not start")
            raise UnavailableError(
                "JSON schemas cannot be prepared right now. Try again in a few seconds.", retry_after_seconds=5
            ) from error
        return compiler

    def _discard(self, compiler: _Compiler) -> None:
        compiler.kill()
        self._all.discard(compiler)
        end = self._idle.pop(compiler, None)
        if end is not None:
            end.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise engine_died()


class _Compiler:
    """One process and our end of the socket to it: a line of JSON for each grammar, and a line back, the verdict."""

    _process: Any = None
    reader: Any = None
    _writer: Any = None

    async def start(self, config: Any, starter: StarterThread) -> None:
        """Return when it waits for a grammar. Raises OSError or EOFError if it ends before that."""
        ours, child_end = socket.socketpair()
        with child_end:
            self.reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            self._process = process_context().Process(target=_serve, args=(child_end, config), daemon=True)
            await starter.run(self._process.start)
        if self._writer.is_closing():  # killed meanwhile
            self._process.kill()
        await self._answer()

    async def ask(self, kind: str, grammar: str) -> Verdict:
        """Send a grammar, return the verdict. Raises OSError or EOFError if the process ends instead."""
        self._writer.write(json.dumps([kind, grammar]).encode() + b"\n")
        await self._writer.drain()
        return cast("Verdict", await self._answer())

    def kill(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.is_alive():
            self._process.kill()

    async def _answer(self) -> str:
        line = await self.reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line[:-1].decode()


def _serve(end: socket.socket, config: Any) -> None:
    """In the process: answer each line, JSON of [kind, grammar], with a line, until killed. `config`: the engine's."""
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    model = config.model_config
    tokenizer = cached_tokenizer_from_config(model_config=model)
    backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=model.get_vocab_size())
    os.nice(10)
    Path("/proc/self/comm").write_text(_PROCESS_NAME, encoding="ascii")
    confine(_MEMORY_BYTES)
    with end, end.makefile("rb") as questions:
        end.sendall(b"ready\n")
        for line in questions:
            end.sendall(_verdict(backend, *json.loads(line)).encode() + b"\n")


def _verdict(backend: Any, kind: str, grammar: str) -> Verdict:
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    try:
        backend.compile_grammar(StructuredOutputOptions[kind], grammar)
    except MemoryError:
        return "too complex"
    except Exception as error:  # noqa: BLE001  # xgrammar raises many kinds, all of them about the grammar
        return "too complex" if "bad_alloc" in str(error) else "invalid"
    finally:
        backend.compiler.clear_cache()
    return "fine"


class FairTurns:
    """`total` turns, of which an owner has at most `per_owner`, which is fewer, so that none blocks the others.

    By default any number of requests may wait, for any time.
    """

    def __init__(
        self, total: int, per_owner: int, *, most_waiting: float = math.inf, wait_seconds: float | None = None
    ) -> None:
        self._all = asyncio.Semaphore(total)
        self._per_owner = per_owner
        self._most = per_owner + most_waiting
        self._wait_seconds = wait_seconds
        # An owner waits for its own turns first, so it has no more than these in the queue for all.
        self._own: dict[str, asyncio.Semaphore] = {}
        self._requests: Counter[str] = Counter()

    async def enter(self, owner: str) -> None:
        """Wait for a turn; `leave` gives it back. Raises `OverloadedError` if too many wait, or after too long."""
        if self._requests[owner] >= self._most:
            raise _overloaded()
        self._requests[owner] += 1
        own = self._own.setdefault(owner, asyncio.Semaphore(self._per_owner))
        try:
            async with AsyncExitStack() as undo, asyncio.timeout(self._wait_seconds):
                undo.callback(self._forget, owner)
                await own.acquire()
                undo.callback(own.release)
                await self._all.acquire()
                undo.pop_all()
        except TimeoutError:
            raise _overloaded() from None

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        await self.enter(owner)
        try:
            yield
        finally:
            self.leave(owner)

    def leave(self, owner: str) -> None:
        self._all.release()
        self._own[owner].release()
        self._forget(owner)

    def _forget(self, owner: str) -> None:
        self._requests[owner] -= 1
        if not self._requests[owner]:
            del self._requests[owner], self._own[owner]


def _overloaded() -> OverloadedError:
    return OverloadedError(
        "Too many new JSON schemas are waiting to be prepared. Try again in a few seconds, and send fewer different "
        "schemas at the same time.",
        retry_after_seconds=10,
        limit="new_schemas",
    )
