"""Ties a process to the one that started it, so that it ends with it, however that ends."""

import ctypes
import os
import signal
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1


def end_with_starter() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_with_maker_of(end: socket.socket) -> None:
    """Do so, and end now if it is gone already. Who made the socket pair that `end` is of is who started us."""
    end_with_starter()
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if os.getppid() != struct.unpack("3i", credentials)[0]:
        os._exit(1)  # it died before the line above


@contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set them while the block runs, for the whole process: one block at a time."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
