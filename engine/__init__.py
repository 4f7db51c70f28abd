"""Hearth's engine: models and hardware. This module is the front door; what else server uses is named in DESIGN.md."""

from engine.config import Config, ConfigError, ModelSpec, TierSpec, load_config
from engine.engine import Engine
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
from engine.media import ImageLimits
from engine.types import (
    ANSWERS,
    AWAITS_TURN,
    SETTLED,
    ChatChoice,
    ChatDelta,
    ChatRequest,
    ChatResult,
    ChatStep,
    FinishedImage,
    FinishReason,
    ImageFormat,
    ImageProgress,
    ImageRequest,
    ModelHealth,
    ModelInfo,
    ModelLoad,
    PartialImage,
    TextRequest,
    TokenLogprob,
    ToolCallDelta,
    Urgency,
    Usage,
)
from engine.voices.languages import language_code
from engine.voices.types import AudioFormat, SpeechRequest, Voice
