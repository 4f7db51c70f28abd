"""The processes that compile grammars: started when needed, killed at a deadline, replaced when gone.

Knows nothing of requests or of what was asked before: that is vllm_grammars.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from enum import Enum
from typing import TYPE_CHECKING, Any

from engine.backends.vllm_grammar_process import LENGTH, serve
from engine.backends.vllm_launch import process_context
from engine.errors import UnavailableError, engine_died

if TYPE_CHECKING:
    from engine.backends.vllm_launch import StarterThread

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
