"""Tells systemd how far the server is (`Type=notify`) and that it still lives. Without systemd it does nothing."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine import Engine


class Systemd:
    """One socket of the service manager, named by `NOTIFY_SOCKET`; see sd_notify(3)."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        meant_for_us = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._watchdog_seconds = int(environment.get("WATCHDOG_USEC", "0")) / 1e6 if meant_for_us else 0.0

    def listening(self) -> None:
        """The service is up: models may still be loading, which takes minutes and is asked of /health/ready."""
        self._send("READY=1", "STATUS=Listening; loading the models")

    def reloading(self) -> None:
        """Only a word for `systemctl status`: answers go on."""
        self._send("STATUS=Read models.yaml again")

    def stopping(self) -> None:
        """The service is ending; what still runs may finish."""
        self._send("STOPPING=1", "STATUS=Draining")

    async def follow(self, engine: Engine) -> None:
        """Show the models in `systemctl status`, and feed the watchdog from the event loop that serves."""
        if not self._address:
            return
        said = ""
        while True:
            ready = [health.status == "ready" for health in engine.health()]
            status = f"STATUS={sum(ready)} of {len(ready)} models ready"
            if status != said or self._watchdog_seconds:
                self._send(status, "WATCHDOG=1")
                said = status
            await asyncio.sleep(self._watchdog_seconds / 3 or 5)

    def _send(self, *states: str) -> None:
        if not self._address:
            return
        # A manager that is not there must not stop a server that is
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager, suppress(OSError):
            manager.settimeout(0)
            manager.sendto("\n".join(states).encode(), self._address)
