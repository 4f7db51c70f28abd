"""What is used of Ray Serve (2.60) that is private to it."""

from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve._private import replica
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY as HAS_HAPROXY
from ray.serve._private.constants import RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD as HAS_TWO_LOOPS
from ray.serve._private.constants import SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER as UNWATCHED
from ray.serve._private.constants import SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER as TIMEOUT

__all__ = ["HAS_HAPROXY", "HAS_TWO_LOOPS", "TIMEOUT", "UNWATCHED", "listen_by", "set_version"]


def listen_by(start: Callable[..., Any]) -> None:
    """Have the replica of this process call `start` in place of Serve's own, which listens with plain uvicorn."""
    assert callable(replica.start_asgi_http_server)  # noqa: S101
    replica.start_asgi_http_server = start


def set_version(deployment: serve.Deployment, version: str) -> None:
    """Have a deploy replace replicas only if this differs. Serve's own version is random, which replaces all."""
    deployment._version = version  # noqa: SLF001
