"""`hearth doctor --bundle`: an archive for a bug report, with what is needed and without secrets or words of clients."""

import json
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import httpx2
import pytest
from chat_parts import CHAT, HELLO, MODEL
from serving import BIN, CANARY, ROOT, Server

ALWAYS = {"README.txt", "versions.json", "doctor.json"}
ON_DISK = {*ALWAYS, "settings.json", "models.json", "plan.json"}
SECRETS = {
    "HEARTH_DATABASE_URL": "postgresql://ann:pass%40word1@db.example.org/hearth",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic c2VjcmV0MTIz",
    "HF_TOKEN": "hf_abcdefghijklmnop",
    "HTTPS_PROXY": "http://me:proxypassword@proxy.example.org:3128",
    "HEARTH_KEY": "hk_AbCdEfGhIjKl_0123456789abcdefghijklmnopqrstuvwxyz",
}
TELLING = ("pass%40word1", "pass@word1", "c2VjcmV0MTIz", "abcdefghijklmnop", "proxypassword", "0123456789abcdef")


def bundled(file: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    command = [BIN / "hearth", "doctor", "--bundle", file, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=clean | environment, capture_output=True, text=True, timeout=120, check=False
    )


def read(file: Path) -> dict[str, str]:
    """The texts in it, by name."""
    found = {}
    with tarfile.open(file) as archive:
        for entry in archive:
            content = archive.extractfile(entry)
            assert content is not None
            found[entry.name.removeprefix("hearth/")] = content.read().decode()
    return found


def test_without_a_server_it_has_what_is_on_the_disk_and_no_secret(tmp_path: Path):
    home = tmp_path / "home" / "annabelle"
    home.mkdir(parents=True)
    key = "hk_AbCdEfGhIjKl_anotherSecretOfAKeyThatIsNotInTheEnvironment"
    yaml = (ROOT / "models.yaml").read_text() + f"# {key}\n"
    models = home / "models.yaml"
    models.write_text(yaml.replace("description: ", f"description: {key} password=opensesame ", 1))
    file = tmp_path / "bundle.tar.gz"
    folders = {"HEARTH_DATA_DIR": str(home / "data"), "HEARTH_MODELS": str(models), "HOME": str(home)}
    done = bundled(file, **SECRETS, **folders)
    assert "Traceback" not in done.stderr, done.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    parts = read(file)
    assert {*parts} == ON_DISK
    assert "No server answered" in parts["README.txt"]
    whole = "".join(parts.values())
    assert [secret for secret in (*TELLING, key, "opensesame", "annabelle") if secret in whole] == []
    settings = json.loads(parts["settings.json"])
    assert settings["settings"]["data_dir"] == "~/data"
    assert "HEARTH_DATABASE_URL" in settings["environment_names"]
    assert MODEL in json.loads(parts["models.json"])["models"]
    assert any(package.startswith("fastapi==") for package in json.loads(parts["versions.json"])["packages"])
    before = file.read_bytes()
    again = bundled(file, **folders)
    assert (again.returncode, again.stdout) == (1, "")  # before any check
    assert "is not overwritten" in again.stderr
    assert file.read_bytes() == before


def test_what_is_wrong_is_in_it_too(tmp_path: Path):
    file = tmp_path / "bundle.tar.gz"
    done = bundled(file, HEARTH_PORT="many", HEARTH_DATA_DIR=str(tmp_path))
    assert done.returncode == 1
    parts = read(file)
    assert {*parts} == ALWAYS
    assert "HEARTH_PORT" in parts["doctor.json"]


@pytest.mark.engine
async def test_beside_a_server_it_has_its_state_and_nothing_that_clients_wrote(
    http: httpx2.AsyncClient, server: Server, tmp_path: Path
):
    mine = {"x-request-id": "an-id-of-the-clients"}
    await http.post(CHAT, json={"model": MODEL, "messages": HELLO, "top_p": 7, CANARY: 1}, headers=mine)
    await http.post(CHAT, json={"model": CANARY, "messages": HELLO}, headers=mine)
    await http.get(f"/{CANARY}", headers=mine)
    file = tmp_path / "bundle.tar.gz"
    done = bundled(file, "--data-dir", server.data_dir, "--weights-dir", server.weights_dir)
    assert "Traceback" not in done.stderr, done.stderr
    parts = read(file)
    assert {*parts} == {*ON_DISK, "status.json", "refusals.json", "metrics.txt"}
    whole = "".join(parts.values())
    assert CANARY not in whole
    assert mine["x-request-id"] not in whole
    assert server.admin_key is not None
    assert not any(key.secret in whole for key in [server.admin_key, *server.made_keys])
    assert json.loads(parts["status.json"])["pid"] == server.pid
    assert {"top_p", "model"} <= {one["param"] for one in json.loads(parts["refusals.json"])}
    assert "vllm:kv_cache_usage_perc" in parts["metrics.txt"]
