"""The page's files: read once, given by a fixed table of names, so that no path of a client's reaches the disk."""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from server.errors import ApiError

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# No inline scripts or styles, nothing from elsewhere, and no way to make a script or markup out of text.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# The microphone is for dictation, which a person begins by a button. A page that frames this one would not get it.
_FEATURES = "microphone=(self), camera=(), display-capture=(), geolocation=(), payment=(), usb=()"


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    packed: bytes
    headers: dict[str, str]


@cache
def files() -> dict[str, File]:
    """Return the files by their names below the folder. Reads the disk when it is called first."""
    return {str(path.relative_to(_FOLDER)): _read(path) for path in _FOLDER.rglob("*") if path.suffix in _TYPES}


def _read(path: Path) -> File:
    content = path.read_bytes()
    headers = {
        "Content-Type": _TYPES[path.suffix],
        "Content-Security-Policy": _POLICY,
        "Permissions-Policy": _FEATURES,
        "Cache-Control": "no-cache",  # asked for each time, and answered with 304
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        "Vary": "Accept, Accept-Encoding",
    }
    return File(content, gzip.compress(content, mtime=0), headers)


def answer_file(request: Request, name: str) -> Response:
    """Answer with a file of the page. Raises `ApiError` 404."""
    file = files().get(name)
    if file is None:
        raise ApiError(404, "not_found", "The page has no such file.")
    if request.headers.get("if-none-match") == file.headers["ETag"]:
        return Response(status_code=304, headers=file.headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, headers=file.headers | {"Content-Encoding": "gzip"})
    return Response(file.content, headers=file.headers)
