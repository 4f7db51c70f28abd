"""Starts child processes: the one of a worker, their environment, and their end when their starter ends."""

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# oneDNN keeps what it has prepared for a size of its work, 1024 of them if let, at up to a MiB each: enough for all the
# layers of a diffusion model, and no more.
_DEFAULTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}


def end_with_starter() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_with_maker_of(end: socket.socket) -> None:
    """Do so, and end now if it has ended already. The starter is the process that made the socket pair of `end`."""
    end_with_starter()
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if os.getppid() != struct.unpack("3i", credentials)[0]:
        os._exit(1)  # it died before the line above


@contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set them while the block runs, for the whole process: one block at a time."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.update(before)
        for name in variables.keys() - before.keys():
            del os.environ[name]


def spawn(service: str, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Start the child; return it, our end of the socket, and a descriptor that is readable when it ends."""
    # The child finds modules where we find them, and never in the folder that happens to be the current one.
    path = [environment.get("PYTHONPATH", ""), *(str(Path(entry).absolute()) for entry in sys.path)]
    # Our settings are not for a process that reads other people's files: one is the database's password.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    variables = {**_DEFAULTS, **inherited, **environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    ours, theirs = socket.socketpair()
    with theirs, ExitStack() as undo:
        undo.callback(ours.close)
        child = subprocess.Popen(
            # The service is named for people who list the processes; the child gets it in a message
            [sys.executable, "-P", "-m", "engine.process.child", str(theirs.fileno()), service],
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
