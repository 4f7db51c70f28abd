"""`hearth doctor`'s self-test against servers that end in the middle, or are not the one that they should be."""

import asyncio
import json
import ssl
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Self

import pytest
from tls_pair import Pair, make_pair

from engine.config import load_config
from server.cli.doctor import checks
from server.cli.doctor.checks import Case, Finding, case_of
from server.cli.doctor.selftest import selftest
from server.observability.status import LastMinuteRequests, LastMinuteWork, Memory, ModelState, Paths, Status
from server.settings import database_url, load_settings
from server.store.audit import AuditEntry, read_entries
from server.store.database import Database
from server.store.keys import ApiKey, KeyStore

YAML = """\
models:
  voice: {task: speech, tier: standard, capabilities: [speech], weights: mine, demo: voices}
tiers:
  standard: {models: [standard]}
"""
ANSWERS: dict[str, Any] = {
    "/health/live": {"status": "ok"},
    "/health/ready": {"models": {"voice": {}}},
    "/v1/models": {"data": [{"id": "voice", "capabilities": ["speech"]}]},
    "/v1/usage": {"data": []},
    "/v1/audio/voices": {"voices": []},
    "/v1/audio/models": {"data": []},
}
COMMON = 7  # requests before the models are tried, /metrics among them


class Mortal:
    """A real HTTP server that answers so many requests, and then is gone with its port."""

    def __init__(self, requests: int, pair: Pair | None = None) -> None:
        self._left = requests
        self._server = HTTPServer(("127.0.0.1", 0), self._answering())
        scheme = "http"
        if pair is not None:
            scheme = "https"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pair.cert, pair.key)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.base_url = f"{scheme}://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._live)

    def _answering(self) -> type[BaseHTTPRequestHandler]:
        mortal = self

        class Answering(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told = ANSWERS.get(self.path.partition("?")[0])
                body = b"\nhearth_build_info{" if told is None else json.dumps(told).encode()
                mortal.count()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Answering

    def count(self) -> None:
        """Be gone before the last answer is sent: whoever has it finds nobody any more."""
        self._left -= 1
        if self._left <= 0:
            self._server.server_close()

    def _live(self) -> None:
        if not self._left:
            self._server.server_close()
        for _ in range(self._left):
            self._server.handle_request()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.server_close()


@pytest.fixture
def case(tmp_path: Path) -> Case:
    (tmp_path / "models.yaml").write_text(YAML)
    settings = load_settings(data_dir=tmp_path / "data", weights_dir=tmp_path, models=tmp_path / "models.yaml")
    found = case_of(settings, load_config(settings.models), None)
    asyncio.run(kept(found))
    return found


async def kept(case: Case) -> tuple[list[ApiKey], list[AuditEntry]]:
    async with await Database.open(database_url(case.settings)) as database:
        return await KeyStore(database).list(), await read_entries(database)


def tried(case: Case, base_url: str, tls_cert: Path | None = None) -> list[Finding]:
    nothing = Memory(planned_gpu_bytes=None, planned_ram_bytes=None, gpu_bytes=None, ram_bytes=None)
    voice = ModelState(
        id="voice", status="ready", phase="", progress=1, for_seconds=1, reason=None, restarts=0, served_with=None,
        gpus=[], memory=nothing, pids=[], running=0, waiting=0,
        last_minute=LastMinuteWork(seconds=60, tokens_per_second=0, images=0, audio_seconds=0),
    )  # fmt: skip
    paths = Paths(data_dir="", weights_dir="", models="", tls_cert=None if tls_cert is None else str(tls_cert))
    running = Status(
        status="ready", version="1", pid=1, base_url=base_url, started_at="", uptime_seconds=1, requests_running=0,
        swaps=0, ram_total_bytes=1, ram_available_bytes=1, models=[voice], gpus=[], no_gpus=None, paths=paths,
        last_minute=LastMinuteRequests(seconds=60, requests=0, refused=0, failed=0), host="127.0.0.1", reserve_bytes=0,
    )  # fmt: skip
    return list(selftest(replace(case, running=running)))


@pytest.mark.parametrize("answered", [0, 2, COMMON, COMMON + 1])
def test_a_server_that_ends_in_the_middle_is_a_problem_with_a_remedy(case: Case, answered: int):
    with Mortal(answered) as server:
        *before, last = tried(case, server.base_url)
    assert [one.verdict for one in before] == ["ok"] * min(answered, COMMON)
    assert last.verdict == "problem"
    assert "the server has ended or does not answer any more" in last.message
    assert last.remedy is not None
    assert "hearth status" in last.remedy


@pytest.mark.parametrize("answered", [2, COMMON + 2])
def test_the_key_of_the_test_leaves_only_its_making_and_its_end_in_the_audit_log(case: Case, answered: int):
    with Mortal(answered) as server:
        tried(case, server.base_url)
    keys, entries = asyncio.run(kept(case))
    assert keys == []
    assert [entry.action for entry in entries] == ["key.delete", "key.create"]
    assert len({entry.object for entry in entries}) == 1
    assert {entry.detail["name"] for entry in entries} == {"hearth doctor"}
    assert "admin" not in entries[-1].detail["scopes"]


def test_the_servers_own_certificate_is_believed_and_none_that_its_authority_has_also_signed(
    case: Case, tmp_path: Path
):
    authority = make_pair(tmp_path / "authority")
    ours, other = (make_pair(tmp_path / name, authority=authority) for name in ("ours", "other"))
    with Mortal(COMMON + 2, ours) as server:
        assert {one.verdict for one in tried(case, server.base_url, ours.cert)} == {"ok"}
    with Mortal(1, other) as server:
        (refused,) = tried(case, server.base_url, ours.cert)
    assert refused.verdict == "problem"
    assert f"does not show the certificate that {ours.cert} begins with" in refused.message
    assert refused.remedy is not None
    assert "hearth reload" in refused.remedy


@pytest.mark.parametrize(
    ("public", "proxies", "problems"),
    [
        ("https://localhost/v1", (), 0),
        ("https://ai.example.org", (), 1),
        ("https://ai.example.org", ("192.0.2.1",), 0),
        ("http://ai.example.org", (), 0),
    ],
)
def test_a_certificate_for_another_name_than_clients_are_told_is_a_problem(
    tmp_path: Path, public: str, proxies: tuple[str, ...], problems: int
):
    pair = make_pair(tmp_path, authority=make_pair(tmp_path / "authority"))
    given = load_settings(tls_cert=pair.cert, tls_key=pair.key, public_base_url=public, trusted_proxies=proxies)
    found = [one for one in checks.certificate(given, time.time()) if one.verdict == "problem"]
    assert len(found) == problems
    assert all("HEARTH_PUBLIC_BASE_URL" in one.message and "ai.example.org" in one.message for one in found)


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("localhost", False), ("192.0.2.7", True)])
def test_a_certificate_that_does_not_name_the_address_of_the_server_is_warned_of(
    tmp_path: Path, host: str, *, warned: bool
):
    pair = make_pair(tmp_path)
    given = load_settings(tls_cert=pair.cert, tls_key=pair.key, host=host)
    found = [one.message for one in checks.certificate(given, time.time()) if f"not for {host}" in one.message]
    assert bool(found) is warned
