"""A real Hearth server for the benchmarks: `hearth serve` in a process of its own, with a key to use it."""

from __future__ import annotations

import asyncio
import http.client
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.children import end, tail
from benchmarks.errors import BenchError
from benchmarks.workplace import TIER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.workplace import Workplace

_HEARTH = str(Path(sys.executable).with_name("hearth"))
_SERVE = (_HEARTH, "serve", "--port", "0")
_SCOPES = ("chat", "batch", "images")
_POLL_SECONDS = 0.2
_ADDRESS = re.compile(r"Base URL: http://([^:/]+):(\d+)/v1")


class HearthServer:
    """A running server whose models are ready."""

    def __init__(self, process: asyncio.subprocess.Process, key: str, host: str, port: int) -> None:
        self._process = process
        self.key = key
        self.host = host
        self.port = port

    @property
    def pid(self) -> int:
        """The process that speaks HTTP; the engine is its child."""
        return self._process.pid

    @classmethod
    async def start(cls, place: Workplace, *, within_seconds: float, command: Sequence[str] = _SERVE) -> HearthServer:
        """Make a key, start the server with `command`, wait until its models are ready. Raises `BenchError`."""
        key, log = await create_key(place, "bench"), place.log("server")
        process = await _serve(place, command)
        try:
            async with asyncio.timeout(within_seconds):
                host, port = await _ready_at(process, log)
        except TimeoutError:
            await end(process)
            raise BenchError(f"The server was not ready after {within_seconds:.0f} s.{tail(log)}") from None
        except BaseException:
            await end(process)
            raise
        return cls(process, key, host, port)

    @classmethod
    async def launch(cls, place: Workplace, key: str, *, port: int) -> HearthServer:
        """Start it on a free port and return at once: it does not listen yet."""
        return cls(await _serve(place, (_HEARTH, "serve", "--port", str(port))), key, "127.0.0.1", port)

    @property
    def ended(self) -> bool:
        """Whether its process is gone."""
        return self._process.returncode is not None

    async def stop(self) -> None:
        """End it."""
        await end(self._process)


async def _serve(place: Workplace, command: Sequence[str]) -> asyncio.subprocess.Process:
    with place.log("server").open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=place.environment,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its children in order
        )


async def create_key(place: Workplace, name: str) -> str:
    """Make a key of the place's tier with the real command line. Raises `BenchError`."""
    scopes = [word for scope in _SCOPES for word in ("--scope", scope)]
    process = await asyncio.create_subprocess_exec(
        *(_HEARTH, "keys", "create", "--name", name, "--tier", TIER, *scopes, "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=place.environment,
    )
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise BenchError(f"No key could be made: {errors.decode(errors='replace').strip()}")
    key: str = msgspec.json.decode(output)["key"]
    return key


async def _ready_at(process: asyncio.subprocess.Process, log: Path) -> tuple[str, int]:
    address: tuple[str, int] | None = None
    while process.returncode is None:
        address = address or _address(log)
        if address is not None:
            status = (await asyncio.to_thread(_ready, *address)).get("status", "starting")
            if status == "ready":
                return address
            if status == "failed":
                raise BenchError(f"The server cannot load its models.{tail(log)}")
        await asyncio.sleep(_POLL_SECONDS)
    raise BenchError(f"The server ended by itself.{tail(log)}")


def _address(log: Path) -> tuple[str, int] | None:
    found = _ADDRESS.search(log.read_text(errors="replace"))
    return (found[1], int(found[2])) if found else None


def states(host: str, port: int) -> dict[str, str]:
    """Return the state of each model by `/health/ready`, nothing while nobody answers. Blocks."""
    return {name: model["status"] for name, model in _ready(host, port).get("models", {}).items()}


def _ready(host: str, port: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", "/health/ready")
        return dict(msgspec.json.decode(connection.getresponse().read()))
    except OSError:
        return {}
    finally:
        connection.close()
