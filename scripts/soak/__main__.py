"""The command behind `scripts/test soak`: mixed traffic and faults for a while, a plot, and a verdict."""

import asyncio
import contextlib
import importlib
import importlib.util
import json
import random
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import typer
from bench.servers import say
from soak.faults import Faults, Hearth
from soak.invariants import INVARIANTS, Judge, Level, Outcome, UsageLedger, access_problems, grown
from soak.traffic import Ask, asks

_DEADLINE_SECONDS = 120.0  # an image takes 40 s while models load on two shared cores
_SAMPLE_SECONDS = 5.0
_KEYS_SECONDS = 45.0
_PAUSE_SECONDS = 600.0
_CALM_SECONDS = 20.0
_LEAVING = 0.15  # of the clients
_LEAVES_SECONDS = 1.5
_LIMITED = 0.05
_PLOT_SECONDS = 30.0


@dataclass
class Soak:
    hearth: Hearth
    rate: float
    fault_seconds: float
    seed: int
    judge: Judge = field(default_factory=Judge)
    ledger: UsageLedger = field(default_factory=UsageLedger)
    outcomes: list[Outcome] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.source = random.Random(self.seed)  # noqa: S311  # repeatable on purpose
        self.faults = Faults(self.hearth, self.judge, self.ledger, random.Random(self.seed))  # noqa: S311
        self.began = self.faults.began = time.monotonic()
        self.keys: dict[str, str] = {}
        self.running: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Event()
        self._unmatched: list[Outcome] = []  # with the access log
        self._log_read_bytes = 0

    async def run(self, minutes: float) -> None:
        say("Starting the server and loading the models.")
        await self.hearth.start()
        try:
            tiers = {"standard": "standard", "enhanced": "enhanced", "leaving": "enhanced", "careless": "standard"}
            self.keys = {name: await self.hearth.make_key(name, tier) for name, tier in tiers.items()}
            self.keys["limited"] = await self.hearth.make_key("limited", "standard", limits={"requests_per_minute": 10})
            self.began = self.faults.began = time.monotonic()
            asyncio.get_running_loop().call_later(minutes * 60, self.over.set)
            self._sending.set()
            chores = [asyncio.create_task(one()) for one in (self._trouble, self._send, self._sample, self._tell)]
            try:
                for done in (await asyncio.wait(chores, return_when=asyncio.FIRST_COMPLETED))[0]:
                    done.result()
            finally:
                for chore in chores:
                    chore.cancel()
        finally:
            await self.hearth.stop()

    async def _send(self) -> None:
        """Begin requests at random moments, whether earlier ones are answered or not."""
        sessions = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        async with sessions as session:
            for number, ask in enumerate(asks(self.source)):
                await asyncio.sleep(self.source.expovariate(self.rate))
                await self._sending.wait()
                task = asyncio.create_task(self._one(session, ask, number))
                self.running.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.judge.break_("answers", f"not understood: {error!r}")

    async def _one(self, session: aiohttp.ClientSession, ask: Ask, number: int) -> None:
        """Send one request, judge its outcome, and follow the link in its answer."""
        dice, name = random.Random(f"{self.seed} {number}"), "enhanced" if ask.enhanced else "standard"  # noqa: S311
        leaves = not ask.careless and not ask.without_key and dice.random() < _LEAVING
        if ask.careless:
            name = "careless"
        elif leaves:
            name = "leaving"
        elif not ask.enhanced:
            name = "limited" if dice.random() < _LIMITED else dice.choice(["standard", "enhanced"])
        key = "" if ask.without_key else self.keys[name]
        one = Outcome(ask, key[3:15], f"soak-{self.seed}-{number}", time.monotonic(), limited=name == "limited")
        try:
            async with asyncio.timeout(_DEADLINE_SECONDS):
                await self._ask(session, one, key, dice if leaves else None)
        except TimeoutError:
            one.ending = "hung"
        except (aiohttp.ClientError, OSError):
            one.ending = "closed" if one.status is not None else "unanswered"
        one.ended = time.monotonic()
        self.judge.judge(one)
        self.ledger.add(one)
        follow = ask.then(one.body) if ask.then and one.verdict == "complete" else None
        self.outcomes.append(replace(one, body=b"", headers={}))
        self._unmatched.append(self.outcomes[-1])
        if follow is not None:
            await self._one(session, follow, -number)

    async def _ask(self, session: aiohttp.ClientSession, one: Outcome, key: str, leaves: random.Random | None) -> None:
        """Read the whole answer; or disconnect before it, or in the middle."""
        headers = {"X-Request-Id": one.request_id, "Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        body = one.ask.body if isinstance(one.ask.body, bytes | None) else json.dumps(one.ask.body).encode()
        waits, url = None if leaves is None else leaves.uniform(0, _LEAVES_SECONDS), self.hearth.url + one.ask.path
        try:
            async with asyncio.timeout(waits) as patience:
                async with session.request("POST" if body else "GET", url, data=body, headers=headers) as answer:
                    one.status, one.headers = answer.status, dict(answer.headers)
                    if leaves is not None and leaves.random() < 0.5:  # it stays for the beginning
                        patience.reschedule(asyncio.get_running_loop().time() + leaves.uniform(0, _LEAVES_SECONDS))
                    async for chunk in answer.content.iter_any():
                        one.body += chunk
                one.ending = "answered"
        except TimeoutError:
            if not patience.expired():
                raise
            one.ending = "left"

    async def _trouble(self) -> None:
        """Make a fault every few minutes and change keys in between; pause and compare now and then."""
        pause, next_fault = time.monotonic() + _PAUSE_SECONDS, time.monotonic() + self.fault_seconds / 2
        while not self.over.is_set():
            if time.monotonic() >= next_fault:
                fault = await self.faults.next()
                took = "not" if fault.recovered_seconds is None else f"after {fault.recovered_seconds:.1f} s"
                say(f"  fault: {fault.name}; recovered {took}")
                next_fault = time.monotonic() + self.fault_seconds
            elif time.monotonic() >= pause:
                await self._compare()
                pause = time.monotonic() + _PAUSE_SECONDS
            else:
                await self.faults.change_keys()
                rest = min(_KEYS_SECONDS, next_fault - time.monotonic(), pause - time.monotonic())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.over.wait(), max(0.1, rest))
        await self._compare()

    async def _compare(self) -> None:
        """Wait until all is answered: then nothing runs, and usage and the access log agree with the answers."""
        self._sending.clear()
        if self.running:
            await asyncio.wait(self.running)
        deadline = time.monotonic() + _CALM_SECONDS
        while True:
            status = await self.hearth.status()
            models = status["models"] if status else []
            held = [(one["id"], one["running"], one["waiting"]) for one in models if one["running"] or one["waiting"]]
            if status and not held and status["requests_running"] == 1:
                break
            if time.monotonic() > deadline:
                running = status and status["requests_running"]
                self.judge.break_("places", f"{held}, {running} requests, though nothing is sent")
                break
            await asyncio.sleep(0.5)
        await asyncio.sleep(1)  # the access log is written a tenth of a second later
        _, found = await self.hearth.ask("GET", "/v1/usage?by=key,kind")
        # Our own requests, as the admin, are not in the ledger.
        rows = [row for row in (found["data"] if found else []) if row["key"] != self.hearth.admin_key[3:15]]
        for wrong in self.ledger.compare(rows):
            self.judge.break_("usage", wrong)
        for wrong in access_problems(self._new_lines(), self._unmatched, self.judge):
            self.judge.break_("access log", wrong)
        say(f"  pause: compared usage, and {len(self._unmatched)} requests with the access log")
        self._unmatched = []
        if not self.over.is_set():  # else the server is stopped now
            self._sending.set()

    def _new_lines(self) -> list[dict[str, Any]]:
        with (self.hearth.folder / "data" / "logs" / "access.jsonl").open("rb") as log:
            log.seek(self._log_read_bytes)
            new = log.read()
        self._log_read_bytes += len(new)
        return [json.loads(line) for line in new.splitlines() if line.startswith(b"{") and line.endswith(b"}")]

    async def _sample(self) -> None:
        """Read memory, descriptors and threads of processes, and check that models are ready if no fault is near."""
        while True:
            asked = time.monotonic()
            status = await self.hearth.status()
            calm = not any(window.closed + 5 > asked for window in self.judge.windows)
            if status is not None:
                models = {pid: model["id"] for model in status["models"] for pid in model["pids"]}
                self.levels += await asyncio.to_thread(self.hearth.levels, models, time.monotonic() - self.began)
                if calm and (
                    bad := [(one["id"], one["status"]) for one in status["models"] if one["status"] != "ready"]
                ):
                    self.judge.break_("faults", f"without a fault: {bad}")
            elif calm and not any(window.opened > asked for window in self.judge.windows):
                self.judge.break_("faults", "the server's status does not answer")
            await asyncio.sleep(_SAMPLE_SECONDS)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(60)
            minute, broken = (time.monotonic() - self.began) / 60, sum(self.judge.broken.values())
            say(f"minute {minute:.0f}: {_counts(self.outcomes)}; {len(self.running)} running; {broken} broken")


def report(soak: Soak) -> str:
    """Return Markdown tables: endpoints, faults, growth of processes, invariants and examples of broken ones."""
    growth, wrong = grown(soak.levels)
    for line in wrong:
        soak.judge.break_("memory", line)
    lines = [f"{len(soak.outcomes)} requests in {(time.monotonic() - soak.began) / 60:.1f} minutes", ""]
    lines += ["| endpoint | outcomes | p50, p95, max s |", "|---|---|---|"]
    for kind in sorted({one.ask.kind for one in soak.outcomes}):
        ones = [one for one in soak.outcomes if one.ask.kind == kind]
        seconds = [one.ended - one.began for one in ones if one.verdict == "complete"]
        times = [f"{value:.2f}" for value in np.percentile(seconds, [50, 95, 100])] if seconds else []
        lines.append(f"| {kind} | {_counts(ones)} | {', '.join(times)} |")
    lines += ["", "| fault | times | well again after s |", "|---|---|---|"]
    for name in sorted({fault.name for fault in soak.faults.made}):
        after = [fault.recovered_seconds for fault in soak.faults.made if fault.name == name]
        lines.append(
            f"| {name} | {len(after)} | {', '.join('never' if one is None else f'{one:.1f}' for one in after)} |"
        )
    lines += ["", "| process | of | mean | an hour | +- | hours seen |", "|---|---|---|---|---|---|"]
    for kind, name, found in growth:
        figures = f"{found.mean:.1f} | {found.per_hour:+.1f} | {found.standard_error:.1f} | {found.hours:.2f}"
        lines.append(f"| {kind} | {name} | {figures} |")
    lines += ["", "| invariant | |", "|---|---|"]
    for name, count in soak.judge.broken.items():
        lines.append(f"| {INVARIANTS[name]} | {f'BROKEN {count} times' if count else 'held'} |")
    lines += [f"  {name}: {example}" for name, examples in soak.judge.examples.items() for example in examples]
    return "\n".join([*lines, ""])


def _counts(ones: Sequence[Outcome]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(one.verdict for one in ones).most_common())


def draw(soak: Soak, file: Path) -> None:
    """Draw rates, latencies, memory and descriptors over time into a PNG, with a line for each fault."""
    bins: dict[int, list[Outcome]] = defaultdict(list)
    for one in soak.outcomes:
        bins[int((one.ended - soak.began) / _PLOT_SECONDS)].append(one)
    panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    verdicts = sorted({one.verdict for one in soak.outcomes})
    for place, ones in sorted(bins.items()):
        minute, counts = (place + 0.5) * _PLOT_SECONDS / 60, Counter(one.verdict for one in ones)
        for verdict in verdicts:
            panels["requests per second, by outcome"][verdict].append((minute, counts[verdict] / _PLOT_SECONDS))
        if seconds := [one.ended - one.began for one in ones if one.verdict == "complete"]:
            for percent in (50, 95):
                late = float(np.percentile(seconds, percent))
                panels["seconds until complete"][f"p{percent}"].append((minute, late))
    for level in soak.levels:
        panels["resident MiB"][level.kind].append((level.seconds / 60, level.mib))
        panels["open descriptors"][level.kind].append((level.seconds / 60, level.descriptors))
    importlib.import_module("matplotlib").use("Agg")
    figure, places = importlib.import_module("matplotlib.pyplot").subplots(2, 2, figsize=(13, 9), layout="constrained")
    for place, (heading, lines) in zip(places.flat, panels.items(), strict=False):
        for label, points in lines.items():
            place.plot(*zip(*points, strict=True), label=label, marker=".")
        for fault in soak.faults.made:
            place.axvline(fault.at / 60, color="grey", linewidth=0.6, linestyle=":")
        place.set(title=heading, xlabel="minutes")
        place.grid(visible=True, alpha=0.25)
    places.flat[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


def main(  # options
    *,
    minutes: Annotated[float, typer.Option(min=0.5, help="How long.")] = 30.0,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second.")] = 4.0,
    fault_minutes: Annotated[float, typer.Option(min=0.1, help="Minutes from one fault to the next.")] = 2.5,
    seed: Annotated[int, typer.Option(help="Decides the order of faults and requests.")] = 1,
) -> None:
    """Put a real server under mixed load and make faults; exit code 1 if an invariant was broken."""
    folder = Path("var", f"soak-{datetime.now(UTC):%Y%m%d-%H%M%S}").absolute()
    folder.mkdir(parents=True)
    can_draw = importlib.util.find_spec("matplotlib") is not None
    say(f"Logs and results: {folder}" + ("" if can_draw else "; no plot: .venv/bin/python -m pip install matplotlib"))
    soak = Soak(Hearth(folder), rate, fault_minutes * 60, seed)
    asyncio.run(_run(soak, minutes))
    found = report(soak)
    (folder / "soak.md").write_text(found, encoding="utf-8")
    print(f"\n{found}")
    if can_draw:
        draw(soak, folder / "soak.png")
    sys.exit(int(any(soak.judge.broken.values())))


async def _run(soak: Soak, minutes: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, soak.over.set)
    try:
        await soak.run(minutes)
    except Exception as error:  # noqa: BLE001  # report what was seen until then
        traceback.print_exc()
        soak.judge.break_("faults", f"the soak cannot go on: {error!r}")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
