"""The server's half: pieces of a sound file, one at a time, from a child process that reads it."""

import asyncio
from pathlib import Path
from typing import Self

import msgspec

from engine.errors import EngineDiedError, LoadError, RequestError
from engine.process.parent import NICE_ON_CPU, WorkerDiedError, WorkerProcess
from engine.sound import Piece, SoundEvent, SoundOptions

_SERVICE = "engine.sound.service:open_service"
_OPEN_SECONDS = 60.0
_NEXT_SECONDS = 120.0  # at most five minutes of silence, on a busy machine


class SoundFile:
    """One file that is being read. `async with` opens it and ends its process. Belongs to one event loop.

    `seconds` is how much of it has been read; all of it once `next` has returned None.
    """

    _worker: WorkerProcess  # set once the file is opened

    def __init__(self, path: Path, *, piece_seconds: float, most_seconds: float) -> None:
        self._options = SoundOptions(str(path.absolute()), piece_seconds, most_seconds)
        self._complete = False
        self.seconds = 0.0

    async def __aenter__(self) -> Self:
        """Open it. Raises `RequestError` for a file that is not sound."""
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                self._worker = await WorkerProcess.start(_SERVICE, self._options, lambda *_: None, nice=NICE_ON_CPU)
        except LoadError as error:
            raise RequestError(error.message, param="file") from error
        except (WorkerDiedError, TimeoutError) as error:
            raise _unreadable() from error
        return self

    async def __aexit__(self, *_: object) -> None:
        self._worker.terminate()

    async def next(self) -> Piece | None:
        """Return the next piece with sound in it; None at the end. Raises `RequestError` for what cannot be read."""
        while not self._complete:
            event = await self._event()
            self.seconds, self._complete = event.seconds, event.complete
            if event.piece is not None:
                return event.piece
        return None

    async def _event(self) -> SoundEvent:
        events: list[SoundEvent] = []
        try:
            async with asyncio.timeout(_NEXT_SECONDS):
                await self._worker.run(None, lambda event: events.append(_decoder.decode(event)))
        except (EngineDiedError, TimeoutError) as error:
            raise _unreadable() from error
        return events[0]


_decoder = msgspec.msgpack.Decoder(SoundEvent)


def _unreadable() -> RequestError:
    return RequestError(
        "The file could not be read as sound: it is damaged, or takes too much memory or time. Send it in another form,"
        " like WAV or MP3.",
        param="file",
    )
