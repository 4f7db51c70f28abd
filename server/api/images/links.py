"""Signed links to image files: whoever has one may open the file until it expires, without a key.

Nothing else is known of a link: no row, no session. The files themselves are files.py's.
"""

from __future__ import annotations

import base64
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlencode

from starlette.requests import Request

from server.settings import Settings

_KEY_FILE = "image-links.key"
_KEY_BYTES = 32
_MOMENT = re.compile(r"[0-9]{1,12}")
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")


class ImageLinks:
    """Makes and checks links; every process with the same key makes and takes the same ones."""

    def __init__(self, key: bytes, clock: Callable[[], float] = time.time) -> None:
        self._key = key
        self._clock = clock

    @classmethod
    def open(cls, data_dir: Path) -> Self:
        """Use the key of the data directory, which is made once. Blocks. Raises OSError."""
        return cls(_read_key(data_dir / _KEY_FILE))

    def path(self, name: str, expires_at: int) -> str:
        """Return the address of a file below the base address; `expires_at` in Unix seconds."""
        query = urlencode({"expires": expires_at, "signature": self._signature(name, str(expires_at))})
        return f"/images/files/{name}?{query}"

    def seconds_left(self, name: str, expires: str, signature: str) -> int | None:
        """How long this link still opens the file `name`; None if it does not, whatever the reason."""
        right = hmac.compare_digest(self._signature(name, expires).encode(), signature.encode("utf-8", "replace"))
        if not right or not _MOMENT.fullmatch(expires):
            return None
        seconds = int(expires) - self._clock()
        return int(seconds) if seconds > 0 else None

    def _signature(self, name: str, expires: str) -> str:
        signed = hmac.digest(self._key, f"{name}\n{expires}".encode("utf-8", "replace"), "sha256")
        return base64.urlsafe_b64encode(signed).rstrip(b"=").decode()


def public_base_url(request: Request, settings: Settings) -> str:
    """Return the base address, with `/v1`, under which this client can reach us.

    Without the setting it is the one that the client itself has called: nobody else is ever shown it.
    """
    if settings.public_base_url is not None:
        return settings.public_base_url
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        name, port = request.scope["server"]
        host = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    return f"{request.scope['scheme']}://{host}{request.scope.get('root_path', '')}/v1"


def _read_key(file: Path) -> bytes:
    for _ in range(2):
        with suppress(FileNotFoundError):
            key = file.read_bytes()
            if len(key) == _KEY_BYTES:
                return key
            file.unlink()  # whatever it is, it signs nothing; the links that it may have signed are lost
        _make_key(file)
    return file.read_bytes()


def _make_key(file: Path) -> None:
    """Of several processes that start at once the first one's key is everybody's."""
    part = file.with_name(f"{file.name}.{secrets.token_hex(8)}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(_KEY_BYTES))
            opened.flush()
            os.fsync(opened.fileno())
        with suppress(FileExistsError):
            os.link(part, file)
    finally:
        part.unlink(missing_ok=True)
