"""A front process, `python -m server.front WIRE LISTENER`: started by its lead, and ended by it or with it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import struct
import sys
from pathlib import Path

from server.front.front import Front
from server.loop import new_loop

PROCESS_NAME = "hearth-front"
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the lead says otherwise, then end this process."""
    end, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for inherited in (end, listener):
        inherited.set_inheritable(False)
    _tie_to_lead(end)
    Path("/proc/self/comm").write_text(PROCESS_NAME, encoding="ascii")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # to a whole group of processes: the lead has it, too
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(end, listener))
    sys.stderr.flush()
    os._exit(0)


async def _serve(end: socket.socket, listener: socket.socket) -> None:
    await Front().serve(end, listener)


def _tie_to_lead(end: socket.socket) -> None:
    """Make the kernel end this process with its lead. Who made the socket pair is who started us."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if os.getppid() != struct.unpack("3i", credentials)[0]:
        os._exit(1)  # it died before the line above


if __name__ == "__main__":
    main()
