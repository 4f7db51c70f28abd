"""`hearth status` and `hearth doctor` beside a real server: one that is well, and one that has every trouble."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from chat_parts import assert_error
from serving import BIN, READY_SECONDS, ROOT, Key, Server, poll_until
from small_models import VOICE_ENTRY, models_yaml
from tls_pair import make_pair

pytestmark = pytest.mark.engine

MODELS = {f"service-{name}" for name in ("plus", "pro", "embedding", "rerank", "transcription", "image", "voice")}
EMPTY_CHAT_ENTRY = """\
  service-plus:
    task: chat
    tier: standard
    capabilities: [chat]
    weights: empty
"""
TROUBLED = models_yaml(VOICE_ENTRY, EMPTY_CHAT_ENTRY)


def hearth(server: Server, command: str, *arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    folders = {"HEARTH_DATA_DIR": str(server.data_dir), "HEARTH_WEIGHTS_DIR": str(server.weights_dir)}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    done = subprocess.run(
        [BIN / "hearth", command, *arguments],
        cwd=ROOT,
        env=clean | folders | (environment or {}),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def self_test(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in findings if one["area"] == "self-test"]


def test_a_server_that_is_well_says_so_with_its_models_and_what_they_take(server: Server):
    server.wait_until_ready()
    code, text = hearth(server, "status", "--json")
    told = json.loads(text)
    assert (code, told["status"], told["pid"], told["base_url"]) == (0, "ready", server.pid, server.base_url)
    assert told["paths"]["weights_dir"] == str(server.weights_dir)
    models = {model["id"]: model for model in told["models"]}
    assert set(models) == MODELS
    for model in models.values():
        source = "shipped" if model["id"] == "service-voice" else "demo"
        assert (model["status"], model["served_with"]["source"]) == ("ready", source)
        assert model["memory"]["ram_bytes"] > 20 * 2**20
        assert all(_parents(pid) & {server.pid} for pid in model["pids"])
    assert len({pid for model in models.values() for pid in model["pids"]}) == len(MODELS)
    code, table = hearth(server, "status")
    assert code == 0
    assert f"Hearth is ready at {server.base_url}" in table
    assert "the demo" in table


def _parents(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123
            pid = int(file.read().rpartition(")")[2].split()[1])
        found.add(pid)
    return found


async def test_over_http_it_is_for_administrators(server: Server, http: httpx2.AsyncClient):
    told = (await http.get("/v1/admin/status")).json()
    assert (told["object"], told["pid"], {model["id"] for model in told["models"]}) == ("status", server.pid, MODELS)
    assert told["requests_running"] >= 1, "this one"
    key = server.make_key("no administrator")
    refused = await http.get("/v1/admin/status", headers={"Authorization": f"Bearer {key.text}"})
    assert_error(refused, 403, "insufficient_permissions")


def test_the_doctor_asks_every_endpoint_of_every_model_and_its_key_is_gone_after_it(server: Server, admin_key: Key):
    server.wait_until_ready()
    _, text = hearth(server, "doctor", "--json")
    found = self_test(json.loads(text)["findings"])
    assert {one["verdict"] for one in found} == {"ok"}, text
    asked = {one["message"].rpartition(": ")[0] for one in found}
    chats = ("chat", "chat, streamed", "batch of 2", "messages", "count_tokens", "responses", "completions")
    common = {"health/live", "health/ready", "models", "usage", "audio/voices", "audio/models", "metrics"}
    of_chats = {f"{model}: {kind}" for model in ("service-plus", "service-pro") for kind in chats}
    others = {"embedding: embeddings", "rerank: rerank", "image: image", "voice: speech"}
    others.add("transcription: transcription")
    assert asked == common | of_chats | {f"service-{one}" for one in others}
    assert all(one["seconds"] > 0 for one in found)
    assert "hearth doctor" not in {key["name"] for key in server.keys("list")["keys"]}
    _, text = hearth(server, "status", "--json")
    done = {model["id"]: model["last_minute"] for model in json.loads(text)["models"]}
    assert done["service-plus"]["tokens_per_second"] > 0
    assert (done["service-image"]["images"] >= 1, done["service-voice"]["audio_seconds"] > 0) == (True, True)
    assert admin_key.secret not in text


class Troubled(Server):
    """Speaks HTTPS, has a model that cannot be loaded and one that speaks."""

    def __init__(self, folder: Path) -> None:
        self.pair = make_pair(folder / "tls")
        (folder / "models.yaml").write_text(TROUBLED)
        self.environment = {"HEARTH_MODELS": str(folder / "models.yaml")}
        super().__init__(
            folder,
            arguments=["--tls-cert", str(self.pair.cert), "--tls-key", str(self.pair.key)],
            environment=self.environment,
        )
        (self.weights_dir / "empty").mkdir()

    def is_settled(self) -> bool:
        with httpx2.Client(verify=self.pair.client_context(), timeout=60) as client:
            models = client.get(f"{self.root_url}/health/ready").json()["models"]
        return {model["status"] for model in models.values()} == {"ready", "failed"}


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troubled]:
    server = Troubled(tmp_path_factory.mktemp("troubled"))
    server.start()
    try:
        poll_until(server.is_settled, READY_SECONDS, describe=server.log)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGCONT)
        server.kill()


def test_a_model_that_failed_is_told_with_its_reason_and_exit_code_2(troubled: Troubled):
    code, text = hearth(troubled, "status")
    assert code == 2
    assert "Hearth serves 1 of 2 models" in text
    assert "service-plus: empty has no config.json" in text


def test_the_doctor_finds_the_trouble_and_asks_the_rest_over_https(troubled: Troubled):
    code, text = hearth(troubled, "doctor", "--json", environment=troubled.environment)
    findings = json.loads(text)["findings"]
    assert code == 1
    problems = [one["message"] for one in findings if one["verdict"] == "problem"]
    assert any("serves 1 of 2 models; failed: service-plus" in message for message in problems)
    assert any(message.startswith("service-plus has failed: empty has no config.json") for message in problems)
    (voice,) = [one for one in findings if one["message"].startswith("service-voice: speech")]
    assert voice["verdict"] == "ok"
    code, text = hearth(troubled, "doctor", "--no-self-test", "--json")
    other = [
        one for one in json.loads(text)["findings"] if one["verdict"] == "warning" and "--models" in str(one["remedy"])
    ]
    assert other, "models.yaml of the server is another one"


def test_a_certificate_that_the_server_does_not_serve_any_more_is_not_believed(troubled: Troubled, tmp_path: Path):
    kept = shutil.copy(troubled.pair.cert, tmp_path / "kept.pem")
    try:
        shutil.copy(make_pair(tmp_path / "renewed").cert, troubled.pair.cert)
        _, text = hearth(troubled, "doctor", "--json", environment=troubled.environment)
    finally:
        shutil.copy(kept, troubled.pair.cert)
    found = self_test(json.loads(text)["findings"])
    assert {one["verdict"] for one in found} == {"problem"}
    assert "does not show the certificate" in found[0]["message"]
    assert "hearth reload" in found[0]["remedy"]


def test_one_that_is_stopped_does_not_answer_and_one_that_was_killed_is_not_there(troubled: Troubled):
    os.kill(troubled.pid, signal.SIGSTOP)
    code, text = hearth(troubled, "status")
    assert code == 2
    assert "has not answered for 10 s" in text
    os.kill(troubled.pid, signal.SIGCONT)
    assert hearth(troubled, "status", "--json")[0] == 2
    troubled.kill()
    code, text = hearth(troubled, "status")
    assert code == 1
    assert "No Hearth runs" in text
