"""Fetches pictures from https addresses that clients name, without letting them reach into the house.

Off unless HEARTH_FETCH_IMAGES is set. The rules: https on its usual port, a name that resolves (once) to public
addresses only, no redirects, a cap on bytes while they arrive, a few seconds for all of it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from engine import RequestError

_SECONDS = 5.0
_AT_ONCE = 8
_HTTPS_PORT = 443
# A translator in the network (RFC 6052) would lead these to any IPv4 address, private ones included.
_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the internet at large and not to this machine or its networks."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if inner:
            return is_public(str(inner))
        if any(ip in network for network in _NAT64) or ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class ImageFetcher:
    """Fetches one picture per call. `is_allowed`, `port` and `tls` are for tests that serve their own pictures."""

    def __init__(
        self,
        max_bytes: int,
        *,
        is_allowed: Callable[[str], bool] = is_public,
        port: int = _HTTPS_PORT,
        tls: ssl.SSLContext | bool = True,
    ) -> None:
        self._max_bytes = max_bytes
        self._is_allowed = is_allowed
        self._port = port
        self._tls = tls
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def __call__(self, address: str) -> bytes:
        """Return what lies at `address`. Raises `RequestError` without a `param`, saying what is not allowed."""
        url = self._checked(address)
        connector = aiohttp.TCPConnector(
            resolver=_PublicResolver(self._is_allowed), use_dns_cache=False, ssl=self._tls, limit=1
        )
        try:
            async with (
                self._turns,
                asyncio.timeout(_SECONDS),
                aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False) as session,
                session.get(url, allow_redirects=False, headers={"Accept": "image/*"}) as response,
            ):
                if response.status != 200:
                    raise RequestError(
                        f"The address of this picture answered {response.status}; redirects are not followed. Give "
                        "the picture's own address, or send it as a `data:` URI."
                    )
                return await self._body(response)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # a timeout is an OSError
            raise RequestError(
                f"This picture could not be fetched within {_SECONDS:g} seconds from a public address. Check the "
                "address, or send the picture as a `data:` URI."
            ) from error

    def _checked(self, address: str) -> URL:
        try:
            url = URL(address)
            plain = url.scheme == "https" and url.host and url.port == self._port
        except ValueError:
            plain = False
        if not plain or url.user is not None or url.password is not None:
            raise RequestError(
                "The address of a picture must start with https://, without a port or a user name. Or send the "
                "picture as a `data:` URI."
            )
        assert url.host is not None  # noqa: S101  # said by `plain`
        try:
            allowed = self._is_allowed(url.host)  # addresses in digits never come by the resolver
        except ValueError:  # a name; but no top-level domain is a number, and resolvers would read one as an address
            last = url.host.rpartition(".")[2]
            allowed = not last.startswith("0x") and any(letter.isalpha() for letter in last)
        if not allowed:
            raise _private()
        return url

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        async for chunk in response.content.iter_chunked(65536):
            data += chunk
            if len(data) > self._max_bytes:
                raise RequestError(f"A picture may have at most {self._max_bytes} bytes, and this one has more.")
        return bytes(data)


class _PublicResolver(AbstractResolver):
    """Resolves a name once, and fails if any of its addresses is not public: the connection uses this answer."""

    def __init__(self, is_allowed: Callable[[str], bool]) -> None:
        self._is_allowed = is_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        results = [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=int(address[1]),
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, protocol, _, address in found
        ]
        if not results or not all(self._is_allowed(result["host"]) for result in results):
            raise _private()
        return results

    async def close(self) -> None:
        """Nothing is kept."""


def _private() -> RequestError:
    return RequestError(
        "This address does not lead to a public server on the internet, so no picture is fetched from it. Send the "
        "picture as a `data:` URI."
    )
