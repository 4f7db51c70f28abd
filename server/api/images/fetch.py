"""Fetches pictures from https addresses that clients name, without letting them reach into our network.

Off unless HEARTH_FETCH_IMAGES is set. The rules: https on its usual port, a name that resolves (once) to public
addresses only, no redirects, a cap on bytes while they arrive, a few seconds for all of it.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import httpx2

from engine import RequestError

_SECONDS = 5.0
_CONNECT_SECONDS = 2.0  # then the next address of the name has its turn
_AT_ONCE = 8
_HTTPS_PORT = 443
_NOT_PUBLIC = (
    "This address does not lead to a public server on the internet, so no picture is fetched from it. Send the picture "
    "as a `data:` URI."
)
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


@dataclass(slots=True)
class ImageFetcher:
    """Fetches one picture per call. `is_allowed`, `port` and `tls` are for tests that serve their own pictures."""

    max_bytes: int
    is_allowed: Callable[[str], bool] = is_public
    port: int = _HTTPS_PORT
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)
    _turns: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, _AT_ONCE))

    async def __call__(self, address: str) -> bytes:
        """Return the file at `address`. Raises `RequestError` without a `param`, saying what is not allowed."""
        url = self._checked(address)
        client = httpx2.AsyncClient(
            verify=self.tls,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx2.Timeout(_SECONDS, connect=_CONNECT_SECONDS),
        )
        try:
            async with (
                self._turns,
                asyncio.timeout(_SECONDS),
                client,
                aclosing(await self._connect(client, url)) as response,
            ):
                return await self._body(response)
        except (httpx2.HTTPError, OSError, ValueError) as error:  # a timeout is an OSError
            raise RequestError(
                f"This picture could not be fetched within {_SECONDS:g} seconds from a public address. Check the "
                "address, or send the picture as a `data:` URI."
            ) from error

    def _checked(self, address: str) -> httpx2.URL:
        try:
            url = httpx2.URL(address)
        except httpx2.InvalidURL:
            url = httpx2.URL()
        if url.scheme != "https" or not url.host or url.userinfo or (url.port or _HTTPS_PORT) != self.port:
            raise RequestError(
                "The address of a picture must start with https://, without a port or a user name. Or send the "
                "picture as a `data:` URI."
            )
        try:
            allowed = self.is_allowed(url.host)
        except ValueError:  # a name; but no top-level domain is a number, and resolvers would read one as an address
            last = url.host.rpartition(".")[2]
            allowed = not last.startswith("0x") and any(letter.isalpha() for letter in last)
        if not allowed:
            raise RequestError(_NOT_PUBLIC)
        return url

    async def _connect(self, client: httpx2.AsyncClient, url: httpx2.URL) -> httpx2.Response:
        """Ask the first address that can be reached. The name is resolved here, once; TLS still checks the name."""
        name = url.raw_host.decode("ascii")
        headers = {"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
        failure: httpx2.TransportError | None = None
        for address in await self._resolve(name):
            request = client.build_request(
                "GET", url.copy_with(host=address), headers=headers, extensions={"sni_hostname": name}
            )
            try:
                return await client.send(request, stream=True)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                failure = error
        raise failure or RequestError(_NOT_PUBLIC)

    async def _resolve(self, name: str) -> list[str]:
        """Return the addresses of a name, IPv4 first. Raises `RequestError` if any of them is not public."""
        found = await asyncio.get_running_loop().getaddrinfo(name, self.port, type=socket.SOCK_STREAM)
        found.sort(key=lambda entry: entry[0] != socket.AF_INET)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not all(self.is_allowed(address) for address in addresses):
            raise RequestError(_NOT_PUBLIC)
        return addresses

    async def _body(self, response: httpx2.Response) -> bytes:
        if response.status_code != 200:
            raise RequestError(
                f"The address of this picture answered {response.status_code}; redirects are not followed. Give "
                "the picture's own address, or send it as a `data:` URI."
            )
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > self.max_bytes:
                raise RequestError(f"A picture may have at most {self.max_bytes} bytes, and this one has more.")
        return bytes(data)
