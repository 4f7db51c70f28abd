"""The service of images, as the worker process opens it: "engine.backends.diffusers.service:open_service"."""

import os
from collections.abc import Callable

import msgspec

from engine.backends.diffusers.jobs import Desk
from engine.backends.diffusers.protocol import ImageJob, ImageOptions, ImageReady
from engine.config_profiles import SIZES
from engine.errors import EngineError, LoadError
from engine.process.service import Outlet, Service

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # weights come from folders, never from a hub at run time
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
}


def open_service(options: msgspec.Raw, outlet: Outlet, report: Callable[[str, float], None]) -> Service:
    """Load the pipeline that `options` (an `ImageOptions`) name. Raises `LoadError`.

    Images are joined between steps where the family has an adapter. An offloaded pipeline runs whole requests: its
    parts would be moved to and fro at every joining.
    """
    report("importing diffusers", 0.1)
    os.environ.update(_ENVIRONMENT)  # read when the libraries are imported, which is below
    from engine.backends.diffusers.adapters import adapter_for
    from engine.backends.diffusers.batching import RequestService, StepService
    from engine.backends.diffusers.jobs import Desk
    from engine.backends.diffusers.load import load

    report("loading the pipeline", 0.3)
    wanted = msgspec.msgpack.decode(options, type=ImageOptions)
    profile = wanted.read_profile()
    loaded = load(wanted)
    by_steps = profile.batching == "steps" and profile.offload == "none"
    adapter = adapter_for(loaded.pipe) if by_steps else None
    info = ImageReady(loaded.name, loaded.device, "requests" if adapter is None else "steps")
    desk = Desk(loaded.pipe, profile, wanted.mark, outlet)
    service: Service = RequestService(desk, info) if adapter is None else StepService(desk, adapter, info)
    report("making a first image", 0.8)
    _rehearse(service, desk)
    return service


class _Rehearsal:
    """An `Outlet` to nobody, which keeps what went wrong."""

    error: EngineError | None = None

    def event(self, job: int, payload: object) -> None:
        """Nobody looks."""

    def done(self, job: int) -> None:
        """Nobody waits."""

    def failed(self, job: int, error: EngineError) -> None:  # noqa: ARG002  # there is only one
        """Keep it: the model is not served then."""
        self.error = error

    def poll(self) -> None:
        """Nothing comes in."""


def _rehearse(service: Service, desk: Desk) -> None:
    """Make a small image before anybody asks. Raises `LoadError` for a model that cannot."""
    size = min(SIZES, key=desk.profile.render_edge)
    outlet, rehearsal = desk.outlet, _Rehearsal()
    desk.outlet = rehearsal
    try:
        job = ImageJob(prompt="a house", size=size, quality="standard", seed=0)
        service.submit(0, msgspec.Raw(msgspec.msgpack.encode(job)))
        while service.busy:
            service.step()
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, EngineError) as error:
        raise LoadError(
            f"The pipeline was loaded, but could not make a first image ({type(error).__name__}). Check that the "
            "download is complete and that the profile is the one of this model."
        ) from error
    finally:
        desk.outlet = outlet
    if rehearsal.error is not None:
        raise LoadError(
            "The pipeline was loaded, but could not make a first image. Check that the model fits the device, and that "
            "dtype is one that its authors recommend (many make no image in float16)."
        ) from rehearsal.error
