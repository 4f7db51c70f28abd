"""`GET /docs`: every endpoint with its fields, and which version this is.

Drawn from the machine-readable description, without a script and without anything from elsewhere.
"""

import importlib.metadata
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

router = APIRouter(include_in_schema=False)
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
    """Give the version of this server."""
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
