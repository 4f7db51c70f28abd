"""How uvicorn serves HTTP here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import uvicorn

from server.protocol import HearthProtocol

if TYPE_CHECKING:
    from server.settings import Settings
    from server.tls import Certificate

# Longer than others keep one for their next request (openai's client 5 s, aiohttp 15, nginx 60): whoever closes first
# may close upon a request that is on its way, and that one is lost.
_IDLE_SECONDS = 75
_LAST_WRITES_SECONDS = 2  # for connections whose client does not read, once everything else has ended


def http_config(app: Any, settings: Settings, certificate: Certificate | None) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    return uvicorn.Config(
        app,
        http=HearthProtocol,
        ws="none",  # it would pass by our middleware
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Its own default believes whatever is sent from this machine.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_LAST_WRITES_SECONDS,
    )
