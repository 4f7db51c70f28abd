"""`hearth status`, `reload` and `requests`: the state of the running server, and what it has refused lately."""

from __future__ import annotations

import contextlib
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from server.cli.options import AsJson, DataDir, read_time, refuse, tell
from server.instance import InstanceError, Outcome, ask_to_reload, no_server, running_pid, wait_for_outcome
from server.observability.status import GpuState, Memory, ModelState, Refusal, Status, StatusError, ask, ask_refusals
from server.settings import load_settings
from server.terminal import HEARTH, print_rich, size_text, table, time_left
from server.validation import moment, past

_OUTCOME_SECONDS = 60.0  # a thousand voices on a slow disk
_REFRESH_SECONDS = 2.0
_AGAIN_SECONDS = 0.5
_AT_ONCE_SECONDS = 3.0  # a folder that is missing, a plan that has no room
_COLUMNS = ("model", "state", "served with", "memory", "KV cache", "running", "waiting", "last minute", "restarts")
_REFUSED_COLUMNS = ("time (UTC)", "status", "error", "field or limit", "request", "model", "key", "x-request-id")
_COLORS = {"ready": "green", "failed": "red", "loading": "yellow", "draining": "yellow"}


def status(
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh every 2 s, until Ctrl-C; with --json, one object per line.")
    ] = False,
    wait: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Wait at most this long until no model is loading.")
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the server's state: models, memory, queues, GPUs.

    Exit code 0: all is well or loading. 1: no server is running. 2: a model has failed, or the server does not respond.
    With --wait, 0: all models are ready. 1: all else.
    """
    folder = load_settings(data_dir=data_dir).data_dir
    if watch and wait is not None:
        refuse("--watch does not end, --wait does: give one of the two.")
    if watch:
        follow(folder, as_json=as_json)
        return
    found = _read(folder) if wait is None else _settled_status(folder, wait)
    tell(found.model_dump(mode="json"), *shown(found), as_json=as_json)
    if wait is not None and found.status != "ready":
        raise typer.Exit(1)
    if found.status == "failed":
        raise typer.Exit(2)


def follow(data_dir: Path, *, as_json: bool) -> None:
    """Show the server's state, and what went wrong lately, every 2 s until Ctrl-C. Raises as `_read` does."""
    in_place = sys.stdout.isatty() and not as_json  # into a pipe a Live writes nothing before its end
    drawn = Live(auto_refresh=False) if in_place else contextlib.nullcontext()
    with contextlib.suppress(KeyboardInterrupt), drawn as live:
        while True:
            found = _read(data_dir)
            if as_json:
                print(found.model_dump_json(), flush=True)  # noqa: T201  # each line at once, also into a pipe
            elif live is None:
                print_rich(Group(*shown(found), *_lately(found)))
            else:
                live.update(Group(*shown(found), *_lately(found)), refresh=True)
            time.sleep(_REFRESH_SECONDS)


def _read(data_dir: Path) -> Status:
    """Ask the server of this directory. Raises `StatusError`, or `InstanceError` where none runs."""
    if (found := ask(data_dir)) is not None:
        return found
    if (pid := running_pid(data_dir)) is not None:
        raise StatusError(f"The server (process {pid}) is starting or ending. Try again in a few seconds.")
    raise no_server(data_dir)


def _settled_status(data_dir: Path, seconds: float) -> Status:
    """Ask until no model is being loaded, or time is up. A server that starts, or is not there yet, is waited for."""
    deadline = time.monotonic() + seconds
    told = False
    while True:
        try:
            found = _read(data_dir)
        except (StatusError, InstanceError) as error:
            if time.monotonic() >= deadline or isinstance(error.__cause__, PermissionError):
                refuse(str(error), code=1)
            if not told:
                typer.echo(f"Waiting for a server with the data directory {data_dir}.", err=True)
                told = True
        else:
            loading = any(model.status == "loading" for model in found.models)
            if not loading or time.monotonic() >= deadline:
                return found
        time.sleep(_AGAIN_SECONDS)


def shown(found: Status) -> list[RenderableType]:
    reasons = [f"{model.id}: {model.reason}" for model in found.models if model.reason]
    reasons += [found.degraded] if found.degraded else []
    lines = [*reasons, *map(_gpu_line, found.gpus), _machine_line(found)]
    at = f" at {found.base_url}" if found.base_url else ""
    first = Text("Hearth ").append(standing(found), _COLORS.get(found.status, ""))
    first.append(f"{at}, version {found.version}, process {found.pid}, up for {duration(found.uptime_seconds)}")
    return [first, table(_COLUMNS, map(_row, found.models)), *map(Text, lines)]


def standing(found: Status) -> str:
    """Say the state in words: `is ready`, or how many models are served if some have failed."""
    failed = sum(model.status == "failed" for model in found.models)
    if found.status != "failed" or not failed:
        return f"is {found.status}"
    served = len(found.models) - failed
    return f"serves {served or 'none'} of {len(found.models)} models"


def _row(model: ModelState) -> tuple[str | Text, ...]:
    state = Text(model.status, _COLORS.get(model.status, ""))
    if model.status not in {"ready", "failed"}:
        progress = f"{model.progress:.0%}" if 0 < model.progress < 1 else ""
        parts = (model.phase, progress, time_left(model.remaining_seconds))
        state.append(f": {', '.join(filter(None, parts))}", "default")
    cache = "-" if model.kv_cache_usage is None else f"{model.kv_cache_usage:.0%}"
    if model.engines:
        ready = sum(engine.status == "ready" for engine in model.engines)
        state.append(f", {ready} of {len(model.engines)} engines", "default")
    counts = (cache, str(model.running), str(model.waiting), work_text(model), str(model.restarts))
    return (model.id, state, served_with(model), memory_text(model.memory), *counts)


def served_with(model: ModelState) -> str:
    served = model.served_with
    if served is None:
        return "-"
    where = f" on GPU {', '.join(map(str, model.gpus))}" if model.gpus else ""
    names = {"demo": "the demo", "own": f"your folder {served.folder}", "variant": served.folder}
    names["shipped"] = "what comes with Hearth"
    return names[served.source] + where + (", compiled" if served.compiled else "")


def memory_text(memory: Memory) -> str:
    parts = []
    for name, taken, planned, following in (
        ("GPU", memory.gpu_bytes, memory.planned_gpu_bytes, memory.next_gpu_bytes),
        ("RAM", memory.ram_bytes, memory.planned_ram_bytes, memory.next_ram_bytes),
    ):
        plan = "" if planned is None else f"{size_text(planned)} planned"
        plan += "" if following is None else f"{', ' if plan else ''}{size_text(following)} at its next load"
        if taken is not None:
            parts.append(f"{size_text(taken)} {name}" + (f" ({plan})" if plan else ""))
        elif plan:
            parts.append(f"{plan} {name}")
    return ", ".join(parts) or "-"


def work_text(model: ModelState) -> str:
    work = model.last_minute
    counts = {
        "answers/s": round(work.answers / work.seconds, 2),
        "errors/s": round(work.errors / work.seconds, 2),
        "tokens/s": work.tokens_per_second,
        "images": work.images,
        "s of speech": work.audio_seconds,
    }
    return ", ".join(f"{count:g} {what}" for what, count in counts.items() if count) or "-"


def _gpu_line(gpu: GpuState) -> str:
    line = f"GPU {gpu.index}, {gpu.name}: {size_text(gpu.used_bytes)} of {size_text(gpu.total_bytes)} taken"
    strangers = [one for one in gpu.holders if one.model is None]
    if not gpu.others_bytes or not strangers:
        return line
    named = ", ".join(
        f"{one.name} (process {one.pid}{'' if one.used_bytes is None else ', ' + size_text(one.used_bytes)})"
        for one in strangers
    )
    return f"{line}; {size_text(gpu.others_bytes)} by others: {named}"


def _machine_line(found: Status) -> str:
    last = found.last_minute
    rates = {"requests/s": last.requests, "refused/s": last.refused, "failed/s": last.failed}
    parts = [
        f"RAM: {size_text(found.ram_available_bytes)} of {size_text(found.ram_total_bytes)} available",
        f"{found.requests_running} requests being answered",
        ", ".join(f"{round(count / last.seconds, 2):g} {what}" for what, count in rates.items()),
    ]
    parts += [f"{found.swaps} swaps since the start"] if found.swaps else []
    parts += [f"traces go to {found.traces}"] if found.traces else []
    parts += [f"no GPU: {found.no_gpus}"] if found.no_gpus and not found.gpus else []
    return "; ".join(parts)


def _lately(found: Status) -> list[Text]:
    refused = [
        f"{one.at}  {one.status} {one.error_code}"
        f"{f' ({one.param})' if one.param else ''}  {one.method} {one.route or one.path}  key {one.key or 'none'}"
        for one in found.refused
    ]
    logged = [f"{line.at}  {line.level}  {line.message}" for line in found.log]
    lines = [*(["\nRefused or failed last:", *refused] if refused else []), *(["\nLog:", *logged] if logged else [])]
    return [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]


def duration(seconds: float) -> str:
    """Write like 3 d 4 h, with the two largest units."""
    left, parts = int(seconds), []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, left = divmod(left, size)
        if number:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2]) or "0 s"


def reload(*, data_dir: DataDir = None) -> None:
    """Have the running server read its models.yaml, weights, voices and certificate again, and print what changed.

    No answer is cut short. Exit code 1: a change was refused, a changed model failed to load, or the result is unknown.
    """
    asked_at_ns = time.monotonic_ns()
    settings = load_settings(data_dir=data_dir)
    pid = ask_to_reload(settings.data_dir)
    outcome = wait_for_outcome(settings.data_dir, pid, asked_at_ns, _OUTCOME_SECONDS)
    if outcome is None:
        raise InstanceError(
            f"The server (process {pid}) did not report the result: it has ended, is still starting, or is very busy. "
            "Its log says when it reads models.yaml; then try again."
        )
    well = _show_outcome(outcome)
    if not _settled(settings.data_dir, {*outcome.models.added, *outcome.models.changed}) or not well:
        raise typer.Exit(1)


def _show_outcome(outcome: Outcome) -> bool:
    """Say what the server has applied; False if it refused some of it."""
    certificate = outcome.certificate
    if outcome.refused is not None:
        typer.echo(f"The server (process {outcome.pid}) did not apply models.yaml: {outcome.refused}", err=True)
        renewed = certificate is not None and certificate.renewed
        typer.echo("But the TLS certificate is renewed." if renewed else "Everything stays as it was.", err=True)
    else:
        typer.echo(f"The server (process {outcome.pid}) has read {outcome.path} again.")
        for sentence in outcome.sentences() or ["nothing has changed"]:
            typer.echo(f"  {sentence}")
        for warning in outcome.warnings:
            typer.echo(f"Warning: {warning}", err=True)
    if certificate is not None and certificate.refused is not None:
        typer.echo(f"The TLS certificate was refused, and the old one is still shown: {certificate.refused}", err=True)
        return False
    return outcome.refused is None


def _settled(data_dir: Path, changed: set[str]) -> bool:
    """Say the states of the changed models, if the server answers; False if one has failed already."""
    states: list[ModelState] = []
    deadline = time.monotonic() + _AT_ONCE_SECONDS
    while changed:
        with contextlib.suppress(StatusError):
            found = ask(data_dir)
            states = [state for state in found.models if state.id in changed] if found is not None else []
        if all(state.status != "loading" for state in states) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for state in states:
        if state.status == "failed":
            typer.echo(f"{state.id} cannot be served: {state.reason}", err=True)
        elif state.status == "loading":
            typer.echo(f"  {state.id} is being loaded ({state.phase}): `{HEARTH} status` shows the progress")
    return all(state.status != "failed" for state in states)


def requests(
    *,
    refused: Annotated[  # noqa: ARG001  # over HTTP it has to be said
        bool, typer.Option("--refused", help="Has no effect: only these are kept.")
    ] = True,
    since: Annotated[str, typer.Option(help="Start: 1h (also m, d, w), 2026-11-21.")] = "1h",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number, newest first.")] = 100,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the latest requests that were refused or failed.

    The server keeps the last 1,000, until it is restarted; logs/access.jsonl has a line for each request.
    Of clients' own text only `path` is kept, escaped and cut, and `field`, if the API knows it.
    `model` may be one that the key may not use.
    """
    start = read_time("--since", since, past, datetime.now(UTC))
    folder = load_settings(data_dir=data_dir).data_dir
    found = ask_refusals(folder)
    if found is None:
        raise no_server(folder)
    shown = [one for one in found.data if moment(one.at) >= start][:limit]
    nothing = (
        f"Nothing was refused since {start:%Y-%m-%d %H:%M} UTC, or since the server's start if that was later. "
        f"Earlier ones are in {folder / 'logs'}/access.jsonl."
    )
    tell(
        {"data": [one.model_dump() for one in shown]},
        table(_REFUSED_COLUMNS, map(_refused_row, shown)) if shown else nothing,
        as_json=as_json,
    )


def _refused_row(one: Refusal) -> tuple[str, ...]:
    request = f"{one.method} {one.route or one.path or ''}"
    known = (one.error_code, one.param, request, one.model, one.key, one.request_id)
    return (one.at.removesuffix("Z").replace("T", " "), str(one.status), *(text or "-" for text in known))
