"""How to call a route, worked out once when the app is built. FastAPI works it out anew for every request.

There is a plan for routes that ask for no more than one body and what our own dependencies give, at an address without
parameters: all that answer a model's work. The others are FastAPI's to call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from fastapi.exceptions import RequestValidationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fastapi._compat import ModelField
    from fastapi.dependencies.models import Dependant
    from fastapi.routing import APIRoute
    from starlette.requests import Request
    from starlette.responses import Response

_Ask: TypeAlias = "Callable[[Request], Awaitable[Any]]"


@dataclass(frozen=True, slots=True)
class Plan:
    """A function with all that it asks for."""

    function: Callable[..., Awaitable[Response]]
    dependencies: tuple[tuple[str | None, _Ask], ...]  # by the name of the parameter, if there is one for it
    body: ModelField | None
    request_name: str | None

    @classmethod
    def of(cls, route: APIRoute) -> Plan | None:
        """Make the plan of a route; None where only FastAPI knows how to call it."""
        asked, body = route.dependant, route.body_field
        if (
            asked.call is None
            or not asked.is_coroutine_callable
            or route.response_field is not None  # to be made of what the function returns
            or "{" in route.path
            or not _asks_little(asked)
            or not all(_is_plain(below) for below in asked.dependencies)
            or asked.body_params != ([] if body is None else [body])
            or not (body is None or body.field_info.is_required())
        ):
            return None
        dependencies = tuple((below.name, below.call) for below in asked.dependencies if below.call is not None)
        return cls(asked.call, dependencies, body, asked.request_param_name)

    async def answer(self, request: Request, body: Any) -> Response:
        """Call it with a parsed body, in FastAPI's order. Raises `RequestValidationError`, and what is raised below."""
        values: dict[str, Any] = {}
        for name, ask in self.dependencies:
            given = await ask(request)
            if name is not None:
                values[name] = given
        if self.body is not None:
            values[self.body.name] = _checked(self.body, body)
        if self.request_name is not None:
            values[self.request_name] = request
        return await self.function(**values)


def _is_plain(dependency: Dependant) -> bool:
    """Whether it is called with the request and nothing else, without a thread and without an end."""
    return (
        dependency.is_coroutine_callable
        and dependency.request_param_name is not None
        and not dependency.dependencies
        and not dependency.body_params
        and _asks_little(dependency)
    )


def _asks_little(asked: Dependant) -> bool:
    return not (
        asked.path_params
        or asked.query_params
        or asked.header_params
        or asked.cookie_params
        or asked.http_connection_param_name
        or asked.websocket_param_name
        or asked.response_param_name
        or asked.background_tasks_param_name
        or asked.security_scopes_param_name
    )


def _checked(field: ModelField, body: Any) -> Any:
    if body is None:  # a body of `null`
        raise RequestValidationError([{"type": "missing", "loc": ("body",)}], body=body)
    value, findings = field.validate(body, {}, loc=("body",))
    if findings:
        raise RequestValidationError(findings, body=body)
    return value
