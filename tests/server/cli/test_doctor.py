"""The checks of `hearth doctor` on machines and files of all kinds. Its requests are in test_status_live.py."""

import json
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tls_pair import make_pair
from typer.testing import CliRunner
from weight_parts import NAME, REPOSITORY, model_files

from engine.config import load_config
from engine.placement.hardware import Cuda, Gpu, Holder, imagined, read_cuda
from engine.weights.manifest import Manifest, ModelFile, write_manifest
from server.cli import app
from server.cli.doctor import checks
from server.cli.doctor.checks import Case, Finding, case_of, weights
from server.settings import load_settings
from server.terminal import HEARTH

YAML = """\
models:
  service-plus:
    task: chat
    tier: standard
    capabilities: [chat]
    weights: mine
    demo: chat
    variants:
      - {folder: tiny-chat, repository: owner/tiny-chat, licence: MIT, weights_gib: 0.01, runs_on: any}
tiers:
  standard: {models: [standard]}
"""
GIB = 2**30


@pytest.fixture
def case(tmp_path: Path) -> Case:
    (tmp_path / "models.yaml").write_text(YAML)
    (tmp_path / "weights").mkdir()
    settings = load_settings(
        data_dir=tmp_path / "data", weights_dir=tmp_path / "weights", models=tmp_path / "models.yaml"
    )
    return case_of(settings, load_config(settings.models), None)


def verdicts(findings: list[Finding]) -> list[str]:
    return [one.verdict for one in findings]


def with_gpu(case: Case, capability: tuple[int, int], cuda: Cuda, *, holders: tuple[Holder, ...] = ()) -> Case:
    free = 24 * GIB - sum(one.used_bytes or 0 for one in holders)
    gpu = Gpu(0, "Card", 24 * GIB, free, capability, holders)
    return replace(case, hardware=replace(imagined("cpu"), gpus=(gpu,), driver="600.1"), cuda=cuda, on_cpu_build=False)


def test_a_gpu_with_its_driver_and_build_is_well(case: Case):
    one = with_gpu(case, (8, 9), Cuda((13, 1), (13, 2)))
    gpu, cuda = *checks.gpu(one), *checks.cuda(one)
    assert (gpu.verdict, cuda.verdict) == ("ok", "ok")
    assert gpu.message == "GPU 0, Card, 24.0 GiB, compute capability 8.9, driver 600.1 for CUDA 13.1"


def test_a_driver_older_than_torchs_cuda_is_a_problem_with_a_remedy(case: Case):
    (cuda,) = checks.cuda(with_gpu(case, (8, 9), Cuda((12, 8), (13, 0))))
    assert cuda.verdict == "problem"
    assert cuda.message == "torch is built for CUDA 13.0, the driver supports up to CUDA 12.8"
    assert cuda.remedy is not None
    assert "a driver for CUDA 13" in cuda.remedy


def test_a_gpu_too_old_for_the_build_is_a_problem(case: Case):
    (old,) = checks.gpu(with_gpu(case, (7, 0), Cuda((13, 0), (13, 0))))
    assert old.verdict == "problem"
    assert "7.0; this build needs 7.5" in old.message
    assert verdicts(list(checks.gpu(with_gpu(case, (7, 0), Cuda((12, 8), (12, 8)))))) == ["ok"]


def test_who_else_holds_memory_of_a_gpu_is_named(case: Case):
    ours, theirs = Holder(1, "hearth", 4 * GIB, ours=True), Holder(9, "game", 6 * GIB)
    found = list(checks.gpu(with_gpu(case, (8, 9), Cuda((13, 0), (13, 0)), holders=(ours, theirs))))
    assert verdicts(found) == ["ok", "warning"]
    assert "6.0 GiB of GPU 0 are taken by others: game (process 9)" in found[1].message


def test_a_build_for_the_other_kind_of_machine_is_a_problem(case: Case):
    on_gpu = replace(with_gpu(case, (8, 9), Cuda()), on_cpu_build=True)
    assert [one.remedy for one in checks.gpu(on_gpu)] == ["./scripts/setup --cuda"]
    without = replace(case, hardware=replace(imagined("cpu"), problem="no driver"), on_cpu_build=False)
    assert verdicts(list(checks.gpu(without))) == ["problem"]


def test_the_installed_torch_says_its_cuda_without_being_loaded():
    assert read_cuda().torch is None or read_cuda().torch > (11, 0)


def test_memory_that_is_too_small_comes_with_the_change_that_would_do(case: Case):
    text = YAML.replace("    demo: chat\n", "").replace("weights_gib: 0.01", "weights_gib: 4000")
    case.settings.models.write_text(text)
    found = next(iter(checks.memory(case_of(case.settings, load_config(case.settings.models), None))))
    assert found.verdict == "problem"
    assert "tiny-chat, its smallest, needs 4001" in found.message
    assert found.remedy


def test_more_ram_than_there_is_cannot_be_given_to_models(case: Case):
    settings = case.settings.model_copy(update={"ram_gib": 10_000.0})
    *_, found = checks.memory(replace(case, settings=settings, hardware=imagined("cpu", ram_gib=10)))
    assert (found.verdict, found.remedy) == ("problem", "HEARTH_RAM_GIB=9, or leave it out")


def test_a_disk_below_its_reserve_is_a_warning_that_says_what_is_refused(case: Case):
    settings = case.settings.model_copy(update={"disk_reserve_gib": 2**20})
    data, _ = checks.disk(replace(case, settings=settings))
    assert (data.verdict, "files and recordings are refused" in data.message) == ("warning", True)
    settings = case.settings.model_copy(update={"disk_reserve_gib": 0})
    assert "refused" not in next(checks.disk(replace(case, settings=settings))).message


def test_a_port_that_is_taken_is_a_problem(case: Case):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = case.settings.model_copy(update={"port": other.getsockname()[1]})
        (found,) = checks.port(replace(case, settings=taken))
    assert found.verdict == "problem"
    assert found.remedy is not None
    assert "HEARTH_PORT" in found.remedy
    assert verdicts(list(checks.port(replace(case, settings=taken)))) == ["ok"]


def test_a_clock_of_before_the_installation_is_wrong(case: Case):
    assert verdicts(list(checks.clock(replace(case, now=0.0)))) == ["problem"]
    assert verdicts(list(checks.clock(case))) == ["ok"]


@pytest.mark.parametrize(
    ("changes", "verdict", "told"),
    [
        ({"host": "192.0.2.7"}, "warning", "without HTTPS"),
        ({"cors_origins": ("*",)}, "warning", "every web page"),
        ({"max_body_bytes": 2**20}, "warning", "HEARTH_MAX_BODY_BYTES=1048576"),
        ({}, "ok", "HEARTH_DRAIN_SECONDS"),
    ],
)
def test_settings_that_do_not_go_together_are_named(changes, verdict, told, case: Case):
    given = load_settings(data_dir=case.settings.data_dir, drain_seconds=5.0, **changes)
    found = list(checks.settings(replace(case, settings=given)))
    assert verdicts(found) == [verdict]
    assert told in found[0].message


def test_secrets_that_others_may_read_are_a_problem_with_the_command_that_mends_it(case: Case):
    data = case.settings.data_dir
    assert verdicts(list(checks.rights(case))) == ["ok"]
    data.mkdir(mode=0o700)
    (data / "hearth.db").touch(mode=0o600)
    assert verdicts(list(checks.rights(case))) == ["ok"]
    data.chmod(0o755)
    (data / "hearth.db").chmod(0o644)
    case.settings.models.chmod(0o666)
    found = list(checks.rights(case))
    assert verdicts(found) == ["problem"] * 3
    assert [one.remedy for one in found] == [
        f"chmod 700 {data}",
        f"chmod 600 {data / 'hearth.db'}",
        f"chmod o-w {case.settings.models}",
    ]


def test_a_damaged_database_is_a_problem_and_stays_as_it_is(case: Case):
    assert verdicts(list(checks.database(case))) == ["ok"]
    assert not case.settings.data_dir.exists()
    case.settings.data_dir.mkdir()
    (case.settings.data_dir / "hearth.db").write_bytes(b"not a database at all" * 99)
    (found,) = checks.database(case)
    assert found.verdict == "problem"
    assert "is not a SQLite database" in found.message
    assert (case.settings.data_dir / "hearth.db").read_bytes() == b"not a database at all" * 99


def test_the_end_of_a_certificate_is_read_and_told_in_time(tmp_path: Path):
    pair = make_pair(tmp_path)  # for a day
    given = load_settings(tls_cert=pair.cert, tls_key=pair.key)
    (soon,) = checks.certificate(given, time.time())
    assert soon.verdict == "warning"
    assert time.strftime("%Y-%m-%d", time.gmtime(time.time() + 86400)) in soon.message
    (fine,) = checks.certificate(given, time.time() - 60 * 86400)
    assert fine.verdict == "ok"
    pair.cert.write_text("")
    (broken,) = checks.certificate(given, time.time())
    assert broken.verdict == "problem"
    assert list(checks.certificate(load_settings(), time.time())) == []


def test_weights_that_are_missing_half_there_or_damaged_are_told_apart(case: Case):
    (absent,) = weights(case)
    assert (absent.verdict, absent.remedy) == ("warning", f"{HEARTH} weights pull service-plus")
    folder = case.settings.weights_dir / NAME
    folder.mkdir()
    for name, content in model_files().items():
        (folder / name).write_bytes(content)
    files = tuple(
        ModelFile(path=name, size_bytes=len(content), sha256="0" * 64) for name, content in model_files().items()
    )
    write_manifest(folder, Manifest(repository=REPOSITORY, revision="a" * 40, files=files))
    assert [one.message for one in weights(case)] == ["service-plus: tiny-chat is complete"]
    *_, hashed = weights(replace(case, full=True))
    assert hashed.verdict == "problem"
    assert "its content has changed" in hashed.message
    next(folder.glob("*.safetensors")).unlink()
    demo, damaged = weights(case)
    assert (demo.verdict, damaged.verdict) == ("warning", "problem")
    assert damaged.remedy == f"{HEARTH} weights pull {NAME} --again, or import it again"


def test_a_folder_of_ones_own_that_cannot_be_loaded_is_a_problem(case: Case):
    own = case.settings.weights_dir / "mine"
    own.mkdir()
    (own / "config.json").write_text('{"auto_map": {}}')
    (found,) = weights(case)
    assert found.verdict == "problem"
    assert "auto_map" in found.message


def doctor(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> tuple[int, dict[str, object]]:
    options = ["--data-dir", str(folder / "data"), "--weights-dir", str(folder / "weights"), "--json"]
    done = CliRunner().invoke(app, ["doctor", *options, *arguments], env=environment or {})
    return done.exit_code, json.loads(done.stdout)


def test_without_a_server_all_else_is_looked_at(case: Case, tmp_path: Path):
    _, told = doctor(tmp_path, "--models", str(case.settings.models))
    areas = [one["area"] for one in told["findings"]]
    assert set(areas) == {
        "models", "server", "settings", "rights", "database", "gpu", "memory", "disk", "port", "clock", "weights", "self-test",
    }  # fmt: skip
    assert told["findings"][-1]["verdict"] == "skipped"
    assert "scripts/serve" in told["findings"][-1]["remedy"]


@pytest.mark.parametrize(
    ("environment", "text", "told"),
    [
        ({"HEARTH_PROT": "1"}, YAML, "did you mean HEARTH_PORT?"),
        ({}, YAML.replace("tier: standard", "tier: nothing"), "nothing"),
        ({}, "models: [", "models.yaml"),
    ],
)
def test_settings_and_models_that_cannot_be_read_are_the_problem(environment, text, told, case: Case, tmp_path: Path):
    case.settings.models.write_text(text)
    code, found = doctor(tmp_path, "--models", str(case.settings.models), environment=environment)
    assert code == 1
    assert found["well"] is False
    assert any(told in one["message"] for one in found["findings"] if one["verdict"] == "problem")


def test_with_a_broken_models_yaml_all_that_does_not_need_it_is_looked_at(case: Case, tmp_path: Path):
    case.settings.models.write_text("models: [")
    _, found = doctor(tmp_path, "--models", str(case.settings.models))
    verdict = {one["area"]: one["verdict"] for one in found["findings"]}
    assert verdict["models"] == "problem"
    assert {"settings", "rights", "database", "gpu", "disk", "port", "clock"} <= verdict.keys()
    assert {area for area, said in verdict.items() if said == "skipped"} == {"server", "memory", "weights", "self-test"}


def test_who_has_lost_its_demo_is_offered_it_back(case: Case):
    case.settings.models.write_text(YAML.replace("    demo: chat\n", ""))
    (found,) = weights(case_of(case.settings, load_config(case.settings.models), None))
    assert found.verdict == "problem"
    assert found.remedy is not None
    assert found.remedy.startswith(f"{HEARTH} weights pull service-plus")
    assert "`demo: chat` in models.yaml" in found.remedy


def test_one_problem_is_counted_as_one(case: Case, tmp_path: Path):
    case.settings.models.write_text("models: [")
    folders = ["--data-dir", str(tmp_path / "data"), "--weights-dir", str(tmp_path / "weights")]
    done = CliRunner().invoke(app, ["doctor", *folders, "--models", str(case.settings.models)])
    assert "\n1 problem, " in done.stdout
