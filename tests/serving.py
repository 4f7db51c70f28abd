"""A real Hearth in a process of its own, for tests: start it, read what it says, make keys, stop it.

Holds no tests. `conftest.py` starts one for the whole run; tests of its life start their own.
"""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx2
import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
CANARY = "Zwieback-canary"
# Nothing may need one: torch would compile single functions on first use, and die where it cannot.
NO_COMPILER = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
READY_SECONDS = 240.0  # just after set-up nothing of 4 GB is in memory yet
STOP_SECONDS = 60.0
_PORTS = iter(random.sample(range(20_000, 32_000), 1_000))


@dataclass(frozen=True)
class Key:
    """An API key. `secret` is the part that nobody but its owner may ever see."""

    text: str

    @property
    def public_id(self) -> str:
        return self.text[3:15]

    @property
    def secret(self) -> str:
        return self.text[16:]


class Server:
    """`hearth serve` on a free port. `folder` receives its data and may be used again by a later server.

    `environment` is added to the environment, `arguments` to the command line (later flags win).
    """

    def __init__(
        self, folder: Path, *, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self.data_dir = folder / "data"
        self.weights_dir = folder / "weights"
        self.weights_dir.mkdir(parents=True, exist_ok=True)
        self._environment = _clean_environment() | {"OMP_NUM_THREADS": "1"} | NO_COMPILER | dict(environment or {})
        self._arguments = list(arguments)
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader: threading.Thread | None = None
        self.process: subprocess.Popen[str] | None = None
        self.base_url = ""
        self.admin_key: Key | None = None
        self.made_keys: list[Key] = []

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def root_url(self) -> str:
        """The address without /v1."""
        return self.base_url.removesuffix("/v1")

    def start(self) -> None:
        """Start it and return when it listens; models are still being loaded then."""
        folders = ["--data-dir", str(self.data_dir), "--weights-dir", str(self.weights_dir)]
        self.process = subprocess.Popen(
            [BIN / "hearth", "serve", "--port", "0", *folders, *self._arguments],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        self.base_url = self.wait_for_line(r"Base URL: (\S+)")[1]
        self.wait_for_line(r"Loading the models")
        if found := re.search(r"(hk_\S+)", self.log()):
            self.admin_key = Key(found[1])

    def wait_for_line(self, pattern: str, seconds: float = READY_SECONDS) -> re.Match[str]:
        """Return the first match of `pattern` in what the server has printed; fail loudly if it never comes."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                if found := re.search(pattern, "".join(self._lines)):
                    return found
                ended = self._reader is not None and not self._reader.is_alive()
                if ended or not self._changed.wait(min(0.5, deadline - time.monotonic())):
                    assert not ended, f"The server ended without printing {pattern!r}:\n{''.join(self._lines)}"
                    assert time.monotonic() < deadline, f"No line {pattern!r} in time:\n{''.join(self._lines)}"

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> None:
        """Poll /health/ready until it answers 200."""
        poll_until(self.is_ready, seconds, describe=self.log)

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"The server ended with {self.process.returncode}:\n{self.log()}"
        # Long: on a busy machine nothing is answered for 10 s and more while libraries are imported.
        return httpx2.get(f"{self.root_url}/health/ready", timeout=60).status_code == 200

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal, wait for the end, return the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.wait()

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Wait until it has ended by itself; return the exit code."""
        assert self.process is not None
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"The server did not end in {seconds:.0f} s:\n{self.log()}") from None
        self._close()
        return code

    def kill(self) -> None:
        """End it at once, whatever state it is in. Its engines die with it."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_SECONDS)
        self._close()

    def log(self) -> str:
        """Everything it has printed so far."""
        with self._changed:
            return "".join(self._lines)

    def make_key(self, name: str = "test", *, tier: str = "enhanced", **rights: Any) -> Key:
        """Make a key over HTTP, which takes no time; `rights` are `scopes`, `models` and `limits`."""
        assert self.admin_key is not None
        headers = {"Authorization": f"Bearer {self.admin_key.text}"}
        body = {"name": name, "tier": tier, **rights}
        made = httpx2.post(f"{self.base_url}/admin/keys", json=body, headers=headers, timeout=60)
        assert made.status_code == 200, made.text
        self.made_keys.append(Key(made.json()["key"]))
        return self.made_keys[-1]

    def make_key_by_command(self, name: str = "test", *, tier: str = "enhanced", options: Sequence[str] = ()) -> Key:
        """Make a key with the real command line, like `hearth keys create --name ... --tier ... --json`."""
        self.made_keys.append(Key(self.keys("create", "--name", name, "--tier", tier, *options)["key"]))
        return self.made_keys[-1]

    def revoke(self, key: Key) -> None:
        """Revoke a key with the real command line; the server knows within 10 s."""
        self.keys("revoke", key.public_id)

    def keys(self, *arguments: str) -> Any:
        """Run `hearth keys ... --json` on this server's data and return what it prints."""
        return json.loads(self.hearth("keys", *arguments, "--json"))

    def hearth(self, *arguments: str) -> str:
        """Run the command line on this server's data and return what it prints."""
        done = subprocess.run(
            [BIN / "hearth", *arguments],
            cwd=ROOT,
            env=self._environment | {"HEARTH_DATA_DIR": str(self.data_dir)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def access_lines(self) -> list[dict[str, Any]]:
        """The access log, one dict per finished request."""
        text = (self.data_dir / "logs" / "access.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.join(STOP_SECONDS)
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()


class RunningServer(Server):
    """One that is not ours: tests of what it answers run, those that look into its process or its files are skipped."""

    def __init__(self, root_url: str, admin_key: Key) -> None:
        self.base_url = f"{root_url}/v1"
        self.admin_key = admin_key
        self.made_keys = []

    def __getattribute__(self, name: str) -> Any:
        if name in {"log", "pid", "process", "data_dir", "weights_dir", "hearth", "access_lines", "kill", "stop"}:
            pytest.skip("It looks into the server's process or its files.")
        return super().__getattribute__(name)


def poll_until(true: Callable[[], bool], seconds: float, *, describe: Callable[[], str] = str) -> None:
    """Ask again and again until the answer is yes; fail with `describe` when time is up."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:.1f} s:\n{describe()}"
        time.sleep(0.02)


async def async_poll_until(true: Callable[[], bool], seconds: float, *, describe: Callable[[], str] = str) -> None:
    """The same without blocking the event loop."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:.1f} s:\n{describe()}"
        await asyncio.sleep(0.02)


def total_bytes(files: Iterable[Path]) -> int:
    """Size of the files together. One that goes between its listing and this look counts nothing."""
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder in which a server is at work: what goes while this reads is left out."""
    found = {}
    for file in filter(Path.is_file, folder.rglob("*")):  # a socket lies there, too
        with suppress(FileNotFoundError):
            found[file] = file.read_bytes()
    return found


def open_socket(server: Server, *, timeout_seconds: float = 30) -> socket.socket:
    """A raw TCP connection to the server."""
    address = urlsplit(server.root_url)
    return socket.create_connection((address.hostname, address.port), timeout=timeout_seconds)


def raw_request(method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """The bytes of an HTTP/1.1 request, with nothing added but Host and Content-Length."""
    lines = [f"{method} {path} HTTP/1.1", "Host: hearth", *(f"{name}: {value}" for name, value in headers.items())]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def _clean_environment() -> dict[str, str]:
    """Ours without settings of Hearth: the test says what the server gets."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}


def free_port() -> int:
    """Return one below those that the system gives to connections: who is to listen there takes it later."""
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("No port is free.")
