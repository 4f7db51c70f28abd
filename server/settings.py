"""How this machine runs Hearth: environment variables `HEARTH_*`, read once. What is served is models.yaml's."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

_PREFIX = "HEARTH_"
# Read by the scripts that start the server, not by the server.
_OF_THE_SCRIPTS = {"HEARTH_PYTHON"}


class SettingsError(Exception):
    """A setting is wrong; the message lists every problem and says what to do."""


class Settings(BaseSettings):
    """Frozen once read. Every field is `HEARTH_<NAME>` in the environment; flags of `hearth serve` win over it."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    data_dir: Path = Field(Path("var"), description="key store, logs and generated files")
    weights_dir: Path = Field(Path("weights"), description="one folder per real model")
    models: Path = Field(Path("models.yaml"), description="what is served")
    max_body_bytes: int = Field(25 * 2**20, ge=1024, description="larger request bodies are refused (413)")
    max_messages: int = Field(2048, ge=1, description="messages in one conversation")
    max_batch_items: int = Field(256, ge=1, le=4096, description="chat bodies in one batch")
    drain_seconds: float = Field(30.0, ge=0, description="how long running requests may go on after SIGTERM")
    keep_alive_seconds: float = Field(15.0, gt=0, description="pause between SSE comments while a stream waits")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")


def load_settings(**flags: Any) -> Settings:
    """Read the environment; `flags` that are not None win. Raises `SettingsError`."""
    problems = _unknown_names()
    try:
        settings = Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        problems += [f"{_PREFIX}{str(item['loc'][0]).upper()}: {item['msg']}" for item in error.errors()]
    if problems:
        raise SettingsError("The settings are wrong:\n" + "\n".join(f"  {problem}" for problem in problems))
    return settings


def _unknown_names() -> list[str]:
    known = {_PREFIX + name.upper() for name in Settings.model_fields} | _OF_THE_SCRIPTS
    problems = []
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            problems.append(f"{name}: there is no such setting; {hint}")
    return problems
