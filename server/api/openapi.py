"""The description of the API: `/openapi.json` for programs, `/docs` for people, and `/version`.

FastAPI's description is completed with what it cannot know: the key, the shape of errors, the statuses of each route,
and streams. `/docs` is made from that, without scripts and external files.
"""

import importlib.metadata
from html import escape
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import HTMLResponse, Response

from server.api.audio.routes import MEDIA_TYPES
from server.api.schema import Shown
from server.http.middleware import HEALTH_PATHS, needs_key

router = APIRouter(include_in_schema=False)
_SUMMARY = (
    "Chat, embeddings, images, speech and transcription on models of your own. Paths start at the server's address; "
    "the base address of client libraries ends in `/v1`. Every answer carries `x-request-id`, every error has the same "
    "shape, `Error`."
)
_ALWAYS = {
    400: "Not a valid HTTP request, or something wrong in the address.",
    401: "No key, or one that is unknown, expired or revoked: `invalid_api_key`.",
    403: "The key lacks the scope: `insufficient_permissions`.",
    429: "Over a limit of the key: `rate_limit_exceeded` or `insufficient_quota`.",
    431: "Address and headers are too large: `headers_too_large`.",
    500: "A failure of ours: `internal_error`.",
    503: "Busy, loading or ending: `Retry-After` says when to come back, if that is known.",
}
_WITH_BODY = {
    400: "A bad or missing field, not strict JSON, too long for the model, or beyond what it can do.",
    408: "The body stopped coming: `request_timeout`.",
    413: "The body is too large: `request_too_large`.",
    415: "The body is compressed or not JSON: `unsupported_media_type`.",
}
_WITH_FILE = {
    400: "A bad or missing field, or an incomplete form.",
    413: "The file is too large: `request_too_large`.",
    415: "The body is compressed or not a form: `unsupported_media_type`.",
    507: "The disk is full: `insufficient_storage`.",
}
_FILE = {"type": "string", "format": "binary"}
_AUDIO = {media_type.partition(";")[0]: {"schema": _FILE} for media_type in MEDIA_TYPES.values()}
_IMAGES = {"/v1/images/generations", "/v1/images/edits", "/v1/images/variations"}
_SUBTITLES = ("text/plain", "application/x-subrip", "text/vtt")
_RECORDINGS = {"/v1/audio/transcriptions", "/v1/audio/translations"}
_STREAMING = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", *_IMAGES, *_RECORDINGS}


class Failure(Shown, extra="forbid"):
    message: str
    """What is wrong and what to do next; for people."""
    type: Literal["invalid_request_error", "permission_error", "rate_limit_error", "server_error"]
    param: str | None
    """The field to blame, as a path like `messages[2].content`."""
    code: str | None
    """Stable; for programs, like `invalid_value`."""


class Error(BaseModel):
    error: Failure


def describe(found: dict[str, Any]) -> dict[str, Any]:
    """Complete FastAPI's description in place and return it. The result must be valid OpenAPI 3.1."""
    found["info"]["description"] = _SUMMARY
    components = found["components"]
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    made = Error.model_json_schema(ref_template="#/components/schemas/{model}")
    components["schemas"] |= {**made.pop("$defs"), "Error": made}
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer hk_...`"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
    }
    found["security"] = [{"bearer": []}, {"x-api-key": []}]
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            _complete(method.upper(), path, operation)
    return found


def _of_batches(method: str, path: str, responses: dict[str, Any]) -> dict[int, str]:
    """Return more statuses of files and batches by their meaning, and complete `responses`."""
    statuses: dict[int, str] = _WITH_FILE if (method, path) == ("POST", "/v1/files") else {}
    if path.endswith("/content"):
        responses["200"]["content"] = {"application/octet-stream": {"schema": _FILE}}
    if method == "DELETE" or path.endswith("/cancel"):
        statuses = {409: "A batch reads the file, or has ended: `file_in_use`, `batch_ended`."}
    if path != "/v1/files":
        statuses = {404: "There is no such file or batch, or it is another key's: `not_found`.", **statuses}
    return statuses


def _complete(method: str, path: str, operation: dict[str, Any]) -> None:  # noqa: C901  # a line for each kind
    responses = operation["responses"]
    responses.pop("422", None)  # never sent: our 400 replaces FastAPI's 422
    if path in HEALTH_PATHS:
        operation["security"] = []
        if path.endswith("/ready"):
            responses["503"] = {**responses["200"], "description": "A model is not ready, or the server is ending."}
        return
    statuses = dict(_ALWAYS)
    if not needs_key(method, path):
        operation["security"] = []
        responses["200"]["content"] = {f"image/{kind}": {"schema": _FILE} for kind in ("png", "jpeg", "webp")}
        statuses = {status: text for status, text in _ALWAYS.items() if status not in {401, 403, 429}}
        statuses[404] = "No such image, or its link has expired or was changed: `not_found`."
    if "requestBody" in operation:
        statuses |= _WITH_BODY
        answer = responses["200"].setdefault("content", {"application/json": {"schema": {"type": "object"}}})
        if path in _STREAMING:
            answer["text/event-stream"] = {"schema": {"type": "string", "description": "With `stream: true`."}}
    if path == "/v1/audio/speech":
        events = {"type": "string", "description": "With `stream_format: sse`."}
        responses["200"]["content"] = {**_AUDIO, "text/event-stream": {"schema": events}}
    if path in _RECORDINGS:
        statuses |= _WITH_FILE
        responses["200"]["content"] |= {kind: {"schema": {"type": "string"}} for kind in _SUBTITLES}
    elif path in _IMAGES:
        if path != "/v1/images/generations":
            statuses |= {400: _WITH_FILE[400], 415: _WITH_FILE[415]}
        statuses[507] = "The disk is full: `insufficient_storage`."
    if path.startswith(("/v1/files", "/v1/batches")):
        statuses |= _of_batches(method, path, responses)
    elif "{public_id}" in path:
        statuses[404] = "No key has this public id: `not_found`."
    elif ("requestBody" in operation or "{model}" in path) and not path.startswith("/v1/admin"):
        statuses[404] = "No such model, or the key may not use it: `model_not_found`."
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses |= {str(status): {"description": text, "content": content} for status, text in sorted(statuses.items())}
    operation["responses"] = dict(sorted(responses.items()))


_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Hearth API</title>
<style>
body {{ font: 1rem/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ border-bottom: 1px solid #8884; padding: .2rem .6rem .2rem 0; text-align: left; vertical-align: top }}
code, pre {{ font-size: .9em }} summary {{ cursor: pointer }} details {{ margin: .4rem 0 }}
:root {{ color-scheme: light dark }}
</style>
{body}
</html>
"""
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}


@router.head("/version")
@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of this server."""
    return {"version": importlib.metadata.version("hearth-inference")}


@router.head("/docs")
@router.get("/docs", response_class=Response)
async def read_reference(request: Request) -> Response:
    """Show every endpoint with its fields."""
    description = request.app.openapi()
    parts = [f"<h1>Hearth API</h1><p>{escape(description['info']['description'])}</p>"]
    schemas = description["components"]["schemas"]
    for path, operations in description["paths"].items():
        parts += [_operation(method, path, operation, schemas) for method, operation in operations.items()]
    return HTMLResponse(_PAGE.format(body="\n".join(parts)), headers=_HEADERS)


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    text = escape(operation.get("description", ""))
    rows = [(part["name"], part["schema"], part.get("required")) for part in operation.get("parameters", ())]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = content["schema"]
        schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        required = schema.get("required", ())
        rows += [(name, field, name in required) for name, field in schema.get("properties", {}).items()]
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(schema))}{' (required)' if required else ''}"
        f"<td>{escape(schema.get('description', ''))}"
        for name, schema, required in rows
    )
    table = f"<table><tr><th>Field<th>Type<th>Meaning{cells}</table>" if rows else ""
    head = f"<code><b>{method.upper()}</b> {escape(path)}</code>"
    return f"<details><summary>{head}</summary><p>{text}</p>{table}</details>"


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema or "const" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(_kind(choice) for choice in choices if choice.get("type") != "null"))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))
