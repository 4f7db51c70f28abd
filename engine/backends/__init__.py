"""The only place that imports vllm, torch, diffusers: one file per library and task. Imported when a model loads."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator

    from prometheus_client import CollectorRegistry

    from engine.admission import Admission
    from engine.stream import Stream
    from engine.types import ChatRequest, ChatResult, ChatStep, ImageEvent, ImageRequest, TextRequest
    from engine.voices.requests import SpeechChunk, SpeechRequest
    from engine.voices.types import Voice


_log = logging.getLogger("hearth.backends")


class Backend(Protocol):
    """A loaded model. `died` is set once, the moment its process is gone; it never comes back to life."""

    died: asyncio.Event
    admission: Admission

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes, without those that they have started."""
        ...

    async def idle(self) -> None:
        """Return when no request runs or waits here any more."""
        ...

    async def sleep(self) -> bool:
        """Free its memory and stay, to be woken. False where it cannot: then it is to be ended."""
        ...

    async def wake(self) -> None:
        """Answer again after a sleep. Whatever is raised, it is to be ended."""
        ...

    async def shutdown(self) -> None:
        """End it gracefully, within seconds."""
        ...

    def terminate(self) -> None:
        """End it now."""
        ...


class ImageBackend(Backend, Protocol):
    """A loaded image model."""

    def images(self, request: ImageRequest) -> Stream[ImageEvent]:
        """Return what becomes of each image. Closing the stream aborts. It ends with `EngineError`s."""
        ...


class SpeechBackend(Backend, Protocol):
    """Loaded voices."""

    def speech(self, request: SpeechRequest, voice: Voice) -> Stream[SpeechChunk]:
        """Return an audio file piece by piece. Closing the stream aborts. It ends with `EngineError`s."""
        ...


class ChatBackend(Backend, Protocol):
    """A loaded chat model."""

    context_length: int
    metrics: CollectorRegistry | None

    def stream(self, request: ChatRequest) -> AsyncGenerator[ChatStep, None]:
        """Yield the answer step by step. Closing the generator aborts. Raises `EngineError`s."""
        ...

    async def complete(self, request: ChatRequest) -> ChatResult:
        """Return the whole answer. Cancelling aborts. Raises `EngineError`s."""
        ...

    def text_stream(self, request: TextRequest) -> AsyncGenerator[ChatStep, None]:
        """Go on with plain texts, like `stream`; deltas hold `content` and nothing else that a model says."""
        ...

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return how many tokens the prompt has. Raises `EngineError`s."""
        ...


async def end(backend: Backend) -> None:
    """End it; one that cannot even end must not keep its successor from starting."""
    try:
        await backend.shutdown()
    except Exception:  # noqa: BLE001  # whatever its libraries can think of
        _log.exception("an engine did not end as it should")
