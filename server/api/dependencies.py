"""What routes ask for: the caller of an endpoint that does work, a key with a scope, or one part of the app.

All of it is `async`, though nothing waits: FastAPI runs each plain function on a thread, at the price of a token.
"""

# No `from __future__ import annotations` here: FastAPI cannot resolve those of an object that is called.
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from engine import Engine
from server.auth.access import Access, RequiresScope
from server.auth.metering import Meter, MeteredEngine
from server.http.disconnect import Drain
from server.observability.access_log import RequestRecord
from server.settings import Settings
from server.store import Actor, ApiKey, AuditLog


@dataclass(frozen=True, slots=True)
class Caller:
    """One request, the key it came with, and what it takes to answer it. `engine` is held to the key's limits."""

    request: Request
    record: RequestRecord
    key: ApiKey
    engine: MeteredEngine
    access: Access
    settings: Settings
    drain: Drain


class CallerWith(RequiresScope):
    """A dependency that gives the caller if its key has `scope`, which also names the work in the usage book."""

    __slots__ = ()

    async def __call__(self, request: Request) -> Caller:
        """Raise `ApiError` 403."""
        key, app, record = self.check(request), request.app.state, request.state.record
        engine = MeteredEngine(app.engine, app.meter, key, record, kind=self.scope)
        return Caller(request, record, key, engine, app.access, app.settings, app.drain)


def of_app(name: str) -> Callable[[Request], Awaitable[Any]]:
    """Make a dependency that gives this part of the app's state."""

    async def part(request: Request) -> Any:
        return getattr(request.app.state, name)

    return part


async def _any_key(request: Request) -> ApiKey:
    key: ApiKey = request.state.key
    return key


async def _audit(request: Request) -> AuditLog:
    return AuditLog(request.app.state.database)


async def _actor(request: Request) -> Actor:
    return Actor(request.state.key.public_id, request.client.host if request.client else "unknown")


ChatCaller = Annotated[Caller, Depends(CallerWith("chat"))]
AnyKey = Annotated[ApiKey, Depends(_any_key)]  # whatever it may do
TheEngine = Annotated[Engine, Depends(of_app("engine"))]
TheAccess = Annotated[Access, Depends(of_app("access"))]
TheSettings = Annotated[Settings, Depends(of_app("settings"))]
TheDrain = Annotated[Drain, Depends(of_app("drain"))]
TheMeter = Annotated[Meter, Depends(of_app("meter"))]
TheAudit = Annotated[AuditLog, Depends(_audit)]
TheActor = Annotated[Actor, Depends(_actor)]  # for the log of changes
