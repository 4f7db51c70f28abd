"""Compiles every new JSON schema once outside the engine, in a process that can be killed, before the engine sees it.

vLLM compiles schemas in its engine process, on few threads, and nothing stops it: one schema that takes minutes would
hold up everybody's structured output. Here it costs its own sender 10 s. What a process does is in
vllm_grammar_process.py, which schemas need none of this in vllm_grammar_text.py.

Measured with a vocabulary of 151,000 tokens: a schema below the line of `is_light` takes 5 ms of the event loop once
(the same check that vLLM makes there) and at most 0.4 s of one core in the engine; one above it is compiled twice,
which is 50 ms more for ten properties with `$defs`, and nothing the second time. A process is forked in 0.5 s (spawned
on CUDA: as long as importing vLLM takes) when it is first needed, and ends after five idle minutes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.backends import vllm_compat
from engine.backends.vllm_grammar_compiler import Compilers, Verdict
from engine.backends.vllm_grammar_text import format_tag, is_light, without_padding
from engine.errors import GrammarTooComplexError, RequestError
from engine.turns import FairTurns

if TYPE_CHECKING:
    from engine.backends.vllm_launch import StarterThread

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
    if vllm_compat.fits("grammar check"):
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
