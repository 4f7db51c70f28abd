"""What our code takes of other people's packages without a promise is listed, and is there as we count on it."""

import gc
import logging
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from engine import compat
from engine.backends.vllm import compat as vllm_compat
from engine.compat import ForeignName, Sources
from engine.errors import LoadError
from server.http import compat as http_compat

ROOT = Path(__file__).parents[4]
ALL = [*vllm_compat.NAMES, *http_compat.NAMES]
LISTS = {ROOT / "engine" / "backends" / "vllm" / "compat.py", ROOT / "server" / "http" / "compat.py"}
# Private names on lines that ruff was told to leave alone, which are not of the packages that the two lists are about.
ELSEWHERE = {
    "_catalogues",  # our own, engine/voices/catalogue.py
    "_attn_implementation",  # transformers, voices of OmniVoice
    *("_private", "_version"),  # Ray Serve, server/cluster/compat.py
    # diffusers' pipelines
    *("_execution_device", "_get_add_time_ids", "_pack_latents", "_unpack_latents", "_unpatchify_latents"),
}
WITHIN = {"_C", "_forkserver"}  # part of the way to a listed name


@pytest.fixture(scope="module")
def installed() -> Sources:
    return Sources()


@pytest.mark.parametrize("patch", sorted({each.patch for each in ALL}))
def test_each_name_is_there_with_the_signature_that_we_count_on(installed: Sources, patch: str) -> None:
    assert compat.missing([each for each in ALL if each.patch == patch], installed) == []


@pytest.mark.parametrize("patch", sorted({each.patch for each in ALL}))
def test_each_name_would_be_missed(installed: Sources, patch: str) -> None:
    names = [each for each in ALL if each.patch == patch]
    gone = [replace(each, name=f"{each.name}_of_another_release") for each in names]
    assert [problem for _, problem in compat.missing(gone, installed)] == ["is gone"] * len(names)


def test_each_name_is_used_by_our_code() -> None:
    words = {word for file in our_files() for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    assert [each.name for each in ALL if each.name.rpartition(".")[2] not in words] == []


def test_each_private_name_that_is_used_is_listed() -> None:
    listed = {part for each in ALL for part in each.name.split(".")} | ELSEWHERE | WITHIN
    found = {}
    for file in our_files():
        for line in file.read_text(encoding="utf-8").splitlines():
            code, _, comment = line.partition("#")
            names = re.findall(r"(?<!self)\._(?!_)\w+", code) if "SLF001" in comment else []
            if re.match(r"\s*(from (?!engine|server)|import )", code):
                names += re.findall(r"(?<=[ .,])_[a-zA-Z]\w*", code)
            found |= {name.lstrip("."): file.name for name in names if name.lstrip(".") not in listed}
    assert found == {}


def our_files() -> list[Path]:
    folders = [ROOT / "engine", ROOT / "server"]
    return [file for folder in folders for file in sorted(folder.rglob("*.py")) if file not in LISTS]


def test_a_name_says_why_it_is_used_and_what_happens_without_it() -> None:
    assert all(each.why and each.since and each.without.endswith(".") for each in ALL)
    assert {each.kind for each in vllm_compat.NAMES if each.name == "torch.cpu._init_amx"} == {"optional"}
    assert {each.kind for each in http_compat.NAMES} == {"needed"}


@pytest.fixture
def package(tmp_path: Path) -> Sources:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .inner import Child as Renamed\nfrom theirs.inner import *\n")
    (folder / "inner.py").write_text(
        "import dataclasses\n"
        "class Parent:\n"
        "    def __init__(self):\n        self.place, self.other = 1, 2\n"
        "    def move(self, where, *, far=False): ...\n"
        "class Child(Parent):\n    kind: str = 'child'\n"
        "try:\n    import quick\nexcept ImportError:\n    quick = None\n"
        "@dataclasses.dataclass\nclass Settings:\n    size: int\n    name: str = ''\n"
    )
    return Sources({"theirs": folder})


@pytest.mark.parametrize(
    "name", ["inner.Child.place", "inner.Child.other", "Renamed.move", "Child.kind", "Settings.size", "inner.quick"]
)
def test_inherited_imported_and_assigned_names_are_found(package: Sources, name: str) -> None:
    assert package.find(f"theirs.{name}") is not None


@pytest.fixture
def collector_that_yields() -> Iterator[None]:
    """Other threads run whenever the garbage collector does, which is often."""
    before = gc.get_threshold()

    def let_others_run(*_: object) -> None:
        time.sleep(0)

    gc.set_threshold(20, 1000, 1000)
    gc.callbacks.append(let_others_run)
    yield
    gc.callbacks.remove(let_others_run)
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collector_that_yields")
def test_two_models_that_start_read_sources_at_the_same_time(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("\n".join(f"def f{number}(a, b): return a + b" for number in range(60)))

    def read(depth: int) -> bool:
        return read(depth - 1) if depth else Sources({"theirs": tmp_path}).find("theirs.f0") is not None

    with ThreadPoolExecutor(2) as starters:
        assert all(starters.map(read, [0, 7] * 200))


@pytest.mark.parametrize(
    ("name", "parameters", "overridden", "problem"),
    [
        ("inner.Child.move", ("where",), False, None),
        ("inner.Child.move", ("where", "far"), True, None),
        ("inner.Child.move", ("where",), True, "takes far as well"),
        ("Renamed.move", ("far",), False, "takes where as well"),
        ("Renamed.move", ("where", "fast"), False, "no longer takes fast"),
        ("Settings", ("size", "name"), False, None),
        ("Settings", ("name",), False, "takes size as well"),
        ("inner.Child.kind", (), False, "is not a function any more"),
        ("inner.Child.stay", (), False, "is gone"),
    ],
)
def test_another_signature_is_noticed(
    package: Sources, name: str, parameters: tuple[str, ...], *, overridden: bool, problem: str | None
) -> None:
    entry = ForeignName(f"theirs.{name}", "needed", "test", "", "1", "", parameters, overridden)
    assert [found for _, found in compat.missing([entry], package)] == ([] if problem is None else [problem])


@pytest.mark.parametrize("error", [ImportError("gone"), AttributeError("gone"), TypeError("another signature")])
def test_an_optional_patch_that_does_not_fit_is_left_out_with_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def change() -> None:
        raise error

    with caplog.at_level(logging.WARNING, "hearth.vllm"):
        assert vllm_compat.apply("fork server", change) is None
    (line,) = caplog.messages
    assert "fork server" in line
    assert str(error) in line


def test_an_error_of_our_own_is_not_taken_for_a_name_that_is_gone() -> None:
    with pytest.raises(ZeroDivisionError):
        vllm_compat.apply("fork server", lambda: 1 / 0)


def test_a_vllm_without_a_needed_name_is_refused_by_that_name(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    code = (
        "from engine.backends.vllm import compat as vllm_compat\nfrom engine.errors import LoadError\n"
        "try:\n    vllm_compat.check('plus')\nexcept LoadError as error:\n    print(error)"
    )
    path = f"{tmp_path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert "plus" in done.stdout
    assert "AsyncLLM._run_output_handler is gone" in done.stdout
    assert issubclass(LoadError, Exception)


def test_check_vllm_lists_what_is_gone_and_ends_with_1_when_it_is_needed(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-99.0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    done = check_vllm(str(wheel))
    assert done.returncode == 1, done.stderr
    assert re.search(r"needed +vllm\.v1\.engine\.async_llm\.AsyncLLM\._run_output_handler is gone", done.stdout)
    assert re.search(r"optional +vllm\.envs\.enable_envs_cache is gone", done.stdout)


def check_vllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "upstream", "check-vllm", *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        capture_output=True,
        text=True,
        check=False,
    )
