"""Models whose processes stand still for a while, so that a test decides what comes first, and not the machine's load."""

from contextlib import suppress
from typing import Any

import httpx2
import psutil
from serving import RunningServer, Server, async_poll_until


def model_states(server: Server) -> dict[str, dict[str, Any]]:
    """What the server says of each model, up to a second old."""
    assert server.admin_key is not None
    headers = {"Authorization": f"Bearer {server.admin_key.text}"}
    found = httpx2.get(f"{server.base_url}/admin/status", headers=headers, timeout=60)
    return {model["id"]: model for model in found.json()["models"]}


async def until_asked(server: Server, model: str, requests: int) -> None:
    """Until so many of a model's requests, and no more, run or wait."""

    def so_many() -> bool:
        state = model_states(server)[model]
        return bool(state["running"] + state["waiting"] == requests)

    await async_poll_until(so_many, 60, describe=lambda: str(model_states(server)[model]))


class standstill:  # noqa: N801  # used like a function
    """Use as `with`: what is asked of this model meanwhile waits; a server that is not ours goes on.

    Shorter than `stall_seconds`. Its processes are looked up when it is made, so that they can be stopped at once.
    """

    def __init__(self, server: Server, model: str) -> None:
        pids = [] if isinstance(server, RunningServer) else model_states(server)[model]["pids"]
        self._processes = [psutil.Process(pid) for pid in pids]

    def __enter__(self) -> None:
        for process in self._processes:
            process.suspend()

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):  # a test has killed it
                process.resume()
