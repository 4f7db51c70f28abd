"""Runs the server: its socket, its signals, and what it tells the person who started it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from server.addresses import is_loopback
from server.app import create_app
from server.banner import Banner
from server.heap import collect_rarely, freeze_when_settled, give_back_when_idle
from server.http_config import http_config
from server.instance import only_one
from server.reload import reload_config, renew_certificate
from server.settings import database_url
from server.status import read_status
from server.status_socket import StatusSocket
from server.store import SCOPES, Database, KeyStore
from server.systemd import Systemd
from server.terminal import keys_command
from server.tls import certificate_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine import Config
    from server.app import HearthApp
    from server.drain import Drain
    from server.settings import Settings
    from server.tls import Certificate

_log = logging.getLogger("hearth.serve")


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


def run(settings: Settings, config: Config) -> None:
    """Serve until SIGTERM or SIGINT, or until nothing can be served any more, then end the process.

    Raises `StartError`, `TlsError`, `InstanceError`, or the store's `StoreError`.
    """
    _raise_file_limit()
    certificate = certificate_of(settings)
    with (
        only_one(settings.data_dir),
        _listen(settings) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        exit_status = runner.run(_serve(settings, config, listener, certificate))
        # Everything has ended and is written. To take torch and vLLM apart would cost another 2 s, and a thread that
        # still renders or tokenises what nobody waits for would hold us up for minutes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_status)


def _raise_file_limit() -> None:
    """One file per connection: take what we may have, not the shell's default of 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(settings: Settings, config: Config, listener: socket.socket, certificate: Certificate | None) -> int:
    first_key = await _first_key(settings, config)
    app = create_app(settings, config)
    base_urls = _base_urls(settings, listener.getsockname()[1])
    app.state.base_url = base_urls[0]
    app.state.certificate = certificate
    banner = Banner(*base_urls, first_key, make_key=_make_key(settings), remark=_in_clear(settings))
    server = _Server(app, banner, certificate)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.on_signal)
    loop.add_signal_handler(signal.SIGHUP, server.on_reload)
    await server.serve(sockets=[listener])
    return server.exit_status


class _Server(uvicorn.Server):
    def __init__(self, app: HearthApp, banner: Banner, certificate: Certificate | None) -> None:
        super().__init__(http_config(app, app.state.settings, certificate))
        self._app = app
        self._banner = banner
        self._systemd = Systemd()
        self._status: StatusSocket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._hopeless = False

    @property
    def exit_status(self) -> int:
        """What the process ends with: whoever supervises it must be able to tell an end from a failure."""
        if not self.started:
            return 1  # the log has said why
        return os.EX_UNAVAILABLE if self._hopeless else 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone: uvicorn's handling would close the listening socket before the drain."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then tell the person at the terminal."""
        collect_rarely()
        await super().startup(sockets)
        self._status = await StatusSocket.open(self._app.state.settings.data_dir, partial(read_status, self._app))
        for follow in (self._banner.follow, self._systemd.follow, freeze_when_settled):
            self._tasks.append(asyncio.create_task(follow(self._app.state.engine)))
        self._tasks.append(asyncio.create_task(give_back_when_idle(self._app.state.drain)))
        self._tasks.append(asyncio.create_task(self._end_when_hopeless()))
        self._systemd.listening()

    def on_signal(self) -> None:
        """Drain at the first signal; end at once at the second."""
        drain: Drain | None = getattr(self._app.state, "drain", None)
        if drain is None or drain.draining:
            self._app.state.terminate = True
            if drain is not None:
                drain.cut()
            self.should_exit = True
            return
        self._systemd.stopping()
        self._banner.draining(drain.running, self._app.state.settings.drain_seconds)
        self._tasks.append(asyncio.create_task(self._drain(drain)))

    def on_reload(self) -> None:
        """Read models.yaml again, and the certificate."""
        self._systemd.reloading()
        if hasattr(self._app.state, "drain"):
            self._tasks.append(asyncio.create_task(reload_config(self._app)))
        else:  # nothing has been loaded by the old models.yaml
            renew_certificate(self._app)

    async def _end_when_hopeless(self) -> None:
        await self._app.state.engine.hopeless()
        if self._app.state.drain.draining:
            return
        self._hopeless = True
        _log.error(
            "None of the models can be served, for the reasons above, so Hearth ends. Correct models.yaml or the "
            "weights (docs/models-yaml.md) and start it again."
        )
        self.on_signal()

    async def _drain(self, drain: Drain) -> None:
        await drain.drain(self._app.state.settings.drain_seconds)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop talking, then let uvicorn close connections and the lifespan end the engines."""
        for task in self._tasks:
            task.cancel()
        self._banner.close()
        if self._status is not None:
            await self._status.close()
        await super().shutdown(sockets)


def _base_urls(settings: Settings, port: int) -> tuple[str, str | None]:
    """Return the base address for clients on this machine, and for others if it listens on all addresses."""
    scheme = "http" if settings.tls_cert is None else "https"

    def base_url(address: str) -> str:
        return f"{scheme}://[{address}]:{port}/v1" if ":" in address else f"{scheme}://{address}:{port}/v1"

    anywhere = settings.host in {"0.0.0.0", "::"}  # noqa: S104  # asked for, see _first_key
    outside = _outside_address() if anywhere else None
    return base_url("127.0.0.1" if anywhere else settings.host), None if outside is None else base_url(outside)


def _outside_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address for documentation; nothing is sent, the kernel picks a route
        return str(probe.getsockname()[0])
    return None


def _in_clear(settings: Settings) -> str | None:
    """Say so when keys and conversations travel unencrypted."""
    if settings.tls_cert is not None or settings.trusted_proxies or is_loopback(settings.host):
        return None
    return (
        "Without HTTPS anybody on the network between can read keys and conversations: see --tls-cert, or a proxy, "
        "in docs/operations.md."
    )


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


def _make_key(settings: Settings) -> str:
    return keys_command(settings, "create --name me --tier standard")


async def _first_key(settings: Settings, config: Config) -> str | None:
    """Make an admin key if the store has none. Beyond this machine nobody may be served before keys were issued."""
    async with await Database.open(database_url(settings)) as database:
        store = KeyStore(database)
        if await store.count_active():
            return None
        if not is_loopback(settings.host):
            raise StartError(
                f"There is no API key yet, and {settings.host} can be reached from other machines. Pick one: "
                f"1. make a key first: {_make_key(settings)}; "
                "2. start once on this machine only: --host 127.0.0.1 (it makes an admin key and prints it)."
            )
        widest = max(config.tiers.values(), key=lambda tier: len(tier.models))
        text, _ = await store.create("first key", widest.id, scopes=SCOPES)
        return text
