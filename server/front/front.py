"""The life of a front: it tells its lead that it listens, and does what the lead says. What it answers is app.py's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from server.front.app import FrontApp
from server.front.lead import About, Lead
from server.front.messages import (
    Begin,
    Cut,
    Drain,
    Drained,
    KeyChanged,
    KeyRevoked,
    Listening,
    Ping,
    Pong,
    RenewCertificate,
    Rights,
    Stop,
    ToFront,
    ToLead,
    unsayable,
)
from server.front.wire import Wire
from server.heap import freeze, give_back_when_idle
from server.http_config import http_config
from server.live_keys import LiveKeys
from server.log_lines import set_up_log
from server.settings import database_url
from server.store import Database, KeyStore
from server.tls import TlsError, certificate_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from server.settings import Settings
    from server.tls import Certificate


class Front:
    """What the lead has said, and what runs because of it."""

    def __init__(self) -> None:
        self._wire: Wire[ToFront, ToLead] = Wire(ToFront, self._on_message, self._on_lost, self._instead)
        self._lead = Lead(self._wire.say)
        self._begin: asyncio.Future[Begin] = asyncio.get_running_loop().create_future()
        self._certificate: Certificate | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._early: list[ToFront] = []
        self._ended = False
        self._app: FrontApp | None = None
        self._keys: LiveKeys
        self._server: uvicorn.Server

    async def serve(self, end: socket.socket, listener: socket.socket) -> None:
        """Serve until the lead says stop."""
        await self._wire.open(end)
        begin = await self._begin
        settings: Settings = pickle.loads(begin.settings)  # noqa: S301  # from our parent, by a socket that it made
        set_up_log(settings.log_level)
        self._certificate = certificate_of(settings)
        async with (
            await Database.open(database_url(settings)) as database,
            LiveKeys(KeyStore(database)) as self._keys,
        ):
            app = FrontApp(settings, self._keys, begin.rights, self._lead)
            config = http_config(app, settings, self._certificate, lifespan="off")
            self._server = _Server(config, partial(self._listening, app))
            self._app = app
            for message in self._early:
                self._on_message(message)
            await self._server.serve(sockets=[listener])
        self._ended = True
        self._wire.close()
        await self._wire.lost.wait()  # what was said last has left

    def _listening(self, app: FrontApp) -> None:
        freeze()
        self._tasks.append(asyncio.create_task(give_back_when_idle(app.drain)))
        self._wire.say(Listening())

    def _on_message(self, message: ToFront) -> None:
        if isinstance(message, Begin):
            self._begin.set_result(message)
        elif self._app is None:
            self._early.append(message)
        elif isinstance(message, About):
            self._lead.on_message(message)
        else:
            self._obey(self._app, message)

    def _obey(self, app: FrontApp, message: ToFront) -> None:
        if isinstance(message, Rights):
            app.access.use(message)
        elif isinstance(message, KeyRevoked):
            self._keys.revoked(message.public_id)
        elif isinstance(message, KeyChanged):
            self._keys.ask_again(message.public_id)
        elif isinstance(message, RenewCertificate):
            self._renew()
        elif isinstance(message, Ping):
            self._wire.say(Pong())
        elif isinstance(message, Drain):
            self._tasks.append(asyncio.create_task(self._drain(app, message.seconds)))
        elif isinstance(message, Cut):
            app.drain.cut()
        elif isinstance(message, Stop):
            self._server.should_exit = True

    def _instead(self, message: ToLead) -> None:
        """Fail a call that cannot be asked; what else cannot be said is left out."""
        if (call := getattr(message, "call", None)) is not None:
            self._lead.on_message(unsayable(call))

    def _on_lost(self) -> None:
        """Without a lead there is nothing to be had here."""
        if not self._ended:
            os._exit(1)

    def _renew(self) -> None:
        with contextlib.suppress(TlsError):  # the lead, which reads the same files, has said it
            if self._certificate is not None:
                self._certificate.renew()

    async def _drain(self, app: FrontApp, seconds: float) -> None:
        await app.drain.drain(seconds)
        self._wire.say(Drained())


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The lead says when to end."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._listening()
