"""What an entry of models.yaml may say about voices that speak. Which voices there are is engine/voices' to read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.config_specs import CommonModelSpec
from engine.config_words import Names, Spec, StallSeconds

VoiceId = Annotated[str, Field(min_length=1, max_length=64)]


class SpeechEngineSpec(Spec):
    """How it is run. Every value has a default."""

    max_parallel_requests: Annotated[int, Field(ge=1, le=1024)] = 8
    """Requests that are spoken at the same time, sentence by sentence in turn; more wait."""
    max_queued_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Requests that may wait. The next one is answered with 503 server_overloaded."""
    max_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """A text that has been spoken for longer is given up."""
    stall_seconds: StallSeconds | None = 30.0
    """A worker process that gives no sign of life for so long is killed and restarted; longer while it loads or
    computes. null: never."""
    cpu_threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Threads on a CPU. null: the machine's cores divided by the models (with demo voices alone: 1)."""
    fair_queue: bool = True
    """true: who waits is served by how little its key has had lately. false: first come, first served."""


class SpeechModelSpec(CommonModelSpec):
    """Voices that speak."""

    task: Literal["speech"]
    """What the model does."""
    capabilities: Names[Literal["speech"]]
    """What clients may ask of it."""
    aliases: Annotated[dict[VoiceId, VoiceId], Field(max_length=256)] = Field(default_factory=dict)
    """Other names of voices, like OpenAI's six."""
    engine: SpeechEngineSpec = SpeechEngineSpec()
    """How it is run, and its queue. Every value has a default."""
