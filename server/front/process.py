"""One front as its lead sees it: the process, the wire to it, and what it has said about its life."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from server.front.calls import FrontCalls
from server.front.messages import Begin, Drained, Listening, Ping, Pong, ToFront, ToLead
from server.front.wire import Wire

if TYPE_CHECKING:
    from server.app import HearthApp
    from server.front.messages import Rights


class FrontProcess:
    """Made by `start`. `listening`, `drained` and `gone` are set as it says so; each is set when it is gone, too."""

    def __init__(self, app: HearthApp) -> None:
        self.listening = asyncio.Event()
        self.drained = asyncio.Event()
        self.gone = asyncio.Event()
        self.exit_status: int | None = None
        self._unanswered = 0  # pings
        self._wire: Wire[ToLead, ToFront] = Wire(ToLead, self._on_message, self._on_lost, self._instead)
        self._calls = FrontCalls(app, self._wire.say)
        self._child: subprocess.Popen[bytes]
        self._pid_fd: int

    @classmethod
    async def start(cls, app: HearthApp, listener: socket.socket, rights: Rights) -> FrontProcess:
        """Start a process that takes connections from `listener`, which stays ours as well."""
        front = cls(app)
        ours, theirs = socket.socketpair()
        with theirs:
            front._child = _spawn(theirs, listener)
        front._pid_fd = os.pidfd_open(front._child.pid)
        asyncio.get_running_loop().add_reader(front._pid_fd, front._on_exit)
        await front._wire.open(ours)
        front._wire.say(Begin(pickle.dumps(app.state.settings), rights))
        return front

    @property
    def pid(self) -> int:
        """The process."""
        return self._child.pid

    def say(self, message: ToFront) -> None:
        """Tell it something. Never waits or fails."""
        self._wire.say(message)

    def ping(self) -> int:
        """Ask whether it lives; return how often it has been asked in vain before. It answers between two requests."""
        unanswered, self._unanswered = self._unanswered, self._unanswered + 1
        self._wire.say(Ping())
        return unanswered

    def kill(self) -> None:
        """End it at once."""
        if self.exit_status is None:  # until then nobody else can have its number
            with suppress(ProcessLookupError):
                self._child.kill()

    def _on_message(self, message: ToLead) -> None:
        if isinstance(message, Listening):
            self.listening.set()
        elif isinstance(message, Drained):
            self.drained.set()
        elif isinstance(message, Pong):
            self._unanswered = 0
        else:
            self._calls.on_message(message)

    def _instead(self, message: ToFront) -> ToFront | None:
        return self._calls.instead(message)

    def _on_lost(self) -> None:
        """Everything that it has said was read: what is counted and logged is complete."""
        self._calls.on_lost()
        self._settle()

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pid_fd)
        os.close(self._pid_fd)
        self.exit_status = self._child.wait()
        self._settle()

    def _settle(self) -> None:
        if self.exit_status is not None and self._wire.lost.is_set():
            for event in (self.listening, self.drained, self.gone):
                event.set()


def _spawn(theirs: socket.socket, listener: socket.socket) -> subprocess.Popen[bytes]:
    # It finds modules where we find them, and never in the folder that happens to be the current one.
    path = [os.environ.get("PYTHONPATH", ""), *(str(Path(entry).absolute()) for entry in sys.path)]
    # Settings come over the wire: flags have changed them. A service manager listens to nobody but us.
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("HEARTH_") and name != "NOTIFY_SOCKET"
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "server.front", str(theirs.fileno()), str(listener.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno(), listener.fileno()],
        env=inherited | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        process_group=0,  # Ctrl-C in a terminal reaches the lead only
    )
