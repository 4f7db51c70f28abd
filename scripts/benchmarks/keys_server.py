"""The server of `bench keys`: `hearth serve` with two routes more, which do nothing but what is to be measured."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import uvloop
from fastapi import APIRouter, Depends, Request

from engine import load_config
from server.app import create_app
from server.banner import Banner
from server.dependencies import TheMeter, any_key
from server.limits import headers_of
from server.routes.health import live
from server.serve import _base_urls, _listen, _make_key, _Server
from server.settings import load_settings
from server.store import ApiKey, StoreUnavailableError

if TYPE_CHECKING:
    from server.app import HearthApp
    from server.limits import Limiter
    from server.store import Ask, Level

OPEN_PATH = "/health/live"
# The same handler at a path of the same length; but this one needs a key.
KEY_PATH = "/bench/alive"
LIMITS_PATH = "/bench/limits"
TOKENS_TAKEN, TOKENS_USED = 500, 100
NOT_TAKEN = b"not taken"

router = APIRouter()
router.add_api_route(KEY_PATH, live)


async def take(limiter: Limiter, key: ApiKey) -> tuple[Ask | None, tuple[Level, ...]]:
    """Take what a chat request takes, as server/metering.py does."""
    limiter.refuse_early(key)
    return await limiter.take(key, TOKENS_TAKEN, asked=True)


@router.get(LIMITS_PATH)
async def limits(request: Request, key: Annotated[ApiKey, Depends(any_key)], meter: TheMeter) -> dict[str, str]:
    """Take and give back what a chat request would."""
    try:
        taken, levels = await take(meter.limiter, key)
    except StoreUnavailableError:  # a chat request is let through then
        return {"status": NOT_TAKEN.decode()}
    request.state.record.headers.update(headers_of(levels))
    if taken is not None:
        meter.limiter.give_back(taken, TOKENS_TAKEN - TOKENS_USED)
    return {"status": "ok"}


async def _serve() -> None:
    settings = load_settings(port=0)
    app: HearthApp = create_app(settings, load_config(settings.models))
    app.include_router(router)
    with _listen(settings) as listener:
        address, _ = _base_urls(settings, listener.getsockname()[1])
        banner = Banner(address, None, None, make_key=_make_key(settings))
        await _Server(app, banner, None).serve(sockets=[listener])


def main() -> None:
    """Serve until SIGTERM, by which the process simply ends, and its engine with it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())


if __name__ == "__main__":
    main()
