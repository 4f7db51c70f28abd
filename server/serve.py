"""Runs the server: its socket, its signals, and what it tells the terminal (`Banner`) and systemd (`Systemd`)."""

import asyncio
import gc
import json
import logging
import os
import resource
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any

import uvicorn
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from engine import ANSWERS, SETTLED, Config, Engine, ModelInfo
from engine.pool.records import compiler
from server.app import HearthApp, create_app
from server.http.disconnect import Drain
from server.http.protocol import http_config
from server.http.tls import Certificate, certificate_of
from server.instance import only_one
from server.observability.status_server import answers, status_socket
from server.reload import reload_config, renew_certificate
from server.settings import Settings, database_url, is_loopback, outside_address
from server.store.database import Database
from server.store.keys import SCOPES, KeyStore, public_id_in
from server.terminal import HEARTH, keys_command, time_left

_log = logging.getLogger("hearth.serve")

_CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
# A request to try, by a model's first capability: the path, the fields, and where curl puts the answer.
_REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/chat/completions", _CHAT, ""),
    "image_generation": ("/images/generations", {"prompt": "a red circle", "response_format": "url"}, ""),
    "text": ("/completions", {"prompt": "Once upon a time", "max_tokens": 32}, ""),
    "embedding": ("/embeddings", {"input": "Hello, world."}, ""),
    "rerank": ("/rerank", {"query": "Who is there?", "documents": ["Hello, world.", "It is late."]}, ""),
    "speech": ("/audio/speech", {"input": "Hello, world."}, " -o hello.mp3"),
    "transcription": ("/audio/transcriptions", {"file": "@hello.mp3"}, ""),
}
_COUNTDOWN_SECONDS = 1.0
_SETTLED_POLL_SECONDS = 0.5
# Python's own are 700, 10, 10: with hundreds of streams the first is reached within one engine step.
_GC_THRESHOLDS = (20_000, 20, 20)
_MAKE_KEY = "create --name me --tier standard"


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


def run(settings: Settings, config: Config) -> None:
    """Serve until SIGTERM or SIGINT, or until nothing can be served any more, then end the process.

    Raises `StartError`, `TlsError`, `InstanceError`, or the store's `StoreError`.
    """
    prepare_process()
    certificate = certificate_of(settings)
    with (
        only_one(settings.data_dir),
        listen(settings) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        first_key = runner.run(_first_key(settings, config))
        app = create_app(settings, config)
        once = first_key and app.state.once_links.make(public_id_in(first_key) or "")
        banner = Banner(settings, listener.getsockname()[1], certificate, first_key, once)
        app.state.base_url, app.state.certificate = banner.base_url, certificate
        server = _Server(app, banner)
        runner.run(server.serve(sockets=[listener]))
        banner.ended()
        # Everything has ended and is written. Unloading torch and vLLM would take another 2 s, and a thread that still
        # renders or tokenises for a client that left could delay the end for minutes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(server.exit_status)


def prepare_process() -> None:
    # One file per connection: raise the shell's default of 1,024 to what is allowed.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.set_threshold(*_GC_THRESHOLDS)


class _Server(uvicorn.Server):
    def __init__(self, app: HearthApp, banner: "Banner") -> None:
        super().__init__(http_config(app, app.state.settings, app.state.certificate))
        self._app = app
        self._banner = banner
        self._systemd = Systemd()
        self._status = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self.exit_status = 1  # for a supervisor: 0 is a normal end, all else a failure

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals ourselves: uvicorn's handling would close the listening socket before the drain."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)
        loop.add_signal_handler(signal.SIGHUP, self.on_reload)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.exit_status = 0 if self.started else 1  # the log has said why
        answering = status_socket(self._app.state.settings.data_dir, answers(self._app))
        await self._status.enter_async_context(answering)
        for follow in (self._banner.follow, self._systemd.follow, _freeze_when_settled):
            self._tasks.append(asyncio.create_task(follow(self._app.state.engine)))
        self._tasks.append(asyncio.create_task(self._end_when_unservable()))
        # Models may still load for minutes: /health/ready tells.
        self._systemd.send("READY=1", "STATUS=Listening; loading the models")

    def on_signal(self) -> None:
        """Drain at the first signal; end at once at the second."""
        drain: Drain | None = getattr(self._app.state, "drain", None)
        if drain is None or drain.draining:
            self._app.state.terminate = True
            if drain is not None:
                drain.cut()
            self.should_exit = True
            return
        self._systemd.send("STOPPING=1", "STATUS=Draining")
        self._banner.draining(drain.running, self._app.state.settings.drain_seconds)
        self._tasks.append(asyncio.create_task(self._drain(drain)))

    def on_reload(self) -> None:
        self._systemd.send("STATUS=Read models.yaml again")  # and no RELOADING=1: answers go on
        if hasattr(self._app.state, "drain"):
            self._tasks.append(asyncio.create_task(reload_config(self._app)))
        else:  # the engine does not exist, so no model has been loaded
            renew_certificate(self._app)

    async def _end_when_unservable(self) -> None:
        await self._app.state.engine.hopeless()
        if self._app.state.drain.draining:
            return
        self.exit_status = os.EX_UNAVAILABLE
        _log.error(
            "None of the models can be served, for the reasons above, so Hearth ends. Correct models.yaml or the "
            "weights (docs/models-yaml.md) and start it again."
        )
        self.on_signal()

    async def _drain(self, drain: Drain) -> None:
        await drain.drain(self._app.state.settings.drain_seconds)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End banner, status and tasks, then let uvicorn close connections and the lifespan end the engines."""
        for task in self._tasks:
            task.cancel()
        self._banner.close()
        await self._status.aclose()
        await super().shutdown(sockets)


def _settled(engine: Engine) -> bool:
    return all(health.status in SETTLED for health in engine.health())


async def _freeze_when_settled(engine: Engine) -> None:
    """Once every model is loaded or has failed, exclude all objects from later garbage collections.

    The modules and tables of vLLM, torch and our own are about a million objects: each full collection would halt all
    streams for a third of a second. Once only: cycles that later loads leave behind must be collected.
    """
    while not _settled(engine):  # noqa: ASYNC110  # only the banner may wait for changes
        await asyncio.sleep(_SETTLED_POLL_SECONDS)
    gc.collect()
    gc.freeze()


def _base_url(settings: Settings, address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"{'http' if settings.tls_cert is None else 'https'}://{host}:{port}/v1"


def listen(settings: Settings) -> socket.socket:
    """Return a listening socket. Called first, so that a second server fails at once. Raises `StartError`."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _probe_silent_clients(listener, settings.write_stall_seconds)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise StartError(
            f"Cannot listen on {settings.host} port {settings.port}: {error.strerror}. Pick one: "
            "1. stop what listens there (perhaps another Hearth); 2. take another port with --port; "
            "3. check the address given with --host."
        ) from error
    return listener


def _probe_silent_clients(listener: socket.socket, seconds: float) -> None:
    """Have the kernel end connections whose client has vanished, within this time (TCP keep-alive).

    Connections inherit it. server/http/protocol.py watches clients that are being written to; this is for clients that
    wait for their turn or have sent a part of a body.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = 3
    for option, value in (
        (socket.TCP_KEEPIDLE, seconds / 2),
        (socket.TCP_KEEPINTVL, seconds / 2 / probes),
        (socket.TCP_KEEPCNT, probes),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, min(max(1, round(value)), 32767))


async def _first_key(settings: Settings, config: Config) -> str | None:
    """Make an admin key if the store has none. Raises `StartError` if other machines can reach the server."""
    async with await Database.open(database_url(settings)) as database:
        store = KeyStore(database)
        if await store.count_active():
            return None
        if not is_loopback(settings.host):
            raise StartError(
                f"There is no API key yet, and {settings.host} can be reached from other machines. Pick one: "
                f"1. make a key first: {keys_command(settings, _MAKE_KEY)}; "
                "2. start once on this machine only: --host 127.0.0.1 (it makes an admin key and prints it)."
            )
        widest = max(config.tiers.values(), key=lambda tier: len(tier.models))
        text, _ = await store.create("first key", widest.id, scopes=SCOPES)
        return text


class Banner:
    """Prints to stdout: bars on a terminal, a line per change elsewhere. The key is printed once, here."""

    def __init__(
        self, settings: Settings, port: int, certificate: Certificate | None, first_key: str | None, once: str | None
    ) -> None:
        self._anywhere = settings.host in {"0.0.0.0", "::"}  # noqa: S104  # asked for, see _first_key
        self._host = "127.0.0.1" if self._anywhere else settings.host
        self.base_url = _base_url(settings, self._host, port)
        """For clients on this machine."""
        self._settings = settings
        self._port = port
        self._certificate = certificate
        self._first_key = first_key
        self._once = once
        self._console = Console(highlight=False, soft_wrap=True, markup=False)
        self._say = self._console.print
        self._bars = Progress(
            TextColumn("  {task.description:<16}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[phase]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
        )

    async def follow(self, engine: Engine) -> None:
        """Print the addresses, then the loads of the models, then that all are ready; then each change."""
        self._greet()
        tasks: dict[str, TaskID] = {}
        if self._console.is_terminal:
            self._bars.start()
        announced, reported = False, dict[str, str]()
        while True:
            for health in engine.health():
                if health.id not in tasks:  # at the start all models; later those of a reload
                    tasks[health.id] = self._bars.add_task(health.id, total=1.0, phase="", left="")
                left = time_left(health.remaining_seconds)
                self._bars.update(tasks[health.id], completed=health.progress, phase=health.phase, left=left)
                # A line per new phase where bars cannot be drawn, and everywhere after the start
                if reported.get(health.id) != health.phase and not self._bars.live.is_started:
                    self._say(f"  {health.id}: {health.phase}{f' ({left})' if left else ''}")
                reported[health.id] = health.phase
            if not announced and _settled(engine):
                announced = True
                self.close()
                self._announce(engine)
            with suppress(TimeoutError):
                async with asyncio.timeout(_COUNTDOWN_SECONDS if self._bars.live.is_started else None):
                    await engine.wait_for_change()

    def draining(self, running: int, seconds: float) -> None:
        requests = "1 running request has" if running == 1 else f"{running} running requests have"
        self._say(
            f"Shutting down: {requests} up to {seconds:.0f} s. A second signal ends at once."
            if running
            else "Shutting down."
        )

    def close(self) -> None:
        self._bars.stop()

    def ended(self) -> None:
        self._say("Stopped.")

    def _greet(self) -> None:
        settings = self._settings
        self._say(f"\nHearth listens. Base URL: {self.base_url}")
        hosts = [self._host]
        if self._anywhere and (address := outside_address(settings.host)) is not None:
            self._say(f"From other machines: {_base_url(settings, address, self._port)}")
            hosts.append(address)
        if self._certificate and (unnamed := [host for host in hosts if not self._certificate.names(host)]):
            self._say(
                f"The certificate {settings.tls_cert} is not for {' and '.join(unnamed)}: clients refuse the server by "
                "such an address. Use a name that it is for (docs/operations.md#https)."
            )
        if settings.tls_cert is None and not settings.trusted_proxies and not is_loopback(settings.host):
            self._say(
                "Without HTTPS others on the network can read keys and conversations: use --tls-cert or a proxy "
                "(docs/operations.md)."
            )
        if self._first_key is not None:
            self._say(f"API key (admin, shown once, keep it): {self._first_key}")
        if settings.console:
            page = self.base_url.removesuffix("v1")
            self._say(f"In a browser: {page}")
            if self._once is not None:
                self._say(f"Signs in there without the key, once and within 10 minutes: {page}#once={self._once}")
        if "data_dir" in settings.model_fields_set and "HEARTH_DATA_DIR" not in os.environ:  # by a flag
            where = shlex.quote(str(settings.data_dir.absolute()))
            self._say(f"For the other commands, in their terminals: export HEARTH_DATA_DIR={where}")
        self._say("Loading the models:")

    def _announce(self, engine: Engine) -> None:
        models = engine.models()
        for health in engine.health():
            if health.status == "failed" and health.error:
                self._say(f"{health.id} cannot be served: {health.error.removeprefix(f'{health.id}: ')}")
        usable = [model for model in models if model.status in ANSWERS]
        if not usable:
            self._say("No model could be loaded; the lines above say why.")
            return
        demos = [model.id for model in models if model.demo]
        if demos:
            self._say(
                f"Served by tiny demo models, which know a few dozen sentences and plain shapes: {', '.join(demos)}. "
                f"For real ones: `{HEARTH} plan` shows what fits this machine, and scripts/download-weights fetches it "
                "(docs/weights.md; voices: docs/voices.md)."
            )
        if engine.uncompiled and compiler() is not None:
            self._say(
                f"Faster on this CPU once compiled: {', '.join(engine.uncompiled)}. `{HEARTH} compile` does it, in a "
                "minute or two for each, for the next start."
            )
        failed = len(models) - len(usable)
        self._say(f"Ready, but for {failed} of {len(models)} models, see above. Try:" if failed else "Ready. Try:")
        self._say(f"\n{self._curl(usable, engine)}\n")
        if self._first_key is None:
            self._say(f"(HEARTH_KEY: a key of yours. Make one with: {keys_command(self._settings, _MAKE_KEY)})\n")

    def _curl(self, usable: list[ModelInfo], engine: Engine) -> str:
        """A request to try: a question if any model chats, else whatever the first one does."""
        model = next((one for one in usable if "chat" in one.capabilities), usable[0])
        kind = next((kind for kind in _REQUESTS if kind in model.capabilities), "text")
        path, fields, rest = _REQUESTS[kind]
        voices = [voice.id for voice in engine.voices(model.id)]
        body = {"model": model.id, **fields, **({"voice": voices[0]} if voices else {})}
        sent = f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
        if "file" in body:
            sent = " ".join(f"-F {name}={value}" for name, value in body.items())
        key, url, shown = self._first_key or "$HEARTH_KEY", f"{self.base_url}{path}", self._certificate
        if shown is not None and not shown.trusted():
            url = f"--cacert {shlex.quote(str(shown.cert))} {url}"
        return f'curl {url} -H "Authorization: Bearer {key}" {sent}{rest}'


class Systemd:
    """Reports to the service manager through the socket named by `NOTIFY_SOCKET`; see sd_notify(3)."""

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        meant_for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._watchdog_seconds = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6 if meant_for_us else 0.0

    async def follow(self, engine: Engine) -> None:
        """Show the models in `systemctl status`, and reset the watchdog from the event loop that serves."""
        if not self._address:
            return
        reported = ""
        while True:
            ready = [health.status == "ready" for health in engine.health()]
            status = f"STATUS={sum(ready)} of {len(ready)} models ready"
            if status != reported or self._watchdog_seconds:
                self.send(status, "WATCHDOG=1")
                reported = status
            await asyncio.sleep(self._watchdog_seconds / 3 or 5)

    def send(self, *states: str) -> None:
        """Send states to the service manager, if there is one; a failure must not stop the server."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager, suppress(OSError):
            manager.settimeout(0)
            manager.sendto("\n".join(states).encode(), self._address)
