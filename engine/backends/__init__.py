"""The only place that imports vllm, torch, diffusers: one file per library and task. Imported when a model loads."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from engine.admission import Admission
    from engine.stream import ImageStream, SpeechStream, TokenStream
    from engine.types import ChatRequest, ImageRequest, TextRequest
    from engine.voices.types import SpeechRequest, Voice


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

    def images(self, request: ImageRequest, stream: ImageStream) -> None:
        """Put what becomes of each image into `stream`. Closing it aborts. It ends with `EngineError`s."""
        ...


class SpeechBackend(Backend, Protocol):
    """Loaded voices."""

    def speech(self, request: SpeechRequest, voice: Voice, stream: SpeechStream) -> None:
        """Put an audio file into `stream` piece by piece. Closing it aborts. It ends with `EngineError`s."""
        ...


class ChatBackend(Backend, Protocol):
    """A loaded chat model."""

    context_length: int
    metrics: CollectorRegistry | None

    async def chat(self, request: ChatRequest, stream: TokenStream) -> None:
        """Return when its turn has come; the answer's steps go into `stream`. Raises `EngineError`s."""
        ...

    async def text(self, request: TextRequest, stream: TokenStream) -> None:
        """Go on with plain texts, like `chat`; deltas hold `content` and nothing else that a model says."""
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
