"""A client of this machine whose packets the kernel stops delivering: it vanishes without a FIN or a reset."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from serving import Server

_ADDRESS = "127.0.0.99"  # of loopback, used by nothing else


def missing_reason() -> str | None:
    """Why it cannot be done here, or None."""
    if shutil.which("ip") is None:
        return "ip is not installed (apt-get install iproute2)"
    return None if os.getuid() == 0 else "only root may change routes"


def open_socket_to_lose(server: Server) -> socket.socket:
    address = urlsplit(server.root_url)
    return socket.create_connection((address.hostname, address.port), 30, source_address=(_ADDRESS, 0))


@contextmanager
def lost_network() -> Iterator[None]:
    """Whatever the server sends to such clients is lost."""
    route = ("blackhole", f"{_ADDRESS}/32", "table", "local")
    subprocess.run(["ip", "route", "add", *route], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "route", "del", *route], check=True)
