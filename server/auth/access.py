"""Asks of a request's key that it has a scope. Who has asked with which key is the middleware's to know."""

# No `from __future__ import annotations` here: FastAPI cannot resolve those of an object that is called.
from dataclasses import dataclass

from fastapi import Request

from server.errors import ApiError
from server.store import ApiKey


@dataclass(frozen=True, slots=True)
class KeyWith:
    """A dependency that gives the request's key if it has `scope`, and a 403 otherwise."""

    scope: str

    async def __call__(self, request: Request) -> ApiKey:
        """Raise `ApiError` 403."""
        return self.check(request)

    def check(self, request: Request) -> ApiKey:
        """Return the key without a wait. Raises `ApiError` 403."""
        found: ApiKey = request.state.key
        if self.scope not in found.scopes:
            raise ApiError(
                403,
                "insufficient_permissions",
                f"This key lacks the scope `{self.scope}`. Ask whoever runs this server for a key that has it.",
                type="permission_error",
            )
        return found


@dataclass(frozen=True, slots=True)
class KeyIfSent:
    """The same for what a setting may open: None where no key was sent."""

    scope: str

    async def __call__(self, request: Request) -> ApiKey | None:
        """Raise `ApiError` 403."""
        return None if request.state.key is None else KeyWith(self.scope).check(request)
