"""`bench guidellm`: the same servers asked by a load generator that is not ours, in an environment of its own."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from benchmarks.chat import chosen
from benchmarks.chat_targets import RUST, SERVE, SERVER, START_SECONDS
from benchmarks.command import deliver, ending_cleanly
from benchmarks.compare import Case, Row, compare, say
from benchmarks.conditions import conditions
from benchmarks.errors import BenchError
from benchmarks.hearth import HearthServer
from benchmarks.report import document, print_table
from benchmarks.rust_frontend import cache_folder, rust_frontend
from benchmarks.vllm_server import VllmServer, serve_arguments
from benchmarks.workplace import Workplace, open_workplace

if TYPE_CHECKING:
    from benchmarks.chat_targets import Server
    from benchmarks.figures import Figures

_COLUMNS = {
    "requests_per_second": "requests/s",
    "tokens_per_second": "tokens/s",
    "time_to_first_token_p50_ms": "first token p50 ms",
    "time_to_first_token_p95_ms": "first token p95 ms",
    "time_to_first_token_p99_ms": "first token p99 ms",
    "inter_token_latency_p50_ms": "between tokens p50 ms",
    "inter_token_latency_p99_ms": "between tokens p99 ms",
    "wrong": "failed",
}
_OURS = {
    "time_to_first_token": "time_to_first_token_ms",
    "inter_token_latency": "inter_token_latency_ms",
}
_REQUIREMENT = "guidellm==0.8.*"
_INSTALL_SECONDS = 1800.0
_RUN_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    model: str
    against: tuple[str, ...]
    streams: int
    requests: int
    prompt_tokens: int
    max_tokens: int
    repeats: int
    requirement: str = _REQUIREMENT


@dataclass(frozen=True, slots=True)
class GuideJob:
    """One run; `seed` makes its prompts."""

    plan: Plan
    seed: int


class GuideTarget:
    """A server that guidellm asks. `tokenizer` is the model's folder: it makes prompts of a given length."""

    def __init__(self, name: str, server: Server, program: Path, tokenizer: str, folder: Path) -> None:
        self.name = name
        self._server = server
        self._program = program
        self._tokenizer = tokenizer
        self._folder = folder

    async def measure(self, job: GuideJob) -> Figures:
        """Do one run. Raises `BenchError`."""
        file = self._folder / f"guidellm-{self.name}-{job.seed}.json"
        command = [str(self._program), *arguments(job, self._server, self._tokenizer, file)]
        if job.seed == 0:
            say(f"  {' '.join(command)}".replace(self._server.key, "KEY"))
        await _run(command, _RUN_SECONDS, self._folder)
        report = msgspec.json.decode(await asyncio.to_thread(file.read_bytes))
        figures = guide_figures(report)
        if figures["wrong"]:
            first = report["benchmarks"][0]["requests"]["errored"][0]
            say(f"  {self.name}: {figures['wrong']:.0f} failed, the first with: {first['info'].get('error')}")
        return figures


def guidellm(  # noqa: PLR0913  # one argument per option
    *,
    model: Annotated[str, typer.Option(help="A chat model of models.yaml.")] = "service-plus",
    models: Annotated[Path, typer.Option(help="The models.yaml to take it from.")] = Path("models.yaml"),
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of real weights. Default: the demo model.")] = None,
    against: Annotated[str, typer.Option(help="What to compare with: serve, rust or both.")] = SERVE,
    streams: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Requests of one run.")] = 512,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each target; medians are shown.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """Have guidellm, an independent load generator, compare Hearth with vllm serve."""
    others = chosen(against, (SERVE, RUST), "--against")
    plan = Plan(model, others, streams, requests, prompt_tokens, max_tokens, repeats)
    with ending_cleanly(), open_workplace(models, model, weights_dir) as place:
        report, row = asyncio.run(_benchmark(plan, place))
    if deliver(report, output, as_json=as_json):
        print_table(f"By guidellm, {streams} at the same time", [row], _COLUMNS)


def arguments(job: GuideJob, server: Server, tokenizer: str, file: Path) -> list[str]:
    """Return guidellm's command line."""
    plan = job.plan
    address = f"http://{server.host}:{server.port}"
    tokens = f"prompt_tokens={plan.prompt_tokens},output_tokens={plan.max_tokens}"
    return [
        *("run", "--disable-console-interactive"),
        *(
            "--backend",
            f"kind=openai_http,target={address},model={plan.model},api_key={server.key},validate_backend=false",
        ),
        *("--profile", f"kind=concurrent,streams={plan.streams}"),
        *("--constraint", f"kind=max_requests,count={plan.requests}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,{tokens}"),
        *("--seed", f"kind=static,value={job.seed}"),
        *("--output", f"kind=json,path={file}"),
    ]


def guide_figures(report: Any) -> Figures:
    """Put guidellm's JSON report into our figures. Raises `BenchError` where it has another form than that of 0.8."""
    try:
        metrics = report["benchmarks"][0]["metrics"]
        figures: Figures = {
            "requests_per_second": metrics["requests_per_second"]["successful"]["mean"],
            "tokens_per_second": metrics["output_tokens_per_second"]["successful"]["mean"],
            "wrong": metrics["request_totals"]["errored"],
        }
        for ours, theirs in _OURS.items():
            percentiles = metrics[theirs]["successful"]["percentiles"]
            figures |= {f"{ours}_{which}_ms": percentiles[which] for which in ("p50", "p95", "p99")}
    except (KeyError, IndexError, TypeError) as error:
        raise BenchError(f"guidellm's report has no {error}: it is not one of version 0.8.") from error
    return figures


async def _benchmark(plan: Plan, place: Workplace) -> tuple[bytes, Row]:
    program = await _installed()
    under, tokenizer = conditions(place), serve_arguments(place, rust=False)[0]
    servers: dict[str, HearthServer | VllmServer] = {}
    say(f"Starting {', '.join((SERVER, *plan.against))}; each loads the model.")
    try:
        servers[SERVER] = await HearthServer.start(place, within_seconds=START_SECONDS)
        for name in plan.against:
            rust = await rust_frontend() if name == RUST else None
            servers[name] = await VllmServer.start(place, rust=rust, name=name, within_seconds=START_SECONDS)
        targets = [GuideTarget(name, one, program, tokenizer, place.folder) for name, one in servers.items()]
        cases = [Case(f"{plan.streams} at a time", lambda repeat: GuideJob(plan, repeat))]
        (row,) = await compare(targets, cases, repeats=plan.repeats, headline="requests_per_second")
    finally:
        for server in servers.values():
            await server.stop()
    return document("guidellm", under, asdict(plan), [row]), row


async def _installed() -> Path:
    """Return guidellm, installed into the cache folder where it is not there yet. Raises `BenchError`."""
    folder = cache_folder() / "guidellm"
    program, done = folder / "bin" / "guidellm", folder / "hearth-bench-done"
    if not await asyncio.to_thread(done.exists):
        say(f"Installing guidellm into {folder}: some 6 GB, once.")
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        await _run([sys.executable, "-m", "venv", str(folder)], _INSTALL_SECONDS, folder.parent)
        install = (str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", _REQUIREMENT)
        await _run(install, _INSTALL_SECONDS, folder.parent)
        await asyncio.to_thread(done.touch)
    return program


async def _run(command: list[str] | tuple[str, ...], seconds: float, folder: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder
    )
    try:
        async with asyncio.timeout(seconds):
            printed, _ = await process.communicate()
    except TimeoutError:
        raise BenchError(f"{command[0]} was not done after {seconds:.0f} s.") from None
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        last = "\n".join(printed.decode(errors="replace").splitlines()[-15:])
        raise BenchError(f"{Path(command[0]).name} ended with status {process.returncode}:\n{last}")
