"""Turns every failure into an error answer: one table gives status and code, and all bodies have one shape.

Routes raise. No answer has the text of an exception that is not ours, a key, a path or the prompt.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

import engine
from server.store import KeyFieldError, KeyNotFoundError, StoreError, StoreUnavailableError
from server.validation import FieldError, field_path, most_specific, sentence

_log = logging.getLogger("hearth.server")
_SLASHES = re.compile("//+")
_TYPES = {403: "permission_error", 429: "rate_limit_error"}


@dataclass(eq=False)
class ApiError(Exception):
    """A failure with the status and code of its answer. `message` is ours and says what to do next."""

    status: int
    code: str | None
    message: str
    param: str | None = field(default=None, kw_only=True)
    headers: dict[str, str] = field(default_factory=dict, kw_only=True)
    limit: str | None = field(default=None, kw_only=True)
    """The limit that was reached, of the key or of the server, for the log."""
    model: str | None = field(default=None, kw_only=True)
    """The id of a model that the key may not use, for the log."""

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return the object under `error`, as it goes over the wire."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    def response(self) -> Response:
        content = msgspec.json.encode({"error": self.body()})
        return Response(content, self.status, self.headers, media_type="application/json")


def overloaded(message: str, retry_after_seconds: int = 5, *, limit: str | None = None, **headers: str) -> ApiError:
    """Return the 503 of a server that cannot answer now."""
    given = {"Retry-After": str(retry_after_seconds), **headers}
    return ApiError(503, "server_overloaded", message, headers=given, limit=limit)


def storage_failed() -> ApiError:
    """Return the 503 for a remote file storage that does not answer."""
    return overloaded("The storage for files does not answer. Try again in a moment.", 10)


NO_REPLICA = overloaded("No replica is ready. Try again in a few seconds.")

# The engine's error -> status and code; the first class that matches counts, so subclasses come first.
_TABLE: tuple[tuple[type[engine.EngineError], int, str], ...] = (
    (engine.ConfigError, 400, "invalid_config"),
    (engine.ContextLengthError, 400, "context_length_exceeded"),
    (engine.GrammarTooComplexError, 400, "schema_too_complex"),
    (engine.UnsupportedCapabilityError, 400, "unsupported_capability"),
    (engine.RequestError, 400, "invalid_value"),
    (engine.UnknownModelError, 404, "model_not_found"),
    (engine.OverloadedError, 503, "server_overloaded"),
    (engine.ModelLoadingError, 503, "model_loading"),
    (engine.UnavailableError, 503, "engine_unavailable"),
    (engine.GenerationError, 500, "internal_error"),
)


def to_api_error(error: BaseException) -> ApiError:
    """Translate any failure. An unexpected one is logged with its trace and becomes a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, engine.EngineError):
        for kind, status, code in _TABLE:
            if isinstance(error, kind):
                return _of_the_engine(error, status, code)
    if isinstance(error, StoreError) and (known := _of_the_store(error)):
        return known
    _log.error("unexpected failure", exc_info=error)
    message = "Internal error. Try again; if it happens again, tell your administrator the x-request-id."
    return ApiError(500, "internal_error", message)


def _of_the_engine(error: engine.EngineError, status: int, code: str) -> ApiError:
    headers = {}
    retry_after = getattr(error, "retry_after_seconds", None)
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    elif status == 503:
        headers["x-should-retry"] = "false"  # the official clients would wait minutes for nothing
    param = getattr(error, "param", None) or ("model" if status == 404 else None)
    return ApiError(status, code, error.message, param=param, headers=headers, limit=getattr(error, "limit", None))


def _of_the_store(error: StoreError) -> ApiError | None:
    """Return the error that the client may see; None for one that only the log may have."""
    if isinstance(error, StoreUnavailableError):
        return overloaded(error.message)
    if isinstance(error, KeyNotFoundError):  # its message repeats what was sent, which may be a whole key
        message = "There is no key with this public id. GET /v1/admin/keys lists all of them."
        return ApiError(404, "not_found", message, param="public_id")
    if isinstance(error, KeyFieldError):
        param = {"overlap": "overlap_seconds"}.get(error.field, error.field)
        param = f"limits.{param}" if param.endswith(("_per_minute", "_per_day", "_requests", "_items")) else param
        return ApiError(400, "invalid_value", error.message, param=param)
    return None


def invalid_body(findings: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Make the 400 for the most specific of what pydantic found in a body; each `loc` starts at the body."""
    finding = most_specific(findings)
    cause = finding.get("ctx", {}).get("error")
    param = cause.param if isinstance(cause, FieldError) else field_path(finding, body)
    missing = finding["type"] in {"missing", "union_tag_not_found"}
    if param is None and missing:
        return ApiError(400, "invalid_json", "The body is empty or null. Send a JSON object.")
    if param is None:
        return ApiError(400, "invalid_value", "The body must be a JSON object.")
    code = "missing_field" if missing else getattr(cause, "code", "invalid_value")
    return ApiError(400, code, f"`{param}` {sentence(finding)}.", param=param)


def install(app: FastAPI) -> None:
    """Have every failure of the app answered in the one shape of errors."""
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    for kind in (ApiError, engine.EngineError, StoreError, Exception):
        app.add_exception_handler(kind, _answer)


async def _validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101  # registered for nothing else
    findings = [{**finding, "loc": finding["loc"][1:]} for finding in error.errors()]  # without "body" or "query"
    in_query = error.errors()[0]["loc"][0] == "query"
    return await _answer(request, invalid_body(findings, dict(request.query_params) if in_query else error.body))


async def _http(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such path, no such method."""
    assert isinstance(error, HTTPException)  # noqa: S101
    api_error = ApiError(error.status_code, None, "This request cannot be answered.", headers=dict(error.headers or {}))
    if error.status_code == 404:
        api_error = ApiError(404, "not_found", f"Unknown path. {_advice(request)}")
    if error.status_code == 405:
        # Starlette knows only the methods of the first route with this address.
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE]
        allowed = ", ".join(sorted({method for route in routes for method in getattr(route, "methods", None) or ()}))
        headers = api_error.headers | {"Allow": allowed}
        api_error = ApiError(405, "method_not_allowed", f"This address takes {allowed} only.", headers=headers)
    return await _answer(request, api_error)


def _advice(request: Request) -> str:
    """Say what to change in an unknown address; frequent mistakes have a sentence of their own."""
    path = request.url.path

    def is_route(path: str) -> bool:
        scope = {**request.scope, "path": path}
        return any(route.matches(scope)[0] != Match.NONE for route in request.app.routes)

    if path.startswith("/v1/v1/"):
        return "It begins with /v1 twice: remove one /v1 from the base address of your client."
    if is_route(_SLASHES.sub("/", path)):
        return "It has two slashes in a row: remove one."
    if is_route(path.rstrip("/")):
        return "Remove the slash at the end."
    if is_route(f"/v1{path}"):
        return "The base address ends in /v1, like http://<this server>/v1."
    return f"There is {_endpoints(request.app.routes)}. GET /docs shows their fields."


def _endpoints(routes: Sequence[BaseRoute]) -> str:
    """List the endpoints that most keys may use."""
    paths = dict.fromkeys(getattr(route, "path", "") for route in routes)
    return ", ".join(path for path in paths if path.startswith("/v1/") and "{" not in path and "/admin/" not in path)


async def _answer(request: Request, error: Exception) -> Response:
    api_error = to_api_error(error)
    request.state.record.refused(api_error)
    return api_error.response()
