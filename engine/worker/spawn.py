"""Starts the child process of a worker. What is said to it is process.py's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


# oneDNN keeps what it has prepared for a size of its work, 1024 of them if let, at up to a MiB each: enough for all the
# layers of a diffusion model, and no more.
_DEFAULTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}


def spawn(service: str, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Start the child; return it, our end of the socket, and a descriptor that is readable when it ends."""
    # The child finds modules where we find them, and never in the folder that happens to be the current one.
    path = [environment.get("PYTHONPATH", ""), *(str(Path(entry).absolute()) for entry in sys.path)]
    # Our settings are not for a process that reads other people's files: one holds the database's password.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    variables = {**_DEFAULTS, **inherited, **environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    ours, theirs = socket.socketpair()
    with theirs, ExitStack() as undo:
        undo.callback(ours.close)
        child = subprocess.Popen(
            # The service is named for whoever looks at the processes; the child is told by a message
            [sys.executable, "-P", "-m", "engine.worker.child", str(theirs.fileno()), service],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=variables,
            process_group=0,  # Ctrl-C in a terminal reaches the server only
        )
        undo.callback(child.wait)
        undo.callback(child.kill)
        pid_fd = os.pidfd_open(child.pid)
        undo.pop_all()
    return child, ours, pid_fd
