"""Hearth on several machines: roles of models.yaml as deployments of Ray Serve. Nothing else imports this folder.

This file has the environment in which Ray is started: HAProxy as every machine's entrance, and fixed ports for
firewalls.
"""

import os
import stat
from pathlib import Path

from server.errors import NO_REPLICA

PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 6386,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 6387,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 6388,
    "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": 6700,
    "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": 6799,
}
DEREGISTER_SECONDS = 5  # a replica that ends still answers for so long; by then every HAProxy knows
BALANCE = "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"
# A key's requests go to one replica, unless that has a quarter more than the average.
_BY_KEY = ("hash req.hdr(authorization)", "hash-type consistent", "hash-balance-factor 125")
_ALWAYS = (
    # With splicing, HAProxy (2.8) does not see a client that leaves while it waits, and uses a core when many do.
    "no option splice-request",
    "no option splice-response",
    "no log",  # it would send addresses, and so the signatures of image links, to port 514
    "timeout http-request 10s",
    "option forwardfor",
)
BARE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's default, 15, puts all other processes before models
    # One thread with one event loop: passing a token between threads costs more than the rest of its way. And gRPC
    # between replicas, in place of Ray's objects.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(96 * 2**10),  # our own limit for a head, 64 KiB, comes first
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DEREGISTER_SECONDS),
    # Whenever replicas come or go a new HAProxy takes over; by default streams of the old one have two minutes. A
    # replica's port is free again sooner: the next one there is of the same role.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_PORT_QUARANTINE_S": "150",
    BALANCE: "\n    ".join((*_BY_KEY, *_ALWAYS)),
}
"""The variables that are the same on all machines."""


def environment(folder: Path) -> dict[str, str]:
    """Return the environment for Ray, after making `folder` for HAProxy's files. Raises `OSError`.

    Only our user may write to it, since the socket in it controls HAProxy. Its path has to be short, for the socket.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700 or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is not a folder of yours alone (mode 0700). Remove it, or set TMPDIR.")
    error = folder / "503.http"
    response = NO_REPLICA.response()
    head = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    error.write_bytes(b"HTTP/1.1 503 Service Unavailable\r\n" + head + b"\r\n" + bytes(response.body))
    # Ray writes the algorithm as it is into the last line of HAProxy's section `defaults`: more of it can follow.
    errors = (f"errorfile {status} {error}" for status in (502, 503, 504))
    balance = (os.environ.get(BALANCE) or "\n    ".join(_BY_KEY), *_ALWAYS, *errors)
    files = {"CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "admin.sock", "SERVER_STATE_FILE": "server-state"}
    return {
        **BARE,
        BALANCE: "\n    ".join(balance),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        **{f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()},
        **{name: str(port) for name, port in PORTS.items()},
    }
