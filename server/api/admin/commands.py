"""What `hearth plan`, `hearth doctor` and `hearth weights pull` say, over HTTP: each runs as a process of its own.

They read the disk, hash files and ask GPUs for seconds or hours: too long for the process that serves. Plan and doctor
run one at a time; a download goes on when its watcher leaves.
"""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field

from server.api.admin.schema import Body
from server.api.caller import TheActor, event, failed_event, of_app
from server.auth.access import KeyWith
from server.errors import ApiError, overloaded
from server.http.bodies import StrictRoute
from server.http.streaming import StreamedResponse
from server.settings import Settings
from server.store.audit import Actor, write_entry
from server.store.schema import utc_now
from server.validation import spelled

_SECONDS = 240.0
_HEARTH = "import sys; sys.argv[0] = 'hearth'; from server.cli import main; main()"
_KEPT_LINES = 200
# For the page: docs/admin-api.md describes them, /openapi.json does not.
router = APIRouter(
    prefix="/v1/admin", include_in_schema=False, route_class=StrictRoute, dependencies=[Depends(KeyWith("admin"))]
)


_Name = Annotated[str, spelled(r"^[A-Za-z0-9]([./]?[A-Za-z0-9_-]){0,254}$", "must be the name of a model or variant")]


class PullBody(Body):
    models: Annotated[list[_Name], Field(max_length=16)]
    """Models or variants of models.yaml; none: all that the plan wants."""


@dataclass(slots=True)
class Commands:
    """One per app: the command that runs, and what the download has printed so far."""

    settings: Settings
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    """As at the server's start: what it sets later for engines, like HF_HUB_OFFLINE, is not for commands."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    pulling: asyncio.Lock = field(default_factory=asyncio.Lock)
    pull: "Pull | None" = None

    async def start(self, *words: str, stderr: int = DEVNULL) -> Process:
        """Run `hearth` with these words, on the folders of this server."""
        given = self.settings
        folders = ["--data-dir", given.data_dir, "--weights-dir", given.weights_dir, "--models", given.models]
        command = [sys.executable, "-c", _HEARTH, *words, *map(str, folders)]
        return await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=PIPE, stderr=stderr, env=self.environment
        )

    async def ask(self, *words: str) -> Response:
        """Return the JSON that a command prints. Raises `ApiError`."""
        if self.turn.locked():
            raise overloaded("Another administrator's command is running. Try again in a few seconds.")
        async with self.turn:
            process = await self.start(*words, "--json")
            try:
                async with asyncio.timeout(_SECONDS):
                    said, _ = await process.communicate()
                msgspec.json.decode(said)
            except (TimeoutError, msgspec.DecodeError) as error:
                sentence = f"`hearth {words[0]}` gave no answer. Run it on the machine itself: it says why."
                raise ApiError(503, "server_overloaded", sentence) from error
            finally:
                await _end(process)
        return Response(said, media_type="application/json")

    async def stop(self) -> None:
        """End a download; what has come is kept."""
        if self.pull is not None and not self.pull.ended:
            with suppress(ProcessLookupError):
                self.pull.process.terminate()
            await asyncio.wait((self.pull.task,))


@dataclass(eq=False)
class Pull:
    """The download that runs, or the last one: its lines, for all who watch."""

    process: Process
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    said: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        assert self.process.stdout is not None  # noqa: S101  # it was started with a pipe
        try:
            async for line in self.process.stdout:
                self.lines.append(line.decode(errors="replace").rstrip())
                await self._tell(1)
        finally:
            await _end(self.process)
            self.ended = True
            await self._tell(0)

    async def _tell(self, lines: int) -> None:
        async with self._changed:
            self.said += lines
            self._changed.notify_all()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield what was said so far and what is said from now on. Leaving ends nothing."""
        seen = self.said - len(self.lines)
        while True:
            fresh = [*self.lines][max(0, len(self.lines) - (self.said - seen)) :]
            seen = self.said
            for line in fresh:
                yield event("weights.line", text=line)
            if self.ended:
                yield event("weights.done", ok=self.process.returncode == 0)
                return
            async with self._changed:
                while not self.ended and self.said == seen:
                    await self._changed.wait()


async def _end(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    await process.wait()


TheCommands = Annotated[Commands, Depends(of_app("commands"))]


@router.get("/plan", response_class=Response)
async def read_plan(commands: TheCommands) -> Response:
    """Say what each model is served with on this machine, why, and what is not here: as `hearth plan --json`."""
    return await commands.ask("plan")


@router.post("/doctor", response_class=Response)
async def run_doctor(commands: TheCommands) -> Response:
    """Look for problems and say how to solve them, with test requests: as `hearth doctor --json`."""
    return await commands.ask("doctor")


@router.post("/weights/pull", response_class=Response)
async def pull_weights(body: PullBody, request: Request, commands: TheCommands, by: TheActor) -> Response:
    """Fetch models from a hub, in events, one per line of `hearth weights pull`. Goes on when its watcher leaves."""
    async with commands.pulling:
        if commands.pull is None or commands.pull.ended:
            await _note(request, by, "weights.pull", ", ".join(body.models) or "the plan")
            commands.pull = Pull(await commands.start("weights", "pull", *body.models, stderr=STDOUT))
    return _watched(request, commands.pull)


@router.get("/weights/pull", response_class=Response)
async def watch_pull(request: Request, commands: TheCommands) -> Response:
    """Watch the download that runs, or see what the last one said."""
    if commands.pull is None:
        raise ApiError(404, "not_found", "Nothing was fetched since the server's start.")
    return _watched(request, commands.pull)


@router.delete("/weights/pull", status_code=204)
async def stop_pull(commands: TheCommands) -> None:
    """Stop the download. What has come is kept, and the next one goes on from there."""
    await commands.stop()


@router.post("/models/{name:path}/load", status_code=204)
async def load_model(name: str, request: Request, by: TheActor) -> None:
    """Have a model loaded: one that failed once more, one that shares memory as if it were asked for."""
    engine: Any = request.app.state.engine
    await _note(request, by, "model.load", _known(request, name))
    await engine.load(name)


@router.post("/models/{name:path}/unload", status_code=204)
async def unload_model(name: str, request: Request, by: TheActor) -> None:
    """Have a model that shares its memory leave with its last answer; it comes back when it is asked for."""
    engine: Any = request.app.state.engine
    async with request.app.state.database.writing() as connection:
        await write_entry(connection, utc_now(), by, "model.unload", _known(request, name))
        engine.unload(name)  # a refusal leaves no entry


def _known(request: Request, model: str) -> str:
    if model not in request.app.state.engine.config.entries:
        raise ApiError(404, "model_not_found", "There is no such model. GET /v1/models lists them.", param="model")
    return model


async def _note(request: Request, by: Actor, action: str, what: str) -> None:
    async with request.app.state.database.writing() as connection:
        await write_entry(connection, utc_now(), by, action, what)


def _watched(request: Request, pull: Pull) -> Response:
    keep_alive_seconds = request.app.state.settings.keep_alive_seconds
    return StreamedResponse(pull.events(), keep_alive_seconds=keep_alive_seconds, failure=failed_event)
