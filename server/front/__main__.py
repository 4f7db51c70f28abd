"""A front process, `python -m server.front WIRE LISTENER`: started by its lead, and ended by it or with it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from engine.process.spawning import end_with_maker_of
from server.front.front import Front
from server.loop import new_loop

PROCESS_NAME = "hearth-front"


def main() -> None:
    """Serve until the lead says otherwise, then end this process."""
    end, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for inherited in (end, listener):
        inherited.set_inheritable(False)
    end_with_maker_of(end)
    Path("/proc/self/comm").write_text(PROCESS_NAME, encoding="ascii")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # to a whole group of processes: the lead has it, too
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(end, listener))
    sys.stderr.flush()
    os._exit(0)


async def _serve(end: socket.socket, listener: socket.socket) -> None:
    await Front().serve(end, listener)


if __name__ == "__main__":
    main()
