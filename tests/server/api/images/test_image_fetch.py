"""Pictures from addresses: a real TLS server answers, and nothing but the public internet is ever asked."""

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tls_pair import make_pair

from engine import RequestError
from server.api.images.fetch import ImageFetcher, is_public

PICTURE = b"\x89PNG" + bytes(5000)
NEVER_ASKED = [
    "http://example.com/a.png",
    "https://127.0.0.1/a.png",
    "https://127.1/a.png",
    "https://2130706433/a.png",
    "https://0x7f000001/a.png",
    "https://0177.0.0.1/a.png",
    "https://0/a.png",
    "https://localhost/a.png",
    "https://169.254.169.254/latest/meta-data",
    "https://[::1]/a.png",
    "https://[::ffff:127.0.0.1]/a.png",
    "https://[::ffff:10.0.0.1]/a.png",
    "https://[64:ff9b::7f00:1]/a.png",
    "https://[2002:7f00:1::]/a.png",
    "https://[fe80::1%25lo]/a.png",
    "https://[fc00::1]/a.png",
    "https://10.0.0.1/a.png",
    "https://192.168.1.1/a.png",
    "https://100.64.0.1/a.png",
    "https://224.0.0.1/a.png",
    "https://255.255.255.255/a.png",
    "https://example.com:8443/a.png",
    "https://user@example.com/a.png",
    "https://user:password@127.0.0.1/a.png",
    "https://example.com\\@127.0.0.1/a.png",
    "https:///a.png",
    "https://",
    "https://\x00/",
    "https://exa mple.com/",
    "file:///etc/passwd",
    "gopher://127.0.0.1/",
    "//127.0.0.1/a.png",
    "ftp://example.com/a.png",
    "https://" + "a" * 300 + ".example/",
    "https://[::1/a.png",
    "https://\uff11\uff12\uff17.0.0.1/a.png",
]


@pytest.mark.parametrize("address", NEVER_ASKED)
async def test_nothing_but_public_https_is_asked(address: str):
    with pytest.raises(RequestError) as caught:
        await ImageFetcher(10_000)(address)
    assert caught.value.param is None
    assert not any(word in caught.value.message for word in ["127.0", "passwd", "example.com", "password"])


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("::ffff:93.184.216.34", True),
        ("::ffff:169.254.169.254", False),
        ("2001:0:7f00:1::80ff:fffe", False),
        ("fec0::1", False),
        ("ff0e::1", False),
        ("240.0.0.1", False),
        ("0.0.0.0", False),  # noqa: S104
        ("192.0.2.1", False),
        ("198.18.0.1", False),
    ],
)
def test_addresses_of_this_house_are_not_public(address: str, public: object):
    assert is_public(address) is public


async def test_a_picture_is_fetched(tmp_path: Path):
    async with serving(tmp_path, answer(PICTURE)) as (fetch, port, asked):
        assert await fetch(f"https://localhost:{port}/a.png?b=c") == PICTURE
    assert asked[0].startswith(b"GET /a.png?b=c HTTP/1.1\r\nHost: localhost:")


async def test_a_name_is_resolved_once_and_a_private_answer_ends_it(tmp_path: Path):
    async with serving(tmp_path, answer(PICTURE)) as (fetch, port, asked):
        seen: list[str] = []
        refusing = ImageFetcher(10_000, is_allowed=lambda host: seen.append(host) or is_public(host), port=port)
        with pytest.raises(RequestError, match="does not lead to a public server"):
            await refusing(f"https://localhost:{port}/a.png")
        assert await fetch(f"https://localhost:{port}/a.png") == PICTURE
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: https://127.0.0.1/\r\nContent-Length: 0\r\n\r\n", "answered 302"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answered 404"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"2000\r\n" + b"x" * 8192 + b"\r\n") * 4,
            "at most",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20000\r\n\r\n" + b"x" * 20000, "at most 10000 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20000\r\n\r\nshort", "could not be fetched"),
        (b"no HTTP at all\r\n\r\n", "could not be fetched"),
        (b"HTTP/1.1 200 OK\r\n", "could not be fetched"),
    ],
)
async def test_what_is_no_picture_of_bearable_size_is_refused(tmp_path: Path, response: bytes, words: str):
    async with serving(tmp_path, response) as (fetch, port, _):
        with pytest.raises(RequestError, match=words):
            await fetch(f"https://localhost:{port}/a.png")


async def test_a_certificate_of_nobody_is_refused(tmp_path: Path):
    async with serving(tmp_path, answer(PICTURE)) as (_, port, asked):
        strict = ImageFetcher(10_000, is_allowed=lambda _: True, port=port)
        with pytest.raises(RequestError, match="could not be fetched"):
            await strict(f"https://localhost:{port}/a.png")
    assert asked == []


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body


@asynccontextmanager
async def serving(folder: Path, response: bytes) -> AsyncIterator[tuple[ImageFetcher, int, list[bytes]]]:
    """A TLS server on this machine that answers `response`, and a fetcher that may ask it."""
    theirs, ours = contexts(folder)
    asked: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(response)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=theirs)
    async with server:
        port = server.sockets[0].getsockname()[1]
        allowed = {"127.0.0.1", "::1"}
        yield (
            ImageFetcher(
                10_000, is_allowed=lambda host: ipaddress.ip_address(host).compressed in allowed, port=port, tls=ours
            ),
            port,
            asked,
        )


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS for a server called localhost, and for a client that trusts it."""
    pair = make_pair(folder)
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(pair.both)
    return theirs, pair.client_context()
