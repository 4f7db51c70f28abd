"""The middleware of every request, as pure ASGI, from the outside in.

Request id and access line; CORS; the drain; the key; the limit of running requests. The limits of a key are
server/auth/metering.py's, and the queue of a model is the engine's: the limit here refuses floods before anything of
them is read.
"""

import re
import secrets
from collections.abc import Awaitable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.admission import InFlight
from server.auth.sessions import halves_of
from server.errors import ApiError, overloaded, to_api_error
from server.http.disconnect import ClientDisconnectedError, Drain, shutting_down
from server.http.protocol import SECURITY_HEADERS, header_of
from server.observability.access_log import RequestRecord
from server.store import StoreUnavailableError
from server.store.keys import KEY_PREFIX, ApiKey

# All paths that need no key: health, also at the paths of other servers; the description of the API; the page's files,
# and signing in; and image files, which need a signed link instead.
HEALTH_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
OPEN_PATHS = HEALTH_PATHS | {"/", "/docs", "/openapi.json"}
# A setting may add these: Open WebUI asks for them without a key.
VOICE_LISTS = frozenset({"/v1/audio/voices", "/v1/audio/models"})
_IMAGE_FILE = re.compile(r"/v1/images/files/[^/]+")
_PAGE_FILE = re.compile(r"/console/(?!session).+")
_SECURITY_HEADERS = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# The headers that a web page of another origin may read.
_EXPOSED_HEADERS = (
    "x-request-id",
    "Retry-After",
    "x-should-retry",
    "x-hearth-clamped",
    "x-hearth-ignored",
    *(f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
)


def needs_key(method: str, path: str) -> bool:
    """Whether a request is refused without a valid key."""
    if path in OPEN_PATHS or (method == "POST" and path == "/console/session"):
        return False
    return not (method in {"GET", "HEAD"} and (_IMAGE_FILE.fullmatch(path) or _PAGE_FILE.fullmatch(path)))


class RequestContext:
    """Outermost: sets `x-request-id`, writes the access line and the span, and answers all exceptions."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        record = RequestRecord(_request_id(scope), scope["method"], client[0] if client else None)
        scope.setdefault("state", {})["record"] = record

        def send_with_id(message: Message) -> Awaitable[None]:
            """Return `send`'s awaitable: a coroutine here would cost one more for each token."""
            if message["type"] == "http.response.start":
                record.status = message["status"]
                raw = message.setdefault("headers", [])
                MutableHeaders(raw=raw).update({"x-request-id": record.request_id, **record.headers})
                given = {name for name, _ in raw}
                raw += [header for header in _SECURITY_HEADERS if header[0] not in given]
            return send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnectedError:
            pass  # the client has left
        except Exception as error:  # noqa: BLE001  # last resort: the app's own handlers have answered or cannot
            api_error = to_api_error(error)
            if record.status is None:
                record.refused(api_error)
                await api_error.response()(scope, receive, send_with_id)
        finally:
            record.routed(getattr(scope.get("route"), "path", None), scope["path"])
            record.status = record.status or 499  # nothing was sent: the client had left
            state = scope["app"].state
            state.access_log.append(record)
            state.metrics.finished(record)
            if record.error_code is not None:
                state.lately.refuse(record)
            if state.tracing is not None:
                state.tracing.finished(record, header_of(scope, b"traceparent"))


def _request_id(scope: Scope) -> str:
    given = header_of(scope, b"x-request-id")
    # It is echoed and logged: a key that was sent there by mistake must not be.
    usable = given is not None and _REQUEST_ID.fullmatch(given) and "hk_" not in given
    return given if given is not None and usable else f"req_{secrets.token_hex(12)}"


class Cors(CORSMiddleware):
    """Answers a browser's preflight before any key is asked for: with a refusal unless a setting names its origin.

    Keys come in headers and never in cookies, so credentials in the browser's sense are not allowed: a page has
    no more rights than the key that its user gave it.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"),
            allow_headers=("*",),  # client libraries send a dozen of their own
            allow_private_network=True,  # a public page may call into a private network, if the setting has its origin
            expose_headers=_EXPOSED_HEADERS,
            max_age=600,
        )
        self._app = app
        self._named = bool(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Without a named origin, answer preflights and leave the rest as it is."""
        preflight = scope["type"] == "http" and header_of(scope, b"access-control-request-method") is not None
        await (super().__call__ if self._named or preflight else self._app)(scope, receive, send)

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the answer to a preflight; a refusal has our error shape."""
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        sentence = "This method may not be used from a web page."
        if not self.is_allowed_origin(request_headers["origin"]):
            sentence = (
                "Web pages of this origin may not call this server. Your administrator can add the origin to the "
                "setting HEARTH_CORS_ORIGINS."
            )
        refusal = ApiError(403, "origin_not_allowed", sentence).response()
        refusal.headers["vary"] = answer.headers["vary"]
        return refusal


class Gate:
    """Refuses requests during a drain, without a valid key, and beyond the limit of running requests.

    Deny by default: what is not on the lists above needs a key, even paths that do not exist. The bound on running
    requests is fair between keys; requests without a key count as one key's.
    """

    def __init__(self, app: ASGIApp, most_running: int) -> None:
        self._app = app
        self._most_running = most_running
        self._running = InFlight()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        record: RequestRecord = scope["state"]["record"]
        drain: Drain = scope["app"].state.drain
        with drain.request():
            try:
                if drain.draining:
                    raise shutting_down()
                scope["state"]["key"] = key = await _key_of(scope)
                record.key = None if key is None else key.public_id
                if self._running.has_share(record.key, self._most_running):
                    sentence = "Too many requests run here at the same time. Try again in a few seconds, or send fewer."
                    raise overloaded(sentence, limit="running_requests")
            except ApiError as error:
                record.refused(error)
                await error.response()(scope, receive, send)
                return
            self._running.add(record.key)
            try:
                await self._app(scope, receive, send)
            finally:
                self._running.remove(record.key)


async def _key_of(scope: Scope) -> ApiKey | None:
    """Return the valid key of a request; None for a path that needs none. Raises `ApiError` 401 or 503."""
    if not needs_key(scope["method"], scope["path"]):
        return None
    text = _key_text(scope)
    halves = None if text else halves_of(scope)  # a key takes precedence over a session
    if not text and halves is None:
        if scope["method"] == "GET" and scope["path"] in VOICE_LISTS and scope["app"].state.settings.open_voice_list:
            return None
        raise _unauthorized("Send your key in the header `Authorization: Bearer <key>` or `x-api-key: <key>`.")
    try:
        state = scope["app"].state
        key: ApiKey | None = await (state.keys.authenticate(text) if halves is None else state.sessions.key_of(halves))
    except StoreUnavailableError as error:
        raise overloaded("Keys cannot be checked right now. Try again in a few seconds.") from error
    if key is None and not text:
        raise _unauthorized("This session has ended, or its key. Sign in again.")
    if key is None:
        # litellm recognises a bad key by these first words only; otherwise it reports a bad request.
        raise _unauthorized(
            "Incorrect API key provided: it is unknown, expired or revoked. Ask your administrator for a new one."
        )
    return key


def _key_text(scope: Scope) -> str:
    """Return the key as it was sent, empty if none was. `Authorization` wins, with or without the word Bearer."""
    authorization = (header_of(scope, b"authorization") or "").strip()
    scheme, _, text = authorization.partition(" ")
    if scheme.lower() == "bearer" and text.strip():
        return text.strip()
    if authorization.startswith(KEY_PREFIX):
        return authorization
    headers = (header_of(scope, name) or "" for name in (b"x-api-key", b"api-key"))
    return next((key for text in headers if (key := text.strip())), "")


def _unauthorized(message: str) -> ApiError:
    # Without x-should-retry Claude Code silently repeats a 401 for minutes.
    headers = {"WWW-Authenticate": "Bearer", "x-should-retry": "false"}
    return ApiError(401, "invalid_api_key", message, headers=headers)
