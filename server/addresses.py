"""Addresses as settings name them: where clients reach us, whose pages may ask, which proxies are believed."""

from __future__ import annotations

import ipaddress
import re
from typing import Any
from urllib.parse import urlsplit

ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def base_address(value: str | None) -> str | None:
    """Both the server's address and the base address of client libraries, which ends in /v1, are meant the same."""
    if value is None:
        return None
    parts = urlsplit(value)
    if (
        parts.scheme not in {"http", "https"}
        or not parts.hostname
        or "@" in parts.netloc
        or parts.query
        or parts.fragment
    ):
        raise ValueError("must be an address like https://hearth.example.org or https://hearth.example.org/v1")
    return f"{value.rstrip('/').removesuffix('/v1')}/v1"


def split_commas(value: Any) -> Any:
    """Make a tuple of what one variable of the environment lists."""
    if isinstance(value, str):
        return tuple(part for part in (piece.strip() for piece in value.split(",")) if part)
    return value


def origins(values: tuple[str, ...]) -> tuple[str, ...]:
    """Write origins as browsers send them: lower case, no path, no port that goes without saying."""
    return tuple(_origin(value) for value in values)


def _origin(value: str) -> str:
    if value == ANY_ORIGIN:
        return value
    origin = value.lower().rstrip("/")
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(
            f"`{value}` is no origin: name scheme and host, and the port if it is not the usual one, like "
            "https://chat.example.org or http://localhost:3000, separated by commas; or * for every web page"
        )
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition("://")[0], "-"))


def networks(values: tuple[str, ...]) -> tuple[str, ...]:
    """Check addresses and networks of proxies. Names are not looked up: what they mean could change."""
    for value in values:
        try:
            everybody = ipaddress.ip_network(value).prefixlen == 0
        except ValueError:
            everybody = True
        if everybody:
            raise ValueError(
                f"`{value}` is no address of a proxy: name each one like 10.0.0.2, or its network like 172.18.0.0/16, "
                "separated by commas. To believe everybody is not possible: anybody could then claim any address"
            )
    return values


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
