"""Hearth's engine: models and hardware. This module is the front door; nothing else needs importing."""

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
from engine.fair_queue import Urgency
from engine.images.types import FinishedImage, ImageEvent, ImageFormat, ImageProgress, ImageRequest, PartialImage
from engine.pictures import ImageLimits
from engine.types import (
    ChatChoice,
    ChatDelta,
    ChatRequest,
    ChatResult,
    ChatStep,
    FinishReason,
    ModelHealth,
    ModelInfo,
    ModelLoad,
    TextRequest,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from engine.voices.languages import language_code
from engine.voices.requests import AudioFormat, SpeechChunk, SpeechRequest
from engine.voices.types import Voice

__all__ = [
    "AudioFormat",
    "ChatChoice",
    "ChatDelta",
    "ChatRequest",
    "ChatResult",
    "ChatStep",
    "Config",
    "ConfigError",
    "ContextLengthError",
    "Engine",
    "EngineDiedError",
    "EngineError",
    "FinishReason",
    "FinishedImage",
    "GenerationError",
    "GrammarTooComplexError",
    "ImageEvent",
    "ImageFormat",
    "ImageLimits",
    "ImageProgress",
    "ImageRequest",
    "LoadError",
    "ModelHealth",
    "ModelInfo",
    "ModelLoad",
    "ModelLoadingError",
    "ModelSpec",
    "OverloadedError",
    "PartialImage",
    "RequestError",
    "SpeechChunk",
    "SpeechRequest",
    "TextRequest",
    "TierSpec",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "UnavailableError",
    "UnknownModelError",
    "UnsupportedCapabilityError",
    "Urgency",
    "Usage",
    "Voice",
    "language_code",
    "load_config",
]
