"""A bucket that speaks S3: moto's server in a process of its own, which forgets everything at its end."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import httpx2

_SERVER = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""
NAME = "hearth"


def missing_reason() -> str | None:
    """Why there can be no bucket here, or None."""
    missing = [name for name in ("s3fs", "moto", "flask", "flask_cors") if find_spec(name) is None]
    return f"not installed: {', '.join(missing)} (scripts/setup --test)" if missing else None


@contextmanager
def running() -> Iterator[dict[str, str]]:
    """Run it, with an empty bucket; gives what programs for S3 need in their environment."""
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            address = f"http://127.0.0.1:{int(process.stdout.readline())}"
            assert httpx2.put(f"{address}/{NAME}", timeout=20).status_code == 200
            yield {
                "AWS_ENDPOINT_URL": address,
                "AWS_ACCESS_KEY_ID": "reader",
                "AWS_SECRET_ACCESS_KEY": "swordfish",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_CONFIG_FILE": os.devnull,
                "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            }
        finally:
            process.kill()
