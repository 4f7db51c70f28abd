"""Changes the code of the pure cores, one small thing at a time, and lists the changes that no test notices.

The changes are cosmic-ray's. Each one is tried in a process of its own, forked from one that has imported the libraries
already, on the tests of its target alone; no file is changed. tests/mutants.yaml has the targets, and changes that
change nothing.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import importlib
import importlib.machinery
import importlib.util
import itertools
import json
import math
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType
from typing import IO

import hypothesis
import pytest
import yaml
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from parso.tree import NodeOrLeaf
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

# One or two of each kind: the rest of cosmic-ray's operators make changes that any test notices.
_ARITHMETIC = "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul"
_BITS = "LShift_RShift RShift_LShift BitOr_BitAnd BitAnd_BitOr"
_COMPARISONS = "Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt"
OPERATORS = [
    *(f"ReplaceBinaryOperator_{pair}" for pair in f"{_ARITHMETIC} {_BITS}".split()),
    *(f"ReplaceComparisonOperator_{pair}" for pair in _COMPARISONS.split()),
    *("ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Delete_Not", "AddNot"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
    *("NumberReplacer", "RemoveDecorator"),
]
OURS = ("engine", "server", "tests")
WANTED_PERCENT = 95.0
LEAST_SECONDS = 10.0  # of processor time
TIMES_AS_LONG = 5.0
HANGS_AFTER_SECONDS = 30  # one test that waits for ever
KILLED, SURVIVED = "killed", "survived"


@dataclass(frozen=True)
class Target:
    """A file, what of it is changed (functions, classes; all by default), and pytest's arguments for its tests."""

    file: str
    tests: list[str]
    only: list[str] | None = None

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").replace("/", ".")


@dataclass(frozen=True)
class Mutant:
    target: Target
    line: int
    was: str
    becomes: str
    source: str = dataclasses.field(repr=False)


def main() -> int:
    asked = arguments()
    listed = yaml.safe_load(Path(asked.config).read_text(encoding="utf-8"))
    targets = [Target(**target) for target in listed["targets"] if asked.only in target["file"]]
    if not targets:
        sys.exit(f"No target of {asked.config} has {asked.only!r} in its path.")
    sys.path[:0] = [os.fspath(Path.cwd()), *("scripts", "tests", "tests/engine", "tests/server")]
    mutants = [mutant for target in targets for mutant in mutants_of(target)]
    equivalent = {(one["file"], one["was"], one["becomes"]) for one in listed.get("equivalent") or []}
    there = {(mutant.target.file, mutant.was, mutant.becomes) for mutant in mutants}
    files = {target.file for target in targets}
    if gone := [one for one in equivalent - there if one[0] in files]:
        sys.exit(f"{asked.config} lists changes as equivalent that are not made (any more); take them out: {gone}")
    mutants = [one for one in mutants if (one.target.file, one.was, one.becomes) not in equivalent]
    if asked.sample:
        mutants = random.Random(0).sample(mutants, min(asked.sample, len(mutants)))  # noqa: S311
    limits = {target.file: time_limit(target) for target in targets if any(one.target == target for one in mutants)}
    outcomes = run_all(mutants, limits)
    return report(mutants, outcomes, len(equivalent & there), asked.json)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test mutants", description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="only targets with this in their path, like packing")
    parser.add_argument("--sample", type=int, metavar="N", help="try N of the changes, drawn at random")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all outcomes as JSON")
    parser.add_argument("--config", default="tests/mutants.yaml", help=argparse.SUPPRESS)
    return parser.parse_args()


def mutants_of(target: Target) -> Iterator[Mutant]:
    source = Path(target.file).read_text(encoding="utf-8")
    tree, meaning, lines = get_ast(source), meant(source), source.splitlines()
    spans = list(spans_of(source, target.only))
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        places = ((node, start) for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for number, (node, start) in enumerate(places):
            if not any(start[0] in span for span in spans) or is_left_out(node, number):
                continue
            changed = mutate_code(source, operator, number)
            with contextlib.suppress(SyntaxError):  # `**` of a call is no operator
                if meant(changed) != meaning:
                    was, becomes, line = difference(lines, changed.splitlines())
                    yield Mutant(target, line, was, becomes, changed)


def is_left_out(node: NodeOrLeaf, number: int) -> bool:
    """Whether it is the star of a signature, or the second of a number's two changes: 0 becomes 1, others one less."""
    if node.type == "number":
        return number % 2 == int(ast.literal_eval(str(getattr(node, "value", 0))) == 0)
    return node.parent is not None and node.parent.type == "parameters"


def spans_of(source: str, only: Sequence[str] | None) -> Iterator[range]:
    """Yield the lines to change: of the functions and classes in `only` (`Class.method` too), or all."""
    if only is None:
        yield range(1, source.count("\n") + 2)
        return
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            members = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            named = {node.name: node, **{f"{node.name}.{member.name}": member for member in members}}
            for name in named.keys() & set(only):
                found.add(name)
                yield range(named[name].lineno, (named[name].end_lineno or 0) + 1)
    if missing := set(only) - found:
        sys.exit(f"Nothing is called {', '.join(missing)}; correct `only` in tests/mutants.yaml.")


class _Meaning(ast.NodeTransformer):
    """Leaves out what no test can notice, or none should: types, what a data class is made with, tuned numbers."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  # as ast names it

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = []
        return self.generic_visit(node)

    def visit_Module(self, node: ast.Module) -> ast.AST:
        node.body = [one for one in node.body if not is_tuned_number(one)]
        return self.generic_visit(node)


def is_tuned_number(node: ast.stmt) -> bool:
    """Whether a module's line gives a name to a number: the tests know it by that name."""
    arithmetic = ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop
    return isinstance(node, ast.Assign) and all(isinstance(one, arithmetic) for one in ast.walk(node.value))


def meant(source: str) -> str:
    return ast.dump(_Meaning().visit(ast.parse(source)))


def difference(before: list[str], after: list[str]) -> tuple[str, str, int]:
    """Return what changed, as it was and as it becomes, and the number of its first line."""
    matched = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    codes = [code for code in matched if code[0] != "equal"]
    (_, start, _, begin, _), (*_, stop, _, end) = codes[0], codes[-1]
    was, becomes = (" ".join(line.strip() for line in lines) for lines in (before[start:stop], after[begin:end]))
    return was, becomes, start + 1


class Changed(importlib.machinery.SourceFileLoader):
    """Loads one module with other code, and nothing else."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.target.module, str(Path(mutant.target.file).resolve()))
        self._source = mutant.source

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        return compile(self._source, self.path, "exec", dont_inherit=True)


def run_tests(target: Target) -> int:
    """Run a target's tests in this process; 0: all passed. Random inputs are the same each time."""
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    profile = hypothesis.settings(database=None, derandomize=True, phases=phases)
    hypothesis.settings.register_profile("mutants", profile)
    hypothesis.settings.load_profile("mutants")
    options = ("-x", "-q", "--assert=plain", "-p", "no:cacheprovider", f"--timeout={HANGS_AFTER_SECONDS}")
    return int(pytest.main([*options, "-m", "not engine and not rounds", *target.tests]))


def forked(work: Callable[[], int], output: IO[bytes]) -> int:
    """Do something in a new process, whose exit status it gives, and return the process's id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        status = work()
    except BaseException:  # noqa: BLE001  # nothing of the parent's goes on here
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def time_limit(target: Target) -> float:
    """Run a target's tests on its code as it is, import the libraries used, and return a mutant's processor time."""
    with tempfile.TemporaryFile() as output, tempfile.NamedTemporaryFile() as libraries:

        def clean() -> int:
            status = run_tests(target)
            ours = tuple(str(Path(folder).resolve()) for folder in OURS)
            files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
            found = [name for name, file in files.items() if file.startswith(sys.prefix) and not file.startswith(ours)]
            Path(libraries.name).write_text("\n".join(found))
            return status

        _, status, used = os.wait4(forked(clean, output), 0)
        if status:
            output.seek(0)
            sys.exit(f"The tests of {target.file} fail as they are; mend them first.\n{output.read().decode()}")
        for name in Path(libraries.name).read_text().splitlines():
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
    return max(LEAST_SECONDS, TIMES_AS_LONG * (used.ru_utime + used.ru_stime))


def run_all(mutants: Sequence[Mutant], limits: Mapping[str, float]) -> list[str]:
    outcomes, waiting, running = [""] * len(mutants), iter(enumerate(mutants)), dict[int, int]()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[survived]} survived"), TimeRemainingColumn())
    # Drawn by this thread: a fork copies no other.
    with (
        Path(os.devnull).open("wb") as silence,
        Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar,
    ):
        task = bar.add_task("", total=len(mutants), survived=0)
        try:
            while True:
                for index, mutant in itertools.islice(waiting, (os.cpu_count() or 1) - len(running)):
                    running[forked(partial(tried, mutant, limits[mutant.target.file]), silence)] = index
                if not running:
                    return outcomes
                pid, status = os.wait()
                with contextlib.suppress(ProcessLookupError):  # what a test has started, too
                    os.killpg(pid, signal.SIGKILL)
                outcomes[running.pop(pid)] = KILLED if status else SURVIVED
                bar.update(task, advance=1, survived=outcomes.count(SURVIVED), refresh=True)
        finally:
            for pid in running:
                os.killpg(pid, signal.SIGKILL)


def tried(mutant: Mutant, limit_seconds: float) -> int:
    signal.setitimer(signal.ITIMER_PROF, limit_seconds)  # its signal ends this process
    sys.meta_path.insert(0, Changed(mutant))
    return run_tests(mutant.target)


def report(mutants: Sequence[Mutant], outcomes: Sequence[str], equivalent: int, file: Path | None) -> int:
    survivors = [mutant for mutant, outcome in zip(mutants, outcomes, strict=True) if outcome == SURVIVED]
    percent = 100.0 * (1 - len(survivors) / len(mutants)) if mutants else 100.0
    console = Console(width=None if sys.stdout.isatty() else 160)
    if survivors:
        table = Table("where", "was", "becomes", title="What no test notices", show_lines=True)
        for mutant in survivors:
            table.add_row(f"{mutant.target.file}:{mutant.line}", escape(mutant.was), escape(mutant.becomes))
        console.print(table)
    console.print(
        f"{percent:.1f} % of {len(mutants)} are noticed (wanted: {WANTED_PERCENT:.0f}); "
        f"{equivalent} known as equivalent were left out."
    )
    if file is not None:
        rows = [
            {"file": one.target.file, "line": one.line, "was": one.was, "becomes": one.becomes, "outcome": outcome}
            for one, outcome in zip(mutants, outcomes, strict=True)
        ]
        file.write_text(json.dumps({"mutants": rows}, indent=1), encoding="utf-8")
    return int(math.floor(percent * 10) / 10 < WANTED_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
