"""`hearth weights` as people call it: a process of its own, a hub on this machine, kill -9, a full disk, a running server."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, Fault, HubServer
from serving import BIN, ROOT, poll_until, total_bytes
from small_disks import small_disk
from weight_parts import NAME, REPOSITORY, SHARD, model_files, safetensors

from engine.weights.manifest import is_complete, verify

pytestmark = pytest.mark.engine  # many processes, each of which reads half of Hearth first

YAML = """\
models:
  service-plus:
    task: chat
    tier: standard
    capabilities: [chat, streaming]
    weights: service-plus
    demo: chat
    variants:
      - {folder: tiny-chat, repository: owner/tiny-chat, licence: Apache-2.0, weights_gib: 0.01, runs_on: any}
tiers:
  standard: {models: [standard]}
"""
PULL = ("pull", "--repository", REPOSITORY, "--as", NAME)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(REPOSITORY, model_files())
        yield server


class Shelf:
    """A weights directory and the command line on it."""

    def __init__(self, folder: Path, hub: HubServer) -> None:
        self.folder, self.weights, self.data = folder, folder / "weights", folder / "data"
        (folder / "models.yaml").write_text(YAML)
        proxies = {name for name in os.environ if name.lower().endswith("_proxy") or name.startswith("HF_")}
        self.environment = {name: value for name, value in os.environ.items() if name not in proxies} | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(folder / "hf"),
            "HEARTH_WEIGHTS_DIR": str(self.weights),
            "HEARTH_DATA_DIR": str(self.data),
            "HEARTH_MODELS": str(folder / "models.yaml"),
            "COLUMNS": "200",
        }

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        # Where the tests run in the background, a shell has told them to ignore Ctrl-C, and so would their children
        command = ["env", "--default-signal=INT", BIN / "hearth", "weights", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str | Path, code: int = 0, answer: str = "") -> tuple[str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(answer, timeout=120)
        assert process.returncode == code, out + err
        return out, err

    def written(self, name: str) -> int:
        """Bytes of a file that is on its way."""
        return total_bytes((self.weights / ".partial").rglob(name))

    def wait_until_written(self, name: str, size: int) -> None:
        poll_until(lambda: self.written(name) >= size, 60, describe=lambda: f"{self.written(name)} bytes")

    def json(self, *arguments: str | Path) -> dict[str, list[dict[str, object]]]:
        return json.loads(self.run(*arguments, "--json")[0])


@pytest.fixture
def shelf(tmp_path: Path, hub: HubServer) -> Shelf:
    return Shelf(tmp_path, hub)


def test_a_pull_killed_in_mid_file_leaves_nothing_to_load_and_goes_on_where_it_was(hub: HubServer, shelf: Shelf):
    hub.faults[SHARD] = [Fault(hold=1_000_000)]
    process = shelf.start(*PULL)
    shelf.wait_until_written(SHARD, 700_000)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert not (shelf.weights / NAME).exists()
    (listed,) = shelf.json("list")["weights"]
    assert (listed["folder"], listed["state"], listed["repository"]) == (NAME, "partial", REPOSITORY)
    there = shelf.written(SHARD)
    assert there >= 700_000, "what had arrived was written"
    hub.release.set()
    hub.forget_counts()
    (row,) = shelf.json("pull", NAME)["weights"]  # the unfinished pull knows its repository
    assert (row["repository"], row["revision"]) == (REPOSITORY, COMMIT)
    assert verify(shelf.weights / NAME) == []
    whole = len(hub.repositories[REPOSITORY].files[SHARD])
    assert hub.served_bytes[SHARD] == whole - there, "not a byte was fetched twice"
    assert hub.ranges[SHARD] == [f"bytes={there}-{whole - 1}"]


def test_the_script_pulls_what_the_plan_wants(hub: HubServer, shelf: Shelf):
    done = subprocess.run(
        [ROOT / "scripts" / "download-weights", "--json", "--gpus", "cpu"],
        env=shelf.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)["weights"]
    assert row["folder"] == NAME
    assert is_complete(shelf.weights / NAME)


def test_a_pull_tells_what_it_does_and_a_second_has_nothing_to_do(hub: HubServer, shelf: Shelf):
    out, err = shelf.run(*PULL)
    assert f"{NAME}: {SHARD} (1.4 MiB)" in err
    assert f"{NAME}: {REPOSITORY} at {COMMIT[:12]}, 8 files, 2.4 MiB; 2.4 MiB fetched." in out
    hub.forget_counts()
    assert "was complete already" in shelf.run(*PULL)[0]
    assert hub.paths == []


def test_one_model_that_fails_does_not_keep_the_others_from_coming(hub: HubServer, shelf: Shelf):
    shelf.run(*PULL)
    hub.add("owner/gated", model_files(), gated=True)
    text = YAML.replace(
        "tiers:", "      - {folder: other, repository: owner/gated, licence: x, weights_gib: 1}\ntiers:", 1
    )
    (shelf.folder / "models.yaml").write_text(text)
    (shelf.weights / NAME / SHARD).unlink()
    out, err = shelf.run("pull", "other", NAME, code=1)
    assert f"{NAME}: {REPOSITORY}" in out
    assert f"1. Open {hub.endpoint}/owner/gated in a browser" in err
    assert not (shelf.weights / "other").exists()
    shelf.environment["HF_TOKEN"] = "hf_ours"
    shelf.run("pull", "other")
    assert is_complete(shelf.weights / "other")
    assert "hf_ours" not in out + err


def test_verify_names_damaged_files_and_its_exit_code_tells(hub: HubServer, shelf: Shelf):
    shelf.run(*PULL)
    assert "all files are as fetched" in shelf.run("verify")[0]
    content = bytearray((shelf.weights / NAME / SHARD).read_bytes())
    content[5000] ^= 1
    (shelf.weights / NAME / SHARD).write_bytes(content)
    out, err = shelf.run("verify", code=1)
    assert f"{SHARD} is damaged" in out
    assert f"hearth weights pull {NAME} --again" in err
    (shelf.weights / NAME / SHARD).write_bytes(b"")
    assert f"hearth weights pull {NAME} --again, or import it again" in " ".join(shelf.run("list")[0].split())
    shelf.run("pull", NAME, "--again")
    (shelf.weights / "own").mkdir()
    assert "--again" not in shelf.run("verify", "own", code=1)[1]
    assert shelf.json("verify")["weights"] == [{"folder": NAME, "ok": True, "problems": []}]


def test_the_list_says_what_lies_there_and_for_whom(hub: HubServer, shelf: Shelf):
    shelf.run(*PULL)
    (shelf.weights / "mine").mkdir()
    (shelf.weights / "mine" / "config.json").write_text("{}")
    table = shelf.run("list")[0]
    for word in (NAME, REPOSITORY, COMMIT[:12], "2.4 MiB", "complete", "service-plus", "your own (no manifest)"):
        assert word in table
    listed = {row["folder"]: row["used_by"] for row in shelf.json("list")["weights"]}
    assert listed == {"mine": [], NAME: ["service-plus"]}


def test_remove_asks_first_and_spares_what_a_running_server_uses(hub: HubServer, shelf: Shelf):
    shelf.run(*PULL)
    shelf.run("remove", NAME, answer="n\n", code=1)
    assert is_complete(shelf.weights / NAME)
    shelf.data.mkdir()
    with (shelf.data / "server.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        assert "(process 4711) uses tiny-chat for service-plus" in shelf.run("remove", NAME, "--yes", code=1)[1]
    assert is_complete(shelf.weights / NAME)
    assert "is removed: 2.4 MiB freed" in shelf.run("remove", NAME, answer="y\n")[0]
    assert list(shelf.weights.iterdir()) == []
    shelf.run("remove", "../data", "--yes", code=1)
    assert shelf.data.exists()


def test_folders_are_exported_and_imported_without_a_hub(hub: HubServer, shelf: Shelf):
    shelf.run(*PULL)
    usb = shelf.folder / "usb"
    assert "copied and verified" in shelf.run("export", NAME, "--to", usb)[0]
    shelf.run("remove", NAME, "--yes")
    shelf.environment["HF_HUB_OFFLINE"] = "1"
    assert "HF_HUB_OFFLINE is set" in shelf.run(*PULL, code=1)[1]
    hub.forget_counts()
    (row,) = shelf.json("import", usb)["weights"]
    assert (row["folder"], row["copied"]) == (NAME, True)
    assert verify(shelf.weights / NAME) == []
    assert "was there already" in shelf.run("import", usb / NAME)[0]
    assert hub.paths == []


def test_the_recipe_for_a_host_without_internet_works_as_it_is_written(hub: HubServer, shelf: Shelf):
    text = (ROOT / "docs" / "weights.md").read_text().partition("## A host without internet")[2]
    here, there = (block.partition("```")[0] for block in text.split("```sh\n")[1:3])
    (shelf.weights / "half").mkdir(parents=True)
    (shelf.weights / "half" / "config.json").write_text("{}")
    told = recipe(shelf, here)
    assert f"usb/{NAME}: " in told
    assert "half is left out: your own (no manifest)." in told
    shelf.weights = shelf.folder / "there"
    shelf.environment |= {"HEARTH_WEIGHTS_DIR": str(shelf.weights), "HF_HUB_OFFLINE": "1"}
    recipe(shelf, there)
    assert verify(shelf.weights / NAME) == []


def recipe(shelf: Shelf, commands: str) -> str:
    text = commands.replace(".venv/bin/hearth", str(BIN / "hearth")).replace(
        "/media/disk/hearth", str(shelf.folder / "usb")
    )
    done = subprocess.run(
        ["bash", "-euc", text], env=shelf.environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_proxy_and_the_token_of_the_environment_are_used(hub: HubServer, shelf: Shelf):
    proxied = {"HF_ENDPOINT": "http://hub.example", "HTTP_PROXY": hub.endpoint, "NO_PROXY": "127.0.0.1"}
    shelf.environment |= proxied | {"HF_TOKEN": "hf_ours"}
    shelf.run(*PULL)
    assert verify(shelf.weights / NAME) == []
    assert {headers["host"] for headers in hub.hub_headers} == {"hub.example"}
    assert {headers["authorization"] for headers in hub.hub_headers} == {"Bearer hf_ours"}


def test_a_disk_that_is_full_is_said_before_or_meanwhile_and_a_pull_goes_on_afterwards(hub: HubServer, shelf: Shelf):
    shelf.weights.mkdir()
    with small_disk(shelf.weights, "80m"):
        try:
            files = model_files() | {SHARD: safetensors(30 * 2**20)}
            hub.add(REPOSITORY, files)
            assert "Not enough room on the disk" in shelf.run(*PULL, code=1)[1]
            assert hub.served_bytes[SHARD] == 0
            hub.add(REPOSITORY, model_files())
            hub.faults[SHARD] = [Fault(hold=300_000)]
            process = shelf.start(*PULL)
            assert hub.holding.wait(60)
            filler = shelf.weights / "filler"
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(2**20)) == 2**20:
                    pass
            hub.release.set()
            _, err = process.communicate(timeout=60)
            assert process.returncode == 1
            assert "is full" in err
            assert not (shelf.weights / NAME).exists()
            filler.unlink()
            shelf.run(*PULL)
            assert verify(shelf.weights / NAME) == []
        finally:
            hub.release.set()


def test_ctrl_c_ends_a_pull_and_keeps_what_came(hub: HubServer, shelf: Shelf):
    hub.faults[SHARD] = [Fault(hold=1_000_000)]
    process = shelf.start(*PULL)
    shelf.wait_until_written(SHARD, 700_000)
    process.send_signal(signal.SIGINT)
    hub.release.set()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopped. What was fetched so far is kept" in err
    assert "Traceback" not in err
    hub.forget_counts()
    shelf.run(*PULL)
    assert hub.served_bytes[SHARD] < 900_000
    assert verify(shelf.weights / NAME) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["pull", "servic-plus"], "did you mean service-plus?"),
        (["pull", "--as", "x"], "--as and --subfolder go with --repository"),
        (["pull", "service-plus", "--repository", "a/b"], "Give either models or --repository"),
        (["pull", "--repository", "a/b", "--as", "../x"], "is not the name of a folder"),
        (["pull", "--gpus", "many"], "is not a machine"),
        (["verify", "nothing"], "There is no nothing in"),
        (["remove", "nothing"], "There is no nothing in"),
        (["export", "--to", "/nonexistent"], "was fetched whole"),
        (["import", "/nonexistent"], "does not exist, or is not a folder"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(arguments: list[str], told: str, shelf: Shelf):
    process = shelf.start(*arguments)
    out, err = process.communicate(timeout=60)
    assert process.returncode in {1, 2}
    assert told in out + err
    assert "Traceback" not in err
