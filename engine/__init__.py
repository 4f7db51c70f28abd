"""Hearth's engine: models and hardware. This module is its interface; DESIGN.md names what else the server uses."""

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from engine.config import Config, ConfigError, ModelSpec, TierSpec, load_config
    from engine.engine import Engine
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
        EditRequest,
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
        Segment,
        TextRequest,
        Tokenized,
        TokenLogprob,
        ToolCallDelta,
        TranscriptionRequest,
        Urgency,
        Usage,
    )
    from engine.voices.languages import language_code
    from engine.voices.types import AudioFormat, Quality, SpeechRequest, Voice
else:
    _ELSEWHERE = {
        **dict.fromkeys(("Config", "ConfigError", "ModelSpec", "TierSpec", "load_config"), "engine.config"),
        **dict.fromkeys(("AudioFormat", "Quality", "SpeechRequest", "Voice"), "engine.voices.types"),
        "Engine": "engine.engine",
        "ImageLimits": "engine.media",
        "language_code": "engine.voices.languages",
    }

    def __getattr__(name: str) -> Any:
        """Import the module of a name on first use, so that a command loads only what it needs."""
        return getattr(importlib.import_module(_ELSEWHERE.get(name, "engine.types")), name)
