"""The scripts that set up, test and start Hearth, and the locks they install: what must hold without a network."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))


def scripts() -> list[Path]:
    return [
        path
        for path in [*(ROOT / "scripts").rglob("*"), ROOT / ".ci" / "run"]
        if path.is_file() and path.suffix in {"", ".py"}
    ]


def shell_scripts() -> list[Path]:
    return [path for path in scripts() if path.read_bytes().startswith(b"#!/usr/bin/env bash\n")]


def pins(lock: Path) -> list[Requirement]:
    return [Requirement(line) for line in lock.read_text().splitlines() if line and not line.startswith("#")]


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("script", shell_scripts(), ids=lambda path: path.name)
def test_every_shell_script_parses_and_can_be_run_by_its_bare_name(script: Path):
    assert run("bash", "-n", script).stderr == ""
    assert os.access(script, os.X_OK)
    assert script.suffix == ""
    assert "set -" in script.read_text()


def test_ci_runs_the_checks_and_the_tests_and_fails_when_either_fails(tmp_path: Path):
    (tmp_path / "scripts").mkdir()
    test = (
        'part=$1; case "$*" in *" tests/server/life "*) part=own ;; esac\n'
        'case "$*" in *--last-failed*) echo "again: $part"; exit "$AGAIN" ;; esac\n'
        'echo "$part"; case "$part" in fast) exit "$FAST" ;; own) exit "$OWN" ;; esac; exit "$ENGINES"'
    )
    for name, text in (("check", 'echo check; exit "$CHECK"'), ("test", test)):
        script = tmp_path / "scripts" / name
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    (tmp_path / ".ci").mkdir()
    ci = tmp_path / ".ci" / "run"
    ci.write_bytes((ROOT / ".ci" / "run").read_bytes())
    for check, engines, fast, own, tried, expected, said in (
        ("0", "0", "0", "0", "9", 0, "engines fast own"),
        ("1", "0", "0", "0", "9", 1, "engines fast own"),
        ("0", "5", "0", "0", "0", 1, "engines fast own"),  # not that tests failed: nothing could be run
        ("0", "0", "5", "0", "0", 1, "engines fast own"),
        ("0", "0", "0", "5", "0", 1, "engines fast own"),
        ("0", "1", "0", "0", "0", 0, "engines again: engines fast own"),
        ("0", "0", "1", "0", "0", 0, "engines fast again: fast own"),
        ("0", "0", "0", "1", "0", 0, "engines fast own again: own"),
        ("1", "1", "0", "0", "0", 1, "engines again: engines fast own"),
        ("0", "1", "0", "0", "1", 1, "engines again: engines fast own"),
        ("0", "0", "1", "0", "1", 1, "engines fast again: fast own"),
        ("0", "0", "0", "1", "1", 1, "engines fast own again: own"),
    ):
        result = run("bash", ci, CHECK=check, ENGINES=engines, FAST=fast, OWN=own, AGAIN=tried)
        assert (" ".join(result.stdout.split()), result.returncode) == (f"check {said}", expected)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_names_exact_versions_and_no_address(lock: Path):
    assert "://" not in lock.read_text()
    assert not [str(pin) for pin in pins(lock) if [one.operator.rstrip("=") for one in pin.specifier] != [""]]
    assert not [str(pin) for pin in pins(lock) if pin.url or "*" in str(pin.specifier)]


def test_the_locks_meet_what_pyproject_asks_for():
    """Fails when a dependency was changed by hand and scripts/lock was not run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    plain, extras, groups = (
        project["project"]["dependencies"],
        project["project"]["optional-dependencies"],
        project["dependency-groups"],
    )
    for locks, wanted in (
        (["cpu"], plain + extras["cpu"]),
        (["cuda"], plain + extras["cuda"]),
        (["cpu", "test"], groups["test"] + groups["dev"]),
    ):
        assert list(unmet(wanted, locks)) == []


def unmet(wanted: list[str], locks: list[str]) -> Iterator[str]:
    there = {
        canonicalize_name(pin.name): str(pin.specifier).lstrip("=")
        for name in locks
        for pin in pins(ROOT / "requirements" / f"{name}.lock")
    }
    for requirement in map(Requirement, wanted):
        version = there.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement} asked for, {version} in {locks}"


def test_no_package_index_is_named_outside_the_scripts_that_need_one():
    address = re.compile(r"https?://[^\s'\"]*(?:pypi|simple|whl|wheels)[^\s'\"]*")
    found = {path.name: set(address.findall(path.read_text())) for path in scripts()}
    expected = {"https://download.pytorch.org/whl/cpu"}  # PyPI has no CPU build of torch
    assert {name: addresses for name, addresses in found.items() if addresses} == {"setup": expected, "lock": expected}


def test_a_second_set_up_has_nothing_to_do():
    stamp = ROOT / ".venv" / "hearth-setup"
    if not stamp.exists() or run("scripts/setup", "--check").returncode:
        pytest.skip(".venv was not made by scripts/setup, or pyproject.toml or a lock changed since")
    before = stamp.stat().st_mtime_ns
    assert "Nothing to do" in run("scripts/setup").stdout
    assert run("scripts/setup", "--quiet").stdout == ""
    assert stamp.stat().st_mtime_ns == before


@pytest.mark.parametrize("script", ["setup", "install/find-python"])
def test_a_python_that_cannot_be_used_is_named_with_what_to_do_next(script: str, tmp_path: Path):
    (tmp_path / "scripts" / "install").mkdir(parents=True)
    for name in ("setup", "install/find-python"):
        copy = tmp_path / "scripts" / name
        copy.write_bytes((ROOT / "scripts" / name).read_bytes())
        copy.chmod(0o755)
    result = run(tmp_path / "scripts" / script, HEARTH_PYTHON="/usr/bin/false")
    assert result.returncode == 1
    assert "HEARTH_PYTHON=/usr/bin/false cannot be used" in result.stderr
    assert "apt-get install" in result.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("answer", "message"),
    [("no-venv 3.12", "apt-get install python3.12 python3.12-venv"), ("old-or-new 3.9", "(Python 3.9)")],
)
def test_a_python_of_the_wrong_version_or_without_venv_is_told_apart(answer: str, message: str, tmp_path: Path):
    python = tmp_path / "a python"
    python.write_text(f"#!/bin/sh\necho '{answer}' >&2\nexit 1\n")
    python.chmod(0o755)
    result = run("scripts/install/find-python", HEARTH_PYTHON=str(python))
    assert result.returncode == 1
    assert message in result.stderr


def test_the_python_that_runs_the_tests_can_be_found_for_a_new_venv():
    result = run("scripts/install/find-python", HEARTH_PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).resolve() == Path(sys.executable).resolve()
    assert ".venv" not in result.stdout


def test_set_up_says_how_many_files_are_compiled(tmp_path: Path):
    for name in (".venv/lib/a.py", ".venv/lib/a.pyc", "engine/b.py", "server/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    text = (ROOT / "scripts/setup").read_text()
    progress = text[text.index("progress() {") : text.index("\n}\n", text.index("progress() {")) + 3]
    script = f"{progress}\nsources=3\nprogress 1 0"
    told = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout == ": 1 of about 3 files\n"


def test_set_up_refuses_a_flag_that_it_does_not_know():
    result = run("scripts/setup", "--gpu")
    assert result.returncode == 2
    assert "--cpu|--cuda" in result.stderr


def test_a_lock_keeps_only_what_linux_needs(tmp_path: Path):
    resolved = tmp_path / "resolved"
    resolved.write_text(
        "colorama==0.4 ; sys_platform == 'win32'\n"
        "numpy==2.3 ; python_full_version < '3.13'\n"
        "uvloop==1.0 ; sys_platform != 'win32'\n"
        "attrs==26.1\n"
    )
    other = tmp_path / "other"
    other.write_text("attrs==26.1\n")
    result = run(sys.executable, "scripts/install/tidy-lock", resolved, other)
    assert result.stdout.splitlines()[1:] == ["numpy==2.3 ; python_full_version < '3.13'", "uvloop==1.0"]


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        ("echo 'NVIDIA GeForce RTX 4090, 570.86.10, 8.9'", 1, "The driver is 570.86.10, and 580 or newer is needed"),
        ("echo 'NVIDIA GeForce RTX 4090, 580.65.06, 8.9'", 0, "RTX 4090: driver 580.65.06, compute capability 8.9"),
        ("echo 'Tesla T4, 590.1, 7.5'", 0, "only SDXL and the demos run on it"),
        ("echo 'Failed to initialize NVML'; exit 9", 1, "driver does not answer (Failed to initialize NVML)"),
        ("echo 'No devices were found'", 1, "nvidia-smi lists no GPU with a driver: No devices were found"),
        ("echo 'GRID V100D-8Q, 580.65, [N/A]'", 0, "GRID V100D-8Q: driver 580.65"),
        (None, 1, "nvidia-smi is not here: there is no NVIDIA GPU, or no driver"),
    ],
)
def test_gpu_and_driver_are_looked_at_before_anything_is_installed(
    tmp_path: Path, answer: str | None, status: int, said: str
):
    """What NVIDIA's tool says is put in its place: no test machine has all of these."""
    for name in ("bash", "env", "dirname", "head", "df", "awk"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    if answer is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    result = run("scripts/check-gpu", PATH=str(tmp_path))
    assert said in result.stderr
    assert result.returncode == status


def test_torchvision_loads_beside_the_torch_that_is_here():
    """PyPI's is built for CUDA: without scripts/install/torchvision_for_cpu.py its import fails beside a CPU torch."""
    program = (
        "import torch, torchvision\n"
        "from torchvision.transforms.v2 import functional\n"
        "from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor\n"
        "print(tuple(functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape))\n"
    )
    result = run(sys.executable, "-W", "ignore", "-c", program)
    assert result.stdout == "(3, 4, 4)\n", result.stderr
