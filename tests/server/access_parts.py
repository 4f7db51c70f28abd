"""Every route that the app has, and what each asks of a key, as the app itself lists them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chat_parts import HELLO, MODEL
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from engine import load_config
from server.app import create_app
from server.auth.access import RequiresScope
from server.http.middleware import OPEN_PATHS
from server.settings import load_settings

# What every valid key may do, whatever its scopes. All else that is closed needs exactly one.
FOR_ALL_KEYS = {
    ("GET", "/version"),
    ("HEAD", "/version"),
    ("GET", "/v1/usage"),
    ("GET", "/v1/key"),
    ("DELETE", "/console/session"),
}
# Asks for a signed link instead of a key: tests/server/api/images/test_images.py.
IMAGE_FILE = f"/v1/images/files/{MODEL}"
PAGE_FILE = f"/console/{MODEL}"
SIGN_IN = "/console/session"
OPEN = {
    ("GET", PAGE_FILE),
    ("HEAD", PAGE_FILE),
    ("POST", SIGN_IN),
    *[(method, path) for path in OPEN_PATHS for method in ("GET", "HEAD")],
    ("GET", IMAGE_FILE),
    ("HEAD", IMAGE_FILE),
}
# Has what every route that names a model wants.
ANY_BODY: dict[str, Any] = {
    "model": "service-pro",
    "messages": HELLO,
    "prompt": "Hello",
    "input": "Hello",
    "voice": "emma",
    "max_tokens": 1,
    "tokens": [1],
    "query": "Hello",
    "documents": ["Hello"],
}
APP = create_app(load_settings(), load_config(Path(__file__).parents[2] / "models.yaml"))


def address(route: BaseRoute) -> str:
    path: str = route.path  # type: ignore[attr-defined]
    return re.sub(r"\{[^}]*\}", MODEL, path)


def every_route() -> list[tuple[str, str]]:
    """Method and path of everything the app has, as the app itself lists it."""
    return sorted(
        (method, address(route)) for route in APP.routes for method in getattr(route, "methods", None) or ["GET"]
    )


def scopes_asked_for(dependant: Dependant) -> set[str]:
    """The scopes of every `RequiresScope` that FastAPI would ask before it calls the route."""
    found = set().union(*(scopes_asked_for(below) for below in dependant.dependencies))
    if isinstance(dependant.call, RequiresScope):
        found.add(dependant.call.scope)
    return found


def scopes_by_route() -> dict[tuple[str, str], set[str]]:
    return {
        (method, address(route)): scopes_asked_for(route.dependant) if isinstance(route, APIRoute) else set()
        for route in APP.routes
        for method in getattr(route, "methods", None) or ["GET"]
    }


def routes_that_name_a_model() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Those whose body has a field `model`, with such a body, or whose address ends with one."""
    for route in APP.routes:
        if isinstance(route, APIRoute):
            body = route.body_field.field_info.annotation if route.body_field else None
            fields = getattr(body, "model_fields", {})
            known = {name: value for name, value in ANY_BODY.items() if name in fields and fields[name].is_required()}
            if "model" in known or "{model" in route.path:
                path = re.sub(r"\{[^}]*\}", "service-pro", route.path)
                yield from ((method, path, known) for method in route.methods)


ROUTES = every_route()


SCOPES_ASKED = scopes_by_route()


SCOPED = [(*route, next(iter(scopes))) for route, scopes in SCOPES_ASKED.items() if scopes]


CLOSED = [
    *[route for route in ROUTES if route not in OPEN],
    ("GET", "/no/such/path"),
    ("POST", IMAGE_FILE),
    ("GET", "/v1/images/files"),
    ("GET", f"{IMAGE_FILE}/more"),
]
