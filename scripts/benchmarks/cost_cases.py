"""The rows of `bench cost`. Unlike those of `bench chat`, their work is the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.chat_job import ChatJob
from benchmarks.compare import Case

TOKENS = 64


@dataclass(frozen=True, slots=True)
class CostJob:
    """Requests of `chat`; if `further`, what their tokens after the first one cost is asked for."""

    chat: ChatJob
    further: bool = False


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    streams: int
    requests: int
    streamed: bool
    tokens: int = 1
    further: bool = False

    def case(self, model: str, number: int) -> Case[CostJob]:
        def job(repeat: int) -> CostJob:
            # Labels of one length, so that prompts are, too.
            label = f"{number}-{self.streams:03}-{repeat % 100:02}"
            chat = ChatJob(model, self.streams, self.requests, self.streamed, self.tokens, label)
            return CostJob(chat, self.further)

        return Case(self.name, job)


# Enough of each for a second of processor time, which the kernel counts in steps of 10 ms.
_LOADS = (
    _Row("plain, 1 token, 32", 32, 256, streamed=False),
    _Row("streamed, 1 token, 32", 32, 256, streamed=True),
    _Row(f"streamed, {TOKENS} tokens, 32", 32, 96, streamed=True, tokens=TOKENS),
    _Row(f"streamed, {TOKENS} tokens, 128", 128, 128, streamed=True, tokens=TOKENS),
)
_SINGLES = (
    _Row("a plain answer of 1 token", 1, 32, streamed=False),
    _Row("a streamed answer of 1 token", 1, 32, streamed=True),
    _Row("each further token of a stream", 1, 8, streamed=True, tokens=TOKENS, further=True),
)


def loads(model: str) -> list[Case[CostJob]]:
    """Return the rows with many requests at the same time."""
    return [row.case(model, number) for number, row in enumerate(_LOADS)]


def singles(model: str) -> list[Case[CostJob]]:
    """Return the rows with one request after the other: so steps are not merged, and counts are always the same."""
    return [row.case(model, number) for number, row in enumerate(_SINGLES)]
