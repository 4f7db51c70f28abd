"""What a person finds who opens the server's address in a browser: who it is, and every endpoint with its fields.

Drawn from the machine-readable description, without a script and without anything from elsewhere.
"""

import importlib.metadata
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

router = APIRouter(include_in_schema=False)
_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
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
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Vary": "Accept",
}


@router.head("/")
@router.get("/", response_class=Response)
async def who_answers(request: Request) -> Response:
    """Say who answers here, and where to go: a page for a browser, JSON for other clients."""
    base_url = str(request.base_url).rstrip("/")
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse(
            {"name": "Hearth", "version": _version(), "base_url": f"{base_url}/v1", "docs": f"{base_url}/docs"},
            headers={"Vary": "Accept"},
        )
    body = (
        "<h1>Hearth</h1><p>Chat, images and speech on this machine. The API follows the OpenAI convention.</p>"
        f"<p>Base address for clients: <code>{escape(base_url)}/v1</code></p>"
        "<p>A key comes from the administrator of this server. It is sent as <code>Authorization: Bearer hk_...</code>"
        '</p><p><a href="docs">All endpoints and fields</a> · <a href="openapi.json">OpenAPI description</a> · '
        '<a href="health/ready">State of the models</a></p>'
    )
    return _page("Hearth", body)


@router.head("/version")
@router.get("/version")
async def version() -> dict[str, str]:
    """Give the version of this server."""
    return {"version": _version()}


@router.head("/docs")
@router.get("/docs", response_class=Response)
async def read_reference(request: Request) -> Response:
    """Show every endpoint with its fields."""
    description = request.app.openapi()
    parts = [f"<h1>Hearth API</h1><p>{escape(description['info']['description'])}</p>"]
    schemas = description["components"]["schemas"]
    for path, operations in description["paths"].items():
        parts += [_operation(method, path, operation, schemas) for method, operation in operations.items()]
    return _page("Hearth API", "\n".join(parts))


def _version() -> str:
    return importlib.metadata.version("hearth-inference")


def _page(title: str, body: str) -> Response:
    return HTMLResponse(_PAGE.format(title=escape(title), body=body), headers=_HEADERS)


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    text = escape(operation.get("description", ""))
    rows = [(part["name"], part["schema"], part.get("required")) for part in operation.get("parameters", ())]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        rows += list(_fields(content["schema"], schemas))
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(schema))}{' (required)' if required else ''}"
        f"<td>{escape(schema.get('description', ''))}"
        for name, schema, required in rows
    )
    table = f"<table><tr><th>Field<th>Type<th>Meaning{cells}</table>" if rows else ""
    head = f"<code><b>{method.upper()}</b> {escape(path)}</code>"
    return f"<details><summary>{head}</summary><p>{text}</p>{table}</details>"


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for name, field in schema.get("properties", {}).items():
        yield name, field, name in schema.get("required", ())


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
