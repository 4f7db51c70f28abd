"""What a release of vLLM would break: its wheel is fetched and read, neither installed nor run.

Three things are looked at: the names of engine/backends/vllm/compat.py, what our files import of vLLM, and which of
the functions that ours replace or call have other code than in the installed release, to be read by a person.
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from engine.backends.vllm.compat import NAMES
from engine.compat import Sources, missing

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/check-vllm", description=__doc__)
    parser.add_argument("version", help="a release, like 0.33.0, or the path of a wheel")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hearth-check-vllm-") as folder:
        rows = findings(sources_of(asked.version, Path(folder)))
    print(
        json.dumps({"version": asked.version, "findings": rows}, indent=2) if asked.json else table(asked.version, rows)
    )
    return int(any(row["kind"] == "needed" and row["problem"] != CHANGED for row in rows))


CHANGED = "has other code"


def sources_of(version: str, folder: Path) -> Sources:
    wheel = Path(version)
    if wheel.suffix != ".whl":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(folder), f"vllm=={version}"], check=True, stdout=sys.stderr)
        (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith((".py", ".pyi"))])
    return Sources({"vllm": folder / "vllm"})


def findings(sources: Sources) -> list[dict[str, Any]]:
    """List what is gone or changed: what is needed first."""
    found = [(each.name, each.kind, problem, each.patch, each.without) for each, problem in missing(NAMES, sources)]
    optional = {each.name for each in NAMES if each.kind == "optional"}
    found += [
        (name, "needed", "is gone", file, f"{file} cannot be imported.")
        for name, file in imported(sorted((ROOT / "engine").rglob("*.py"))).items()
        if name not in optional and sources.find(name) is None
    ]
    installed = Sources()
    found += [
        (each.name, each.kind, CHANGED, each.patch, "To be read.")
        for each in {each.name: each for each in NAMES if each.name.startswith("vllm.")}.values()
        if "" not in (codes := {_code(installed.find(each.name)), _code(sources.find(each.name))}) and len(codes) == 2
    ]
    rows = [dict(zip(("name", "kind", "problem", "used by", "without"), one, strict=True)) for one in found]
    return sorted(rows, key=lambda row: (row["problem"] == CHANGED, row["kind"] != "needed", row["name"]))


def imported(files: list[Path]) -> dict[str, str]:
    """Return what these files of ours import of vLLM, public or not: dotted names, with the file of each."""
    found: dict[str, str] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "vllm":
                found |= {f"{node.module}.{alias.name}": file.name for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name: file.name for alias in node.names if alias.name.partition(".")[0] == "vllm"}
    return found


def _code(function: ast.AST | None) -> str:
    """Return a function's code without docstrings, comments and layout; nothing for what is no function."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    for node in ast.walk(function):
        match getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant()), _, *_] as body:
                del body[0]
    return ast.dump(function)


def table(version: str, rows: list[dict[str, Any]]) -> str:
    broken = [row for row in rows if row["problem"] != CHANGED]
    changed = [row for row in rows if row["problem"] == CHANGED]
    lines = [f"vLLM {version}: {len(NAMES)} names looked for, {len(broken)} gone or of another signature."]
    lines += [
        f"  {row['kind']:<8}  {row['name']} {row['problem']}\n            used by {row['used by']}: {row['without']}"
        for row in broken
    ]
    if changed:
        lines.append(f"{len(changed)} functions have other code than in the installed release. To be read:")
        lines += [f"  {row['kind']:<8}  {row['name']}  ({row['used by']})" for row in changed]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
