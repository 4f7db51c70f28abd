"""`bench compare`: the working tree against an earlier revision of it, both loaded and measured in turns."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import re
import subprocess
import tarfile
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.chat import CPU, MEMORY, SPEED, TIMES
from benchmarks.chat_cases import Load, Shape, cases_for
from benchmarks.chat_targets import ServerTarget, all_started
from benchmarks.command import deliver, ending_cleanly
from benchmarks.compare import Row, compare, say
from benchmarks.conditions import conditions
from benchmarks.errors import BenchError
from benchmarks.report import document, print_table
from benchmarks.workplace import Workplace, open_workplace

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"(streamed|plain):(?:(\d+)|(\d+(?:\.\d+)?)/s)")
_NOW = "now"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `now` is the commit that the working tree is based on, with a + if files are changed."""

    model: str
    base: str
    now: str
    rows: tuple[str, ...]
    repeats: int
    seconds: float
    max_tokens: int
    method: str = "both servers loaded, in turns; medians; ratios are medians of the ratios within each repeat"


def compare_revisions(  # noqa: PLR0913  # one argument per option
    base: Annotated[
        str, typer.Argument(help="The revision to compare with: a commit, branch or tag of this repository.")
    ],
    *,
    rows: Annotated[
        str, typer.Option(help="Which loads: streamed or plain, and requests at a time or a rate as 20/s.")
    ] = "streamed:1,streamed:32,streamed:128,plain:128",
    model: Annotated[str, typer.Option(help="A model of models.yaml, in both revisions.")] = "service-plus",
    weights_dir: Annotated[Path | None, typer.Option(help="Folder of real weights. Default: the demo models.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each row and revision; medians are shown.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long one run takes.")] = 2.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer, exactly.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """Compare the working tree with an earlier revision: what became faster, what slower."""
    wanted = parsed(rows)
    with ending_cleanly():
        changed = "+" if _git("status", "--porcelain", "--untracked-files=no") else ""
        commit = _git("rev-parse", "--short", f"{base}^{{commit}}").decode().strip()
        now = _git("rev-parse", "--short", "HEAD").decode().strip() + changed
        plan = Plan(model, commit, now, tuple(load.name for load in wanted), repeats, seconds, max_tokens)
        with (
            tree_of(commit) as tree,
            open_workplace(_ROOT / "models.yaml", model, weights_dir) as ours,
            open_workplace(tree / "models.yaml", model, weights_dir) as theirs,
        ):
            report, found = asyncio.run(_benchmark(plan, wanted, ours, running(theirs, tree)))
    if deliver(report, output, as_json=as_json):
        for title, columns in (("Speed", SPEED), ("Times", TIMES), ("Processor time", CPU), ("Memory", MEMORY)):
            print_table(title, found, columns)


async def _benchmark(plan: Plan, wanted: list[Load], ours: Workplace, theirs: Workplace) -> tuple[bytes, list[Row]]:
    under = conditions(ours)
    say(f"Starting the working tree ({plan.now}) and {plan.base}; each loads the model.")
    async with all_started([ServerTarget.start(ours, _NOW), ServerTarget.start(theirs, plan.base)]) as targets:
        shape = Shape(plan.model, plan.max_tokens, plan.seconds)
        cases = await cases_for(shape, wanted, targets)
        say(f"Measuring, about {2 * plan.repeats * len(cases) * plan.seconds:.0f} s:")
        rows = await compare(targets, cases, repeats=plan.repeats, headline="requests_per_second")
    return document("compare", under, asdict(plan), rows), rows


def parsed(text: str) -> list[Load]:
    """Read rows like streamed:32,plain:20/s."""
    found = []
    for part in text.split(","):
        match = _ROW.fullmatch(part.strip())
        if match is None or not float(match[2] or match[3]):
            raise typer.BadParameter(f"{part!r} is no row like streamed:32 or plain:20/s", param_hint="--rows")
        found.append(Load(match[1] == "streamed", streams=int(match[2] or 0), rate=float(match[3] or 0)))
    return found


@contextmanager
def tree_of(commit: str, root: Path = _ROOT) -> Iterator[Path]:
    """Lay a revision's files into a temporary folder. Raises `BenchError`."""
    with tempfile.TemporaryDirectory(prefix="hearth-bench-tree-") as name:
        with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", commit, root=root))) as archive:
            archive.extractall(name, filter="data")
        yield Path(name)


def running(place: Workplace, tree: Path) -> Workplace:
    """Have the processes of a place import `engine` and `server` from another tree, and all else as ever."""
    path = os.pathsep.join([str(tree), place.environment.get("PYTHONPATH", "")])
    return dataclasses.replace(place, environment=place.environment | {"PYTHONPATH": path})


def _git(*arguments: str, root: Path = _ROOT) -> bytes:
    found = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)
    if found.returncode != 0:
        raise BenchError(f"git {arguments[0]}: {found.stderr.decode(errors='replace').strip()}")
    return found.stdout
