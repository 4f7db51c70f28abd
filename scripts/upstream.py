"""Compares models.yaml's variants with the model hub, and our use of vLLM with a release of vLLM.

`python -m upstream refresh-variants` and `python -m upstream check-vllm` are behind the scripts with these names.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.backends.vllm.compat import NAMES
from engine.compat import Sources, missing
from engine.config import load_config
from engine.config.models import VariantSpec
from engine.errors import EngineError
from engine.placement.hardware import GIB
from engine.placement.needs import ContextNeeds
from engine.weights.download import Pull, Wanted, prepared
from engine.weights.manifest import silent

ROOT = Path(__file__).parents[1]
# Part of the stated value: smaller differences are not reported.
_TOLERANCE = 0.02
_OTHER_CODE = "has other code"


@dataclass(frozen=True)
class Found:
    """What the hub says of one variant. Sizes are in GiB; `needs` only for chat models."""

    revision: str
    weights_gib: float
    download_gib: float
    licence: str | None
    is_gated: bool
    needs: ContextNeeds | None


def refresh_variants(arguments: list[str]) -> int:
    """Compares the variants of models.yaml with what the model hub says of their repositories.

    Only the list of files and the small configurations are fetched, never the weights. Each difference is a line, and
    the exit code is 1: a commit newer than the pinned one, another size, licence or KV cache, a gate.
    """
    about = (refresh_variants.__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="scripts/refresh-variants", description=about)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="folders of variants; default: all")
    parser.add_argument("--models", type=Path, default=ROOT / "models.yaml", help="another models.yaml")
    parser.add_argument("--endpoint", help="another hub, like a mirror; default: HF_ENDPOINT")
    given = parser.parse_args(arguments)
    variants = [variant for spec in load_config(given.models).models.values() for variant in spec.variants]
    wanted = [each for each in variants if each.repository and (not given.variants or each.id in given.variants)]
    problems = [f"{name}: no such variant with a repository" for name in set(given.variants) - {v.id for v in wanted}]
    for variant in wanted:
        try:
            found = look_up(variant, given.endpoint)
        except EngineError as error:
            problems.append(f"{variant.id}: {error.message}")
            continue
        problems += [f"{variant.id}: {problem}" for problem in problems_of(variant, found)]
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


def look_up(variant: VariantSpec, endpoint: str | None = None) -> Found:
    """Ask the hub. Raises `EngineError`."""
    from huggingface_hub import HfApi

    assert variant.repository is not None  # noqa: S101  # only such are looked up
    with tempfile.TemporaryDirectory() as folder:
        wanted = Wanted(variant.repository, "looked-up", endpoint=endpoint)
        with prepared(Path(folder), wanted, silent) as pull:
            assert isinstance(pull, Pull)  # noqa: S101  # nothing is in a new folder
            weights = sum(file.size_bytes for file in pull.files if file.path.endswith(".safetensors"))
            download = sum(file.size_bytes for file in pull.files)
            hub = HfApi(endpoint=endpoint, library_name="hearth")
            info = hub.model_info(variant.repository, revision=pull.listing.revision)
            return Found(
                revision=pull.listing.revision,
                weights_gib=weights / GIB,
                download_gib=download / GIB,
                licence=getattr(info.card_data, "license", None) if info.card_data else None,
                is_gated=bool(info.gated),
                needs=ContextNeeds.read(pull.model),
            )


def problems_of(variant: VariantSpec, found: Found) -> Iterator[str]:
    """Yield how the hub differs from what models.yaml says."""
    said = re.sub(r"[^a-z0-9]", "", variant.licence.lower())
    if found.is_gated:
        yield "its repository is gated: who pulls it has to accept terms first"
    if found.licence is None:
        yield "its model card names no licence"
    elif re.sub(r"[^a-z0-9]", "", found.licence.lower()) != said:
        yield f"its model card says licence {found.licence!r}, models.yaml {variant.licence!r}"
    if variant.revision not in {None, found.revision}:
        yield f"its newest commit is {found.revision}, models.yaml says {variant.revision}"
    needs = found.needs
    pairs = [("download_gib", variant.fetched_gib, found.download_gib)]
    if needs is not None:
        pairs = [
            ("weights_gib", variant.weights_gib, found.weights_gib),
            ("kv_kib_per_token", variant.kv_kib_per_token, needs.token_bytes / 1024),
            ("kv_heads", variant.kv_heads or needs.kv_heads, needs.kv_heads),
            ("state_mib_per_chat", variant.state_mib_per_chat, needs.state_bytes / 2**20),
            ("max_context_length", variant.max_context_length or needs.positions, needs.positions),
            ("sliding_window", variant.sliding_window or 0, needs.window or 0),
        ]
    for key, here, there in pairs:
        if abs(here - there) > _TOLERANCE * max(here, there):
            yield f"{key} comes to {there:g}, models.yaml says {here:g}"


def check_vllm(arguments: list[str]) -> int:
    """What a release of vLLM would break: its wheel is fetched and read, neither installed nor run.

    It checks the names of engine/backends/vllm/compat.py, what our files import of vLLM, and which functions that ours
    replace or call have other code than in the installed release, to be read by a person.
    """
    parser = argparse.ArgumentParser(prog="scripts/check-vllm", description=check_vllm.__doc__)
    parser.add_argument("version", help="a release, like 0.33.0, or the path of a wheel")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hearth-check-vllm-") as folder:
        rows = findings(sources_of(asked.version, Path(folder)))
    print(
        json.dumps({"version": asked.version, "findings": rows}, indent=2) if asked.json else table(asked.version, rows)
    )
    return int(any(row["kind"] == "needed" and row["problem"] != _OTHER_CODE for row in rows))


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
    """List what is gone or changed, needed names first."""
    found = [(each.name, each.kind, problem, each.patch, each.without) for each, problem in missing(NAMES, sources)]
    optional = {each.name for each in NAMES if each.kind == "optional"}
    found += [
        (name, "needed", "is gone", file, f"{file} cannot be imported.")
        for name, file in imported(sorted((ROOT / "engine").rglob("*.py"))).items()
        if name not in optional and sources.find(name) is None
    ]
    installed = Sources()
    found += [
        (each.name, each.kind, _OTHER_CODE, each.patch, "To be read.")
        for each in {each.name: each for each in NAMES if each.name.startswith("vllm.")}.values()
        if "" not in (codes := {_code(installed.find(each.name)), _code(sources.find(each.name))}) and len(codes) == 2
    ]
    rows = [dict(zip(("name", "kind", "problem", "used by", "without"), one, strict=True)) for one in found]
    return sorted(rows, key=lambda row: (row["problem"] == _OTHER_CODE, row["kind"] != "needed", row["name"]))


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
    """Return a function's code without docstrings, comments and layout; empty if it is not a function."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    for node in ast.walk(function):
        match getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant()), _, *_] as body:
                del body[0]
    return ast.dump(function)


def table(version: str, rows: list[dict[str, Any]]) -> str:
    broken = [row for row in rows if row["problem"] != _OTHER_CODE]
    changed = [row for row in rows if row["problem"] == _OTHER_CODE]
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
    name, *given = sys.argv[1:]
    try:
        sys.exit({"refresh-variants": refresh_variants, "check-vllm": check_vllm}[name](given))
    except subprocess.CalledProcessError:
        sys.exit("pip could not fetch it, and says why above.")
    except OSError as error:
        sys.exit(str(error))
