"""One listening socket per front at the same address: the kernel gives each about as many connections as the others.

With a single socket for all, the process that wakes up first takes a whole burst of connections, and keeps them.
"""

from __future__ import annotations

import socket


def shared(listener: socket.socket, number: int) -> list[socket.socket]:
    """Return `number` bound sockets at the address of `listener`, which is the first of them. None listens yet.

    `listener` was bound without sharing, so that a second server, also one of ours, has failed by now.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    others: list[socket.socket] = []
    for _ in range(number - 1):
        other = socket.socket(listener.family)
        others.append(other)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(listener.getsockname())
    return [listener, *others]
