"""The service that speaks, as the worker process opens it: "engine.backends.speech_service:open_service"."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from engine.voices.messages import SpeechOptions, SpeechReady

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.process.service import Outlet, Service

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # weights come from folders, never from a hub at run time
    "TRANSFORMERS_VERBOSITY": "error",
}


def open_service(options: bytes, outlet: Outlet, report: Callable[[str, float], None]) -> Service:
    """Make ready to speak, as `options` (a `SpeechOptions`) say. Voices are loaded when they are first asked for."""
    report("importing torch", 0.1)
    wanted = msgspec.msgpack.decode(options, type=SpeechOptions)
    os.environ.update(_ENVIRONMENT)  # read when the libraries are imported, which is below
    import torch
    import transformers

    from engine.backends.speech_encoders import installed_formats
    from engine.backends.speech_jobs import SpeechService
    from engine.backends.speech_models import Shelf, installed_families
    from engine.backends.speech_vits import load  # noqa: F401  # takes seconds, and the first request does not wait

    torch.set_num_threads(wanted.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ready = SpeechReady([*installed_formats()], installed_families())
    return SpeechService(msgspec.msgpack.encode(ready), Shelf(), outlet, mark=wanted.mark)
