"""The service of images, as the worker process opens it: "engine.backends.diffusers.service:open_service"."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.backends import WORKER_ENVIRONMENT
from engine.backends.diffusers.protocol import ImageOptions
from engine.config.models import ImageProfile
from engine.process.protocol import Outlet, Service


def open_service(options: msgspec.Raw, outlet: Outlet, report: Callable[[str, float], None]) -> Service:
    """Load the pipeline that `options` (an `ImageOptions`) name. Raises `LoadError`.

    Images are joined between steps where the family has an adapter. An offloaded pipeline runs whole requests: its
    parts would be moved to and fro at every joining.
    """
    report("importing diffusers", 0.1)
    os.environ.update(WORKER_ENVIRONMENT)  # read when the libraries are imported, which is below
    from engine.backends.diffusers.batching import RequestService, StepService
    from engine.backends.diffusers.families import adapter_for
    from engine.backends.diffusers.jobs import ImageService
    from engine.backends.diffusers.load import load

    report("loading the pipeline", 0.3)
    wanted = msgspec.msgpack.decode(options, type=ImageOptions)
    profile = ImageProfile.model_validate_json(wanted.profile)
    pipe = load(Path(wanted.folder), profile)
    service: ImageService = RequestService(pipe, profile, outlet, mark=wanted.mark)
    if profile.batching == "steps" and profile.offload == "none" and (adapter := adapter_for(pipe)) is not None:
        service = StepService(adapter, profile, outlet, mark=wanted.mark)
    report("making a first image", 0.8)
    service.rehearse()
    return service
