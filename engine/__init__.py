"""Hearth's engine: models and hardware. This module is the front door; what else server uses is named in DESIGN.md."""

from typing import TYPE_CHECKING, Any

from engine.config import Config, ConfigError, ModelSpec, TierSpec, load_config
from engine.errors import (
    ContextLengthError,
    EngineDiedError,
    EngineError,
    GenerationError,
    GrammarTooComplexError,
    LoadError,
    ModelLoadingError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnknownModelError,
    UnsupportedCapabilityError,
)
from engine.types import (
    ANSWERS,
    AWAITS_TURN,
    SETTLED,
    ChatChoice,
    ChatDelta,
    ChatRequest,
    ChatResult,
    ChatStep,
    EmbeddingRequest,
    FinishedImage,
    FinishReason,
    ImageFormat,
    ImageProgress,
    ImageRequest,
    ModelHealth,
    ModelInfo,
    ModelLoad,
    PartialImage,
    Pooled,
    Prompt,
    RerankRequest,
    TextRequest,
    Tokenized,
    TokenLogprob,
    ToolCallDelta,
    Urgency,
    Usage,
)
from engine.voices.languages import language_code
from engine.voices.types import AudioFormat, Quality, SpeechRequest, Voice

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.media import ImageLimits
else:

    def __getattr__(name: str) -> Any:
        """Import the engine when it is asked for: who reads models.yaml alone waits for no backend and no decoder."""
        if name == "Engine":
            from engine.engine import Engine

            return Engine
        if name == "ImageLimits":
            from engine.media import ImageLimits

            return ImageLimits
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
