"""What a browser asks of the page itself: who answers at `/`, its files, and signing in and out.

The files are read once, and given by a fixed table of names, so that no path of a client's reaches the disk.
"""

import gzip
import hashlib
import importlib.metadata
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field, model_validator
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import JSONResponse, Response

from server.api.caller import of_app
from server.api.key import OwnKey, own_key
from server.api.schema import Strict
from server.auth.sessions import OnceLinks, Sessions, SignIns, cookie, halves_of, same_origin
from server.errors import ApiError
from server.http.bodies import StrictRoute
from server.store import KeyNotFoundError
from server.store.key_cache import KeyCache
from server.store.keys import ApiKey


class _FileName(Convertor[str]):
    """Any name but that of the session, whose address takes other methods."""

    regex = "(?!session$).+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("page_file", _FileName())
root = APIRouter(include_in_schema=False)
router = APIRouter(prefix="/console", include_in_schema=False, route_class=StrictRoute)
_Half = Annotated[str, Field(max_length=256)]
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


def _answer_file(request: Request, name: str) -> Response:
    """Answer with a file of the page. Raises `ApiError` 404."""
    file = files().get(name)
    if file is None:
        raise ApiError(404, "not_found", "The page has no such file.")
    if request.headers.get("if-none-match") == file.headers["ETag"]:
        return Response(status_code=304, headers=file.headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, headers=file.headers | {"Content-Encoding": "gzip"})
    return Response(file.content, headers=file.headers)


@root.head("/")
@root.get("/", response_class=Response)
async def who_answers(request: Request) -> Response:
    """Say who answers here, and where to go: the page for a browser, JSON for other clients."""
    if request.app.state.settings.console and "text/html" in request.headers.get("accept", ""):
        return _answer_file(request, "index.html")
    base_url = str(request.base_url).rstrip("/")
    return JSONResponse(
        {
            "name": "Hearth",
            "version": importlib.metadata.version("hearth-inference"),
            "base_url": f"{base_url}/v1",
            "docs": f"{base_url}/docs",
        },
        headers={"Vary": "Accept, Accept-Encoding"},
    )


class SignInBody(Strict):
    """The body of `POST /console/session`: one of the two."""

    key: _Half | None = None
    once: _Half | None = None
    """The token after `#once=` in a sign-in link."""

    @model_validator(mode="after")
    def _one_of_them(self) -> "SignInBody":
        if (self.key is None) == (self.once is None):
            raise ValueError("must have one of `key` and `once`")
        return self


@router.post("/session")
async def sign_in(body: SignInBody, request: Request) -> Response:
    """Begin a session: the answer keeps one half in a cookie, and has the other for the page."""
    if not same_origin(request):
        raise ApiError(403, "insufficient_permissions", "Only the page of this server signs in here.")
    sign_ins: SignIns = request.app.state.sign_ins
    address = request.client.host if request.client else "unknown"
    sign_ins.check(address)
    key = await _key_of(body, request.app.state)
    if key is None:
        sign_ins.failed(address)
        sentence = "This key is unknown, expired or revoked." if body.key else "This link was used, or is too old."
        raise ApiError(401, "invalid_api_key", f"{sentence} Ask your administrator for a key.")
    request.state.record.key = key.public_id
    halves = await request.app.state.sessions.begin(key, address)
    shown: OwnKey = await own_key(request, key)
    answer: dict[str, Any] = {"token": halves.token, "key": shown.model_dump(mode="json")}
    return JSONResponse(answer, headers={"Set-Cookie": cookie(request, halves.half)})


async def _key_of(body: SignInBody, state: Any) -> ApiKey | None:
    keys: KeyCache = state.keys
    if body.key is not None:
        return await keys.authenticate(body.key.strip())
    links: OnceLinks = state.once_links
    public_id = links.use(body.once or "")
    if public_id is None:
        return None
    try:
        key = await keys.store.find(public_id)
    except KeyNotFoundError:
        return None
    return key if key.usable_at(keys.store.clock()) else None


@router.delete("/session", status_code=204)
async def sign_out(request: Request, sessions: Annotated[Sessions, Depends(of_app("sessions"))]) -> Response:
    halves = halves_of(request.scope)
    if halves is not None:
        await sessions.end(halves)
    return Response(status_code=204, headers={"Set-Cookie": cookie(request, "")})


@router.head("/{name:page_file}")
@router.get("/{name:page_file}", response_class=Response)
async def read_file(name: str, request: Request) -> Response:
    return _answer_file(request, name)
