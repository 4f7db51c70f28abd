"""The fronts of a lead: started with it, started again when one dies, told what changes, and ended with it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from engine.config.models import ChatModelSpec
from server.front.listeners import shared
from server.front.messages import Cut, Drain, KeyChanged, KeyRevoked, Model, RenewCertificate, Rights, Stop, ToFront
from server.front.process import FrontProcess

if TYPE_CHECKING:
    from engine import Config, ModelSpec
    from server.app import HearthApp

_START_SECONDS = 60.0
_STOP_SECONDS = 5.0  # more than uvicorn gives to connections whose client does not read
_PING_SECONDS, _MOST_UNANSWERED = 5.0, 6
_PAUSES_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
_LIVED_SECONDS = 60.0  # whoever lived for so long is started again without a pause

_log = logging.getLogger("hearth.front")


class Fronts:
    """`start` them once the app's lifespan has begun; `stop` them before it ends."""

    def __init__(self, app: HearthApp, listener: socket.socket, number: int) -> None:
        self._app = app
        self._listeners = shared(listener, number)
        self._running: dict[int, FrontProcess] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._ending = False

    async def start(self) -> bool:
        """Return when all listen; False if one does not come up, which the log explains."""
        self._app.state.fronts = self
        self._app.state.keys.followers.append(self._on_key)
        starts = [self._start(number) for number in range(len(self._listeners))]
        if not all(await asyncio.gather(*starts)):
            return False
        self._keeping = [asyncio.create_task(self._keep(number)) for number in range(len(self._listeners))]
        self._keeping.append(asyncio.create_task(self._watch()))
        return True

    def use(self, config: Config) -> None:
        """From now on these are models and tiers."""
        self._say(_rights(config))

    def renew_certificate(self) -> None:
        """Show from now on what the certificate's files hold."""
        self._say(RenewCertificate())

    async def drain(self, seconds: float) -> None:
        """Have them take no more work and finish what runs within so many seconds. Returns when they have."""
        self._ending = True
        self._say(Drain(seconds))
        with suppress(TimeoutError):  # one that hangs must not hold us up
            async with asyncio.timeout(seconds + _STOP_SECONDS):
                await asyncio.gather(*(front.drained.wait() for front in self._running.values()))

    def cut(self) -> None:
        """Make everything that runs in them stop now."""
        self._ending = True
        self._say(Cut())

    async def stop(self) -> None:
        """End them. What they have counted and logged has arrived when this returns."""
        self._ending = True
        for task in self._keeping:
            task.cancel()
        self._say(Stop())
        fronts = list(self._running.values())
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.gather(*(front.gone.wait() for front in fronts))
        for front in fronts:
            front.kill()
        for listener in self._listeners:
            listener.close()

    def _say(self, message: ToFront) -> None:
        for front in self._running.values():
            front.say(message)

    def _on_key(self, public_id: str, *, revoked: bool) -> None:
        self._say(KeyRevoked(public_id) if revoked else KeyChanged(public_id))

    async def _start(self, number: int) -> bool:
        try:
            front = await FrontProcess.start(self._app, self._listeners[number], _rights(self._app.state.config))
        except OSError as error:
            _log.error("API process %d cannot be started: %s", number + 1, error.strerror)
            self._refuse(number)
            return False
        self._running[number] = front
        front.say(_rights(self._app.state.config))  # it may have changed just now
        if self._ending:  # begun since, and it was not yet there to be told
            front.say(Drain(0.0))
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                await front.listening.wait()
        if front.listening.is_set() and not front.gone.is_set():
            return True
        _log.error("API process %d (process id %d) does not come up; its own messages say why.", number + 1, front.pid)
        front.kill()
        self._refuse(number)
        return False

    def _refuse(self, number: int) -> None:
        """Leave connections to the other sockets until somebody listens here again: they would wait for nobody."""
        with suppress(OSError):
            self._listeners[number].shutdown(socket.SHUT_RDWR)

    async def _watch(self) -> None:
        """Kill who hangs: its clients would wait for ever, and so would everybody that the kernel sends there."""
        while True:
            await asyncio.sleep(_PING_SECONDS)
            for front in self._running.values():
                if front.listening.is_set() and not front.gone.is_set() and front.ping() >= _MOST_UNANSWERED:
                    _log.error("The API process with the id %d hangs and is killed.", front.pid)
                    front.kill()

    async def _keep(self, number: int) -> None:
        """Start it again whenever it dies. Until it is back, connections that the kernel gave to it wait for it."""
        tries, began_at = 0, time.monotonic()
        while True:
            front = self._running[number]
            await front.gone.wait()
            if self._ending:
                return
            _log.error(
                "API process %d (process id %d) has ended with status %s and is started again. What it was answering "
                "was cut off.",
                number + 1,
                front.pid,
                front.exit_status,
            )
            tries = 0 if time.monotonic() - began_at >= _LIVED_SECONDS else tries
            await asyncio.sleep(_PAUSES_SECONDS[min(tries, len(_PAUSES_SECONDS) - 1)])
            tries, began_at = tries + 1, time.monotonic()
            await self._start(number)


def _longest_answer(spec: ModelSpec) -> int | None:
    return spec.engine.max_output_tokens or spec.engine.context_length if isinstance(spec, ChatModelSpec) else None


def _rights(config: Config) -> Rights:
    return Rights(
        {name: Model(spec.tier, _longest_answer(spec)) for name, spec in config.models.items()},
        {name: tuple(tier.models) for name, tier in config.tiers.items()},
    )
