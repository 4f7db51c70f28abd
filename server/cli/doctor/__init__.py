"""`hearth doctor`: checks everything that has to be right; one line per check says how it is and what to do.

It leaves nothing changed: a key that it makes is deleted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from engine.config import load_config
from engine.errors import EngineError
from server.cli.doctor.bundle import write_bundle
from server.cli.doctor.checks import CHECKS, Case, Finding, case_of, ok, problem, skipped
from server.cli.options import AsJson, DataDir, Models, WeightsDir, refuse, tell
from server.cli.status import follow, standing
from server.observability.status import Status, StatusError, ask
from server.settings import SettingsError, load_settings
from server.terminal import HEARTH, wrapped

_COLORS = {"ok": "green", "warning": "yellow", "problem": "red", "skipped": "bright_black"}


def doctor(  # noqa: PLR0913 - one argument per option
    *,
    full: Annotated[bool, typer.Option("--full", help="Also read and hash all weights that were fetched.")] = False,
    self_test: Annotated[bool, typer.Option(help="Send the server test requests, with a temporary key.")] = True,
    unloaded: Annotated[bool, typer.Option("--unloaded", help="Also test models that are not loaded.")] = False,
    bundle: Annotated[
        Path | None, typer.Option(help="Write an archive for a bug report to this file, without secrets; no self-test.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the server's state every 2 s instead, as status --watch does.")
    ] = False,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    models: Models = None,
    as_json: AsJson = False,
) -> None:
    """Find problems and suggest fixes. Exit code 1: there is a problem."""
    folders = {"data_dir": data_dir, "weights_dir": weights_dir, "models": models}
    if watch and bundle is not None:
        refuse("--watch does not end, --bundle does: give one of the two.")
    if watch:
        follow(load_settings(**folders).data_dir, as_json=as_json)
        return
    if bundle is not None and os.path.lexists(bundle):
        refuse(f"{bundle} exists already, and is not overwritten. Name another file.", code=1)
    cases: list[Case] = []
    found = []
    count = Counter(dict.fromkeys(_COLORS, 0))
    self_test = self_test and bundle is None
    for area, finding in _findings(folders, cases, self_test=self_test, full=full, unloaded=unloaded):
        found.append((area, finding))
        count[finding.verdict] += 1
        if not as_json:
            took = "" if finding.seconds is None else f" ({finding.seconds * 1000:.0f} ms)"
            verdict = typer.style(f"{finding.verdict:<8}", fg=_COLORS[finding.verdict])
            typer.echo(wrapped(f"{verdict} {area:<10} {finding.message}{took}", 20))
            if finding.remedy is not None:
                typer.echo(f"{'':<19} -> {finding.remedy}")
    words = [f"{count[verdict]} {verdict}{'' if count[verdict] == 1 else 's'}" for verdict in ("problem", "warning")]
    words.append("1 check passed" if count["ok"] == 1 else f"{count['ok']} checks passed")
    words += [f"{count['skipped']} skipped"] if count["skipped"] else []
    rows = [{"area": area, **asdict(finding)} for area, finding in found]
    tell({"well": not count["problem"], **count, "findings": rows}, f"\n{', '.join(words)}.", as_json=as_json)
    if bundle is not None:
        write_bundle(bundle, cases[0] if cases else None, found)
        typer.echo(f"Written: {bundle}. Known secrets are masked; read it before you share it.", err=True)
    if count["problem"]:
        raise typer.Exit(1)


def _findings(
    folders: Mapping[str, Path | None], cases: list[Case], *, self_test: bool, full: bool, unloaded: bool
) -> Iterator[tuple[str, Finding]]:
    try:
        given = load_settings(**folders)
    except SettingsError as error:
        yield "settings", problem(str(error), "docs/settings.md has all of them")
        yield "all else", skipped("needs valid settings", "correct them, then run this again")
        return
    config = running = None
    try:
        config = load_config(given.models)
        yield "models", ok(f"{given.models}: {len(config.entries)} models, {len(config.tiers)} tiers")
    except EngineError as error:
        yield "models", problem(error.message, "docs/models-yaml.md explains every key")
    try:
        running = ask(given.data_dir)
        yield "server", _server(running)
    except StatusError as error:
        yield "server", problem(str(error))
    case = replace(case_of(given, config, running), full=full, unloaded=unloaded)
    cases.append(case)
    for check in CHECKS:
        yield from ((check.__name__, finding) for finding in check(case))
    if self_test and running is None:
        yield "self-test", skipped("no running server answers here", "start one with scripts/serve, then try again")
    elif self_test:
        from server.cli.doctor.selftest import selftest  # importing its HTTP client takes a good part of a short run

        yield from (("self-test", finding) for finding in selftest(case))


def _server(running: Status | None) -> Finding:
    if running is None:
        return skipped("no server runs on this data directory", "start one: scripts/serve")
    failed = [model.id for model in running.models if model.status == "failed"]
    message = f"process {running.pid}, version {running.version}, {standing(running)}"
    message += f", sends traces to {running.traces}" if running.traces else ""
    told = f"{message}; failed: {', '.join(failed)}"
    return problem(told, f"{HEARTH} status says why; so does its log") if failed else ok(message)
