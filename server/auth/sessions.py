"""Signing in to the page: sessions in two halves, links that sign in once, and the limit of failed sign-ins.

The first half is a cookie that no script can read, the second a token that the page sends in a header. Neither works
alone, and neither is the key: a cookie is sent to every port of a host, and to pages that others have written.
"""

import math
import re
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import HTTPConnection
from starlette.types import Scope

from server.errors import ApiError
from server.store.key_cache import KeyCache
from server.store.keys import LONGEST_SESSION, ApiKey, SessionStore, digest

HEADER = "X-Hearth-Session"
ONCE_SECONDS = 600.0
_HALF = re.compile(r"[A-Za-z0-9_-]{43}")
_FAILURES = 10
_FAILURES_SECONDS = 60.0
_MOST_ADDRESSES = 4096


@dataclass(frozen=True, slots=True)
class Halves:
    """The cookie (`half`) and the header (`token`) of a request's session."""

    half: str = field(repr=False)
    token: str = field(repr=False)


def halves_of(scope: Scope) -> Halves | None:
    """Return the session that a request presents; None without the header; empty halves if it cannot be valid.

    Other origins cannot send the header. If the browser sends `Sec-Fetch-Site`, it must be `same-origin`.
    """
    request = HTTPConnection(scope)
    token = request.headers.get(HEADER)
    if token is None:
        return None
    half = request.cookies.get(cookie_name(request), "")
    good = same_origin(request) and _HALF.fullmatch(token) and _HALF.fullmatch(half)
    return Halves(half, token) if good else Halves("", "")


def same_origin(request: HTTPConnection) -> bool:
    return request.headers.get("sec-fetch-site", "same-origin") == "same-origin"


def cookie_name(request: HTTPConnection) -> str:
    """Return a name with the port: browsers share cookies between ports, and two servers would replace each other's."""
    secure, port = request.url.scheme == "https", None
    with suppress(ValueError):  # the header Host may hold anything
        port = request.url.port
    return f"{'__Host-' if secure else ''}hearth-{port or (443 if secure else 80)}"


def cookie(request: HTTPConnection, half: str) -> str:
    """Return the `Set-Cookie` header for the first half; an empty one deletes the cookie."""
    seconds = int(LONGEST_SESSION.total_seconds()) if half else 0
    secure = "; Secure" if request.url.scheme == "https" else ""
    return f"{cookie_name(request)}={half}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


class Sessions:
    """Begins, checks and ends sessions. Checks go through the cache of keys: ended ones are refused within seconds."""

    def __init__(self, store: SessionStore, keys: KeyCache) -> None:
        self._store = store
        self._keys = keys

    async def begin(self, key: ApiKey, origin: str) -> Halves:
        return Halves(*await self._store.create(key, origin))

    async def key_of(self, halves: Halves) -> ApiKey | None:
        """Return the usable key that signed in, or None. Raises StoreUnavailableError."""
        if not halves.half:
            return None
        ask = partial(self._store.check, halves.half, halves.token)
        return await self._keys.admit(_both(halves), ask)

    async def end(self, halves: Halves) -> None:
        await self._store.end(halves.half)
        self._keys.forget(_both(halves))


def _both(halves: Halves) -> bytes:
    return digest(f"{halves.half}.{halves.token}")


class OnceLinks:
    """Tokens that sign in once, within 10 minutes, each for one key. In memory: a restart ends them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: dict[bytes, tuple[str, float]] = {}

    def make(self, public_id: str) -> str:
        token = secrets.token_urlsafe(32)
        self._tokens[digest(token)] = (public_id, self._clock() + ONCE_SECONDS)
        return token

    def use(self, token: str) -> str | None:
        """Return the public id of the token's key and forget the token; None if it is unknown or too old."""
        public_id, until = self._tokens.pop(digest(token), (None, 0.0))
        return public_id if self._clock() < until else None


class SignIns:
    """Failed sign-ins of each address: up to 10 a minute are allowed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, address: str) -> None:
        """Raise `ApiError` 429 for an address that has failed too often."""
        failed = self._failed.get(address, deque())
        while failed and failed[0] <= self._clock() - _FAILURES_SECONDS:
            failed.popleft()
        if len(failed) >= _FAILURES:
            wait = math.ceil(failed[0] + _FAILURES_SECONDS - self._clock())
            sentence = f"Too many sign-ins with a wrong key from your address. Try again in {wait} s."
            raise ApiError(429, "rate_limit_exceeded", sentence, headers={"Retry-After": str(max(wait, 1))})

    def failed(self, address: str) -> None:
        self._failed.setdefault(address, deque()).append(self._clock())
        self._failed.move_to_end(address)
        while len(self._failed) > _MOST_ADDRESSES:
            self._failed.popitem(last=False)
