"""The server of a soak, and what is done to it: processes killed and stopped, restarts, reloads, keys changed."""

import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import psutil
import yaml
from bench.load import BenchError
from bench.servers import HEARTH, Server, Workspace, environment, family, free_port, start_server
from soak.invariants import Judge, Level, UsageLedger, Window
from soak.traffic import IMAGE, PLUS, PRO, VOICE

_BACK_SECONDS = 600.0  # on a shared machine
_END_SECONDS = 60.0  # HEARTH_DRAIN_SECONDS is 30
_POLL_SECONDS = 0.25
_KEY_SECONDS = 10.0  # docs/keys.md: a change of a key takes effect within this time
_STALL_SECONDS = 10
_CHATS = frozenset({PLUS, PRO})


class Hearth:
    """`hearth serve` with all models of the checkout in a folder of its own, started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.models_file, self.port = folder, folder / "models.yaml", free_port()
        self.document = yaml.safe_load(Path("models.yaml").read_text(encoding="utf-8"))
        for name, entry in self.document["models"].items():
            entry["engine"] = (entry.get("engine") or {}) | {"stall_seconds": _STALL_SECONDS}
            entry["description"] = f"{name} of a soak"
        self.write_models()
        weights, command = folder / "weights", Path(sys.executable).parent / "hearth"
        variables = environment(folder / "data", weights, self.models_file)
        self.place = Workspace(folder, PLUS, weights, self.models_file, command, None, variables)
        self.admin_key = ""
        self.server: Server

    @property
    def url(self) -> str:
        """The address without /v1."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self.server.pid

    def write_models(self) -> None:
        self.models_file.write_text(yaml.safe_dump(self.document, sort_keys=False), encoding="utf-8")

    async def start(self) -> None:
        """Start it and wait until all models are ready. Raises `BenchError`."""
        command = (str(self.place.hearth), "serve")
        self.server = await start_server(self.place, HEARTH, command, self.admin_key, port=self.port)
        await self.server.ready()
        if not self.admin_key and (found := re.search(r"(hk_\S+)", self.server.log.read_text(encoding="utf-8"))):
            self.admin_key = found[1]

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal and wait for the end; after a while kill all processes. Returns the exit code."""
        return await self.server.stop(number, _END_SECONDS)

    async def command(self, *arguments: str) -> tuple[int, str]:
        """Run `hearth` with these arguments on this server's data; return its exit code and what it prints."""
        done = await anyio.run_process((str(self.place.hearth), *arguments), env=self.place.environment, check=False)
        return done.returncode, (done.stderr if done.returncode else done.stdout).decode()

    async def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        """Ask as the admin, or with another key. An answer without JSON is None; status 0: nothing listens."""
        headers = {"Authorization": f"Bearer {self.admin_key if key is None else key}"}
        timeout = aiohttp.ClientTimeout(60)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, self.url + path, json=body, headers=headers) as answer,
            ):
                found = await answer.read()
                return answer.status, json.loads(found) if answer.content_type == "application/json" else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0, None

    async def status(self) -> dict[str, Any] | None:
        """What `GET /v1/admin/status` says; None where nothing answers."""
        code, found = await self.ask("GET", "/v1/admin/status")
        return dict(found) if code == 200 else None

    async def make_key(self, name: str, tier: str, **more: Any) -> str:
        """Make a key over HTTP. Raises `BenchError`."""
        code, made = await self.ask("POST", "/v1/admin/keys", {"name": name, "tier": tier, **more})
        if code != 200:
            raise BenchError(f"No key could be made: {code} {made}")
        return str(made["key"])

    def family(self) -> list[psutil.Process]:
        """Return the API process and its children, none if it has ended."""
        with suppress(psutil.Error):
            return [one for part in family(self.pid) for one in part]
        return []

    def kill(self, part: str) -> None:
        """Kill processes of the server whose command line has this part."""
        for one in self.family():
            if part in _title(one):
                one.kill()

    def levels(self, models: Mapping[int, str], seconds: float) -> list[Level]:
        """Return memory, descriptors and threads of its processes; `models` names the model of a process id."""
        found = []
        for one in self.family():
            with suppress(psutil.Error), one.oneshot():
                title = _title(one)
                kind = "API" if one.pid == self.pid else models.get(one.pid, "")
                kind = kind or (  # a compiler's command line is that of the fork server
                    "schema compiler" if "hearth-schemas" in title else "fork server" if "forkserver" in title else ""
                )
                if kind:
                    mib = one.memory_info().rss / 2**20
                    found.append(Level(kind, one.pid, seconds, mib, one.num_fds(), one.num_threads()))
        return found


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.name()} {' '.join(process.cmdline())}"
    return ""


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@dataclass
class Fault:
    """One fault: when it was made, and after how long the server had recovered (None: it did not)."""

    name: str
    at: float
    recovered_seconds: float | None = None


@dataclass
class Faults:
    """Makes one fault after the other, in an order that the seed decides."""

    hearth: Hearth
    judge: Judge
    ledger: UsageLedger
    source: random.Random
    made: list[Fault] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    _left: list[str] = field(default_factory=list)
    _times: int = 0

    @property
    def kinds(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {
            **{f"kill -9 {name}": self._of_model(name, signal.SIGKILL) for name in (PLUS, PRO, IMAGE, VOICE)},
            **{f"kill -STOP {name}": self._of_model(name, signal.SIGSTOP) for name in (PLUS, VOICE)},
            "kill -9 fork server": self._fork_server,
            "kill -9 schema compiler": self._schema_compiler,
            "kill -9 API": self._kill_api,
            "SIGTERM and start": self._restart,
            "reload: a description and a limit": self._reload_lightly,
            "reload: max_num_seqs": self._reload_model,
        }

    async def next(self) -> Fault:
        """Make the next fault, and return when the server has recovered, or has taken too long."""
        if not self._left:  # each once, in another order every time
            self._left = self.source.sample([*self.kinds], len(self.kinds))
        name = self._left.pop()
        self._times += 1
        fault = Fault(name, time.monotonic() - self.began)
        self.made.append(fault)
        began = time.monotonic()
        try:
            async with asyncio.timeout(_BACK_SECONDS):
                await self.kinds[name]()
            fault.recovered_seconds = time.monotonic() - began
        except (TimeoutError, BenchError, psutil.Error) as error:
            self.judge.break_("faults", f"{name}: {str(error) or f'nothing was well after {_BACK_SECONDS:.0f} s'}")
            if self.hearth.server.process.returncode is not None:
                await self.hearth.start()
        finally:
            for window in self.judge.windows:
                window.closed = min(window.closed, time.monotonic())
        return fault

    def _of_model(self, name: str, number: signal.Signals) -> Callable[[], Awaitable[None]]:
        async def fault() -> None:
            before = await self._pids()
            self.judge.windows.append(Window(frozenset({name})))
            for pid in before[name]:
                os.kill(pid, number)
            await self._until_others(before, {name})

        return fault

    async def _pids(self) -> dict[str, list[int]]:
        status = await self.hearth.status()
        if status is None:
            raise BenchError("the server's status does not answer")
        return {model["id"]: model["pids"] for model in status["models"] if model["status"] == "ready"}

    async def _until_others(self, before: Mapping[str, list[int]], names: frozenset[str] | set[str]) -> None:
        while True:
            with suppress(BenchError):
                now = await self._pids()
                if all(name in now and not set(now[name]) & set(before[name]) for name in names):
                    return
            await asyncio.sleep(_POLL_SECONDS)

    async def _fork_server(self) -> None:
        before = await self._pids()
        self.judge.windows.append(Window(_CHATS))
        self.hearth.kill("multiprocessing.forkserver")
        await self._until_others(before, _CHATS)

    async def _schema_compiler(self) -> None:
        self.judge.windows.append(Window(_CHATS, schemas=True))
        self.hearth.kill("hearth-schemas")
        field = f"{self._times}"
        schema = {"type": "object", "properties": {field: {"type": "integer"}}, "required": [field]}
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        hello = [{"role": "user", "content": "Give me JSON."}]
        body = {"model": PLUS, "messages": hello, "max_tokens": 50, "response_format": form}
        while (await self.hearth.ask("POST", "/v1/chat/completions", body))[0] != 200:  # noqa: ASYNC110  # it asks
            await asyncio.sleep(_POLL_SECONDS)

    async def _kill_api(self) -> None:
        """A key is revoked and another made just before: both changes must survive."""
        hearth = self.hearth
        old = await hearth.make_key("soak: revoked before kill -9", "standard")
        new = await hearth.make_key("soak: made before kill -9", "standard")
        code, _ = await hearth.ask("POST", f"/v1/admin/keys/{old[3:15]}/revoke")
        before = hearth.family()
        self.judge.windows.append(Window(None, closes="everything"))
        self.ledger.killed()
        await hearth.stop(signal.SIGKILL)
        await self._all_end(before, "kill -9 of the API process")
        await hearth.start()
        states = [(await hearth.ask("GET", "/v1/models", key=key))[0] for key in (old, new)]
        if code != 200 or states != [401, 200]:
            self.judge.break_("keys", f"after kill -9: revoked and new key give {states}, revoking gave {code}")
        await hearth.ask("POST", f"/v1/admin/keys/{new[3:15]}/revoke")

    async def _restart(self) -> None:
        before = self.hearth.family()
        self.judge.windows.append(Window(None, closes="idle"))
        if (code := await self.hearth.stop()) != 0:
            self.judge.break_("faults", f"SIGTERM: the server ended with {code}")
        await self._all_end(before, "SIGTERM")
        await self.hearth.start()

    async def _all_end(self, before: list[psutil.Process], what: str) -> None:
        deadline = time.monotonic() + _KEY_SECONDS
        while (left := [one for one in before if _lives(one)]) and time.monotonic() < deadline:  # noqa: ASYNC110  # no children of ours
            await asyncio.sleep(_POLL_SECONDS)
        if left:
            self.judge.break_("processes", f"after {what} these live: {[_title(one) for one in left]}")

    async def _reload_lightly(self) -> None:
        """No window: no request may fail. A wrong file comes first and must change nothing."""
        hearth = self.hearth
        good = hearth.models_file.read_text(encoding="utf-8")
        hearth.models_file.write_text(good.replace("task: chat", "task: chess", 1), encoding="utf-8")
        code, answer = await hearth.ask("POST", "/v1/admin/reload")
        if code != 400 or answer["error"]["code"] != "invalid_config":
            self.judge.break_("reload", f"a wrong file was answered with {code} {answer}")
        hearth.document["models"][PLUS]["description"] = text = f"changed for the {self._times}. time"
        hearth.document["tiers"]["standard"]["requests_per_minute"] = limit = 100_000 + self._times
        hearth.write_models()
        if self.source.random() < 0.5:
            code, said = await hearth.command("reload")
        else:
            code, said = await hearth.ask("POST", "/v1/admin/reload")
        key = await hearth.make_key("soak: reload", "standard")
        _, seen = await hearth.ask("GET", f"/v1/models/{PLUS}", key=key)
        _, key_seen = await hearth.command("keys", "show", key[3:15], "--json")
        effective = json.loads(key_seen)["effective_limits"]["requests_per_minute"]
        if code not in {0, 200} or (seen.get("description"), effective) != (text, limit):
            self.judge.break_("reload", f"no effect: {code} {said}, {seen}, {key_seen}")
        await hearth.ask("POST", f"/v1/admin/keys/{key[3:15]}/revoke")

    async def _reload_model(self) -> None:
        """The model ends its answers and is loaded again."""
        before = await self._pids()
        engine = self.hearth.document["models"][PLUS]["engine"]
        engine["max_num_seqs"] = 383 - engine.get("max_num_seqs", 256)  # 256 and 127 in turn
        self.hearth.write_models()
        self.judge.windows.append(Window(frozenset({PLUS})))
        code, said = await self.hearth.command("reload")
        if code != 0:
            self.judge.break_("reload", f"hearth reload ended with {code}: {said}")
        await self._until_others(before, {PLUS})

    async def change_keys(self) -> None:
        """Make, use, change and revoke a key, by the command line or over HTTP. Not while the API process is ended."""
        by_command = self.source.random() < 0.5
        hearth = self.hearth
        if by_command:
            code, made = await hearth.command("keys", "create", "--name", "soak", "--tier", "standard", "--json")
            key = json.loads(made)["key"] if code == 0 else ""
        else:
            key = await hearth.make_key("soak", "standard")
        public_id = key[3:15]
        await self._expect(key, "/v1/models", 200)
        if by_command:
            await hearth.command("keys", "update", public_id, "--scope", "models")
        else:
            await hearth.ask("PATCH", f"/v1/admin/keys/{public_id}", {"scopes": ["models"]})
        await self._expect(key, "/v1/audio/voices", 403)
        if by_command:
            await hearth.command("keys", "revoke", public_id)
        else:
            await hearth.ask("POST", f"/v1/admin/keys/{public_id}/revoke")
        await self._expect(key, "/v1/models", 401, at_once=not by_command)
        await asyncio.sleep(_KEY_SECONDS)
        await self._expect(key, "/v1/models", 401, at_once=True)

    async def _expect(self, key: str, path: str, status: int, *, at_once: bool = False) -> None:
        """Ask until the key gets this status, without usage, which the ledger would lack."""
        deadline = time.monotonic() + _KEY_SECONDS
        while True:
            asked = time.monotonic()
            found, _ = await self.hearth.ask("GET", path, key=key)
            if found == status:
                return
            if at_once or asked > deadline:
                self.judge.break_("keys", f"key {key[3:15]}: GET {path} is {found}, not {status}")
                return
            await asyncio.sleep(_POLL_SECONDS)
