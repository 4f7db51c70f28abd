"""models.yaml: what it may say (models, profiles), how it is read (yaml, load) and what is wrong with it (messages)."""

from engine.config.load import Config, ConfigError, load_config
from engine.config.models import (
    ChatEngineSpec,
    ChatModelSpec,
    ImageEngineSpec,
    ImageModelSpec,
    ModelSpec,
    SpeechEngineSpec,
    SpeechModelSpec,
    TierSpec,
)
from engine.config.yaml import Problem

__all__ = [
    "ChatEngineSpec",
    "ChatModelSpec",
    "Config",
    "ConfigError",
    "ImageEngineSpec",
    "ImageModelSpec",
    "ModelSpec",
    "Problem",
    "SpeechEngineSpec",
    "SpeechModelSpec",
    "TierSpec",
    "load_config",
]
