"""Runs the server: its socket, its signals, and what it tells the person who started it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING

import uvicorn

from server.app import create_app
from server.banner import Banner
from server.instance import only_one
from server.protocol import HearthProtocol
from server.reload import reload_config
from server.settings import database_url
from server.store import SCOPES, Database, KeyStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine import Config
    from server.app import HearthApp
    from server.drain import Drain
    from server.settings import Settings

_LAST_WRITES_SECONDS = 2  # for connections whose client does not read, once everything else has ended


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


def run(settings: Settings, config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then end the process.

    Raises `StartError`, `InstanceError`, or the store's `StoreError`.
    """
    _raise_file_limit()
    with (
        only_one(settings.data_dir),
        _listen(settings) as listener,
        asyncio.Runner(loop_factory=_new_loop) as runner,
    ):
        runner.run(_serve(settings, config, listener))
        # Everything has ended and is written. To take torch and vLLM apart would cost another 2 s, and a thread that
        # still renders or tokenises what nobody waits for would hold us up for minutes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _raise_file_limit() -> None:
    """One file per connection: take what we may have, not the shell's default of 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _serve(settings: Settings, config: Config, listener: socket.socket) -> None:
    first_key = await _first_key(settings, config)
    app = create_app(settings, config)
    port = listener.getsockname()[1]
    banner = Banner(base_url(settings.host, port), _outside_url(settings.host, port), first_key)
    server = _Server(app, banner)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.on_signal)
    loop.add_signal_handler(signal.SIGHUP, server.on_reload)
    await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, app: HearthApp, banner: Banner) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HearthProtocol,
                ws="none",  # it would pass by our middleware
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                # Its own default believes whatever is sent from this machine.
                proxy_headers=bool(app.state.settings.trusted_proxies),
                forwarded_allow_ips=app.state.settings.trusted_proxies,
                timeout_graceful_shutdown=_LAST_WRITES_SECONDS,
            )
        )
        self._app = app
        self._banner = banner
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone: uvicorn's handling would close the listening socket before the drain."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then tell the person at the terminal."""
        await super().startup(sockets)
        self._tasks.append(asyncio.create_task(self._banner.follow(self._app.state.engine)))

    def on_signal(self) -> None:
        """Drain at the first signal; end at once at the second."""
        drain: Drain | None = getattr(self._app.state, "drain", None)
        if drain is None or drain.draining:
            self._app.state.terminate = True
            if drain is not None:
                drain.cut()
            self.should_exit = True
            return
        self._banner.draining(drain.running, self._app.state.settings.drain_seconds)
        self._tasks.append(asyncio.create_task(self._drain(drain)))

    def on_reload(self) -> None:
        """Read models.yaml again."""
        if hasattr(self._app.state, "drain"):  # before that, nothing has been loaded by the old one
            self._tasks.append(asyncio.create_task(reload_config(self._app)))

    async def _drain(self, drain: Drain) -> None:
        await drain.drain(self._app.state.settings.drain_seconds)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop talking, then let uvicorn close connections and the lifespan end the engines."""
        for task in self._tasks:
            task.cancel()
        self._banner.close()
        await super().shutdown(sockets)


def base_url(host: str, port: int) -> str:
    """Return the base address that a client on this machine can use."""
    address = "127.0.0.1" if host in {"0.0.0.0", "::"} else host  # noqa: S104  # asked for, see _first_key
    return f"http://[{address}]:{port}/v1" if ":" in address else f"http://{address}:{port}/v1"


def _outside_url(host: str, port: int) -> str | None:
    """Return the base address for other machines, if the server listens on all addresses and has one."""
    if host != "0.0.0.0":  # noqa: S104  # asked for, see _first_key
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address for documentation; nothing is sent, the kernel picks a route
        return base_url(probe.getsockname()[0], port)
    return None


def _listen(settings: Settings) -> socket.socket:
    """Take the port before anything else, so that a second server fails at once and in plain words."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise StartError(
            f"Cannot listen on {settings.host} port {settings.port}: {error.strerror}. Pick one: "
            "1. stop what listens there (perhaps another Hearth); 2. take another port with --port; "
            "3. check the address given with --host."
        ) from error
    return listener


async def _first_key(settings: Settings, config: Config) -> str | None:
    """Make an admin key if the store has none. Beyond this machine nobody may be served before keys were issued."""
    async with await Database.open(database_url(settings)) as database:
        store = KeyStore(database)
        if await store.count_active():
            return None
        if not _is_loopback(settings.host):
            raise StartError(
                f"There is no API key yet, and {settings.host} can be reached from other machines. Pick one: "
                "1. make a key first: .venv/bin/hearth keys create --name me --tier standard; "
                "2. start once on this machine only: --host 127.0.0.1 (it makes an admin key and prints it)."
            )
        widest = max(config.tiers.values(), key=lambda tier: len(tier.models))
        text, _ = await store.create("first key", widest.id, scopes=SCOPES)
        return text


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
