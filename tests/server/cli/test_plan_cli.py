"""`hearth plan` on the command line: its table, its JSON, and how it refuses."""

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.weights.manifest import Manifest, ModelFile, write_manifest
from server.cli import app
from server.instance import only_one
from server.terminal import HEARTH

YAML = """\
models:
  large:
    task: chat
    tier: standard
    capabilities: [chat]
    weights: large
    variants:
      - {folder: x, licence: MIT, weights_gib: 40, activations_gib: 1, repository: a/b}
tiers:
  standard: {models: [standard]}
"""


@pytest.fixture
def run(tmp_path: Path):
    (tmp_path / "models.yaml").write_text(YAML)
    folders = ["--weights-dir", str(tmp_path), "--data-dir", str(tmp_path), "--models", str(tmp_path / "models.yaml")]
    return lambda *arguments: CliRunner().invoke(app, ["plan", *folders, *arguments])


def test_what_does_not_fit_is_refused_with_exit_code_1_the_numbers_and_a_change(run):
    refused = run("--gpus", "1x24GiB")
    assert refused.exit_code == 1
    assert "large: x, its smallest, needs 41.0 GiB on one GPU; there are 22.8 GiB of 24.0 GiB" in refused.stdout
    assert "Smallest change: a GPU of 48 GiB." in refused.stdout


def test_as_json_it_is_one_object_with_sizes_in_bytes(run):
    (model,) = json.loads(run("--gpus", "1x48GiB", "--json").stdout)["models"]
    assert (model["id"], model["variant"], model["state"], model["gpus"]) == ("large", "x", "resident", [0])
    assert model["weights_bytes_per_device"] == 40 * 2**30
    told = json.loads(run("--gpus", "1x24GiB", "--json").stdout)
    assert (told["fits"], told["models"], told["needed_bytes"]) == (False, ["large"], 41 * 2**30)


@pytest.mark.parametrize("arguments", [("--gpus", "two"), ("--gpus", "0x8GiB"), ("--ram", "8")])
def test_what_is_no_machine_is_a_wrong_argument(run, arguments):
    wrong = run(*arguments)
    assert wrong.exit_code == 2
    assert wrong.stdout == ""


def test_this_machine_can_be_planned_for_with_or_without_gpus(run):
    assert run().exit_code in {0, 1}


SMALL = """\
models:
  chatty:
    task: chat
    tier: standard
    capabilities: [chat]
    weights: chatty
    demo: chat
    replicas: 1
    variants:
      - {folder: good, licence: MIT, weights_gib: 0.3, runs_on: any, repository: a/good}
      - {folder: little, licence: MIT, weights_gib: 0.1, runs_on: any, repository: a/little}
  spoken:
    task: speech
    tier: standard
    capabilities: [speech]
    weights: voices
    demo: voices
    variants:
      - {folder: voices/kokoro, licence: MIT, weights_gib: 0.1, runs_on: cpu}
tiers:
  standard: {models: [standard]}
"""


def test_what_is_not_here_is_said_with_sizes_and_the_command_that_fetches_it(run, tmp_path: Path):
    (tmp_path / "models.yaml").write_text(SMALL)
    said = run("--gpus", "2x24GiB").stdout
    assert "to be fetched: about 0.3 GiB in all\n  chatty: good, about 0.3 GiB, from a/good\n" in said
    assert f"Fetch it with: {HEARTH} weights pull --gpus 2x24GiB --weights-dir {tmp_path}" in said
    assert (
        f"Not here yet, to be added:\n  spoken: voices/kokoro, with {HEARTH} voices add kokoro --weights-dir {tmp_path}"
        in said
    )
    assert (
        "GPU 1: 0.0 GiB of 22.8 GiB planned, of 24.0 GiB in all (1.2 GiB kept free); nothing is planned on it: it stays idle"
        in said
    )
    with_ram = run("--gpus", "cpu", "--ram", "24").stdout
    assert f"{HEARTH} weights pull good --weights-dir {tmp_path}" in with_ram
    told = json.loads(run("--gpus", "cpu", "--json").stdout)["not_here"]
    assert [(one["model"], one["repository"]) for one in told] == [("chatty", "a/good"), ("spoken", None)]


def test_what_is_preferred_is_an_option_and_a_setting(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entry = (
        "task: chat, tier: standard, capabilities: [chat], variants: ["
        "{{folder: {0}-good, licence: MIT, weights_gib: 14, repository: a/good}}, "
        "{{folder: {0}-little, licence: MIT, weights_gib: 4, repository: a/little}}]"
    )
    models = "".join(f"  {name}: {{weights: {name}, {entry.format(name)}}}\n" for name in ("one", "two"))
    (tmp_path / "models.yaml").write_text(f"models:\n{models}tiers:\n  standard: {{models: [standard]}}\n")
    machine = ("--gpus", "1x24GiB")
    assert "swapped" not in run(*machine).stdout
    asked = run(*machine, "--prefer", "quality").stdout
    assert "swapped" in asked
    assert "weights pull --gpus 1x24GiB --prefer quality" in asked
    monkeypatch.setenv("HEARTH_PREFER", "quality")
    assert "swapped" in run(*machine).stdout
    assert run(*machine, "--prefer", "best").exit_code == 2


def test_voices_that_are_there_need_not_be_put_there(run, tmp_path: Path):
    (tmp_path / "models.yaml").write_text(SMALL)
    (tmp_path / "voices" / "amy").mkdir(parents=True)
    assert "by hand" not in run("--gpus", "cpu").stdout


def test_until_the_best_is_fetched_it_is_said_what_answers(run, tmp_path: Path):
    (tmp_path / "models.yaml").write_text(SMALL)
    assert "from a/good; until then the demo answers" in run().stdout
    put(tmp_path / "little")
    assert "from a/good; until then little answers" in run().stdout
    put(tmp_path / "good")
    assert "to be fetched" not in run().stdout


def put(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    file = ModelFile(path="config.json", size_bytes=2, sha256=hashlib.sha256(b"{}").hexdigest())
    write_manifest(folder, Manifest(repository="a/b", revision="0" * 40, files=(file,)))


def test_what_the_running_server_holds_counts_as_free_and_the_output_says_so(run, tmp_path: Path):
    huge = YAML.replace("weights_gib: 40", "weights_gib: 40000, runs_on: any")
    (tmp_path / "models.yaml").write_text(huge)
    assert "count as free" not in run().stdout
    with only_one(tmp_path):  # this process is the server
        assert "GiB of the running server count as free" in run().stdout
