"""HTTPS spoken by Hearth itself: what it needs, what it says when it lacks that, and a certificate that is renewed."""

import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from chat_parts import assert_error
from click.testing import Result
from cryptography import x509
from serving import BIN, ROOT, Server, poll_until, raw_request
from small_models import VOICES_ONLY
from speech_parts import HELLO_EMMA, SPEECH
from tls_pair import Pair, make_pair
from typer.testing import CliRunner

from engine.placement.hardware import Cuda, imagined
from server.cli import app
from server.cli.doctor.checks import Case, tls
from server.http.tls import TlsError, certificate_of
from server.observability.status import ask
from server.settings import load_settings

NO_WEIGHTS = """\
  service-image:
    task: image
    tier: standard
    capabilities: [image_generation]
    weights: nowhere
    profile: sdxl
"""


class Safe(Server):
    """A server that speaks HTTPS, and voices, since the models that speak load fastest."""

    def __init__(self, folder: Path) -> None:
        self.pair = make_pair(folder / "tls")
        (folder / "models.yaml").write_text(VOICES_ONLY)
        super().__init__(
            folder,
            arguments=["--tls-cert", str(self.pair.cert), "--tls-key", str(self.pair.key)],
            environment={"HEARTH_MODELS": str(folder / "models.yaml")},
        )

    def client(self) -> httpx2.Client:
        assert self.admin_key is not None
        headers = {"Authorization": f"Bearer {self.admin_key.text}"}
        return httpx2.Client(base_url=self.root_url, headers=headers, verify=self.pair.client_context(), timeout=60)

    def is_ready(self) -> bool:
        with self.client() as client:
            return client.get("/health/ready").status_code == 200

    def address(self) -> tuple[str, int]:
        host, _, port = self.root_url.removeprefix("https://").rpartition(":")
        return host, int(port)

    def connection(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        return context.wrap_socket(socket.create_connection(self.address(), timeout=30), server_hostname="localhost")

    def serial(self) -> int:
        """Of the certificate that a new connection is shown."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with self.connection(context) as connection:
            shown = connection.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number


@pytest.fixture(scope="module")
def safe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Safe]:
    running = Safe(tmp_path_factory.mktemp("safe"))
    try:
        running.start()
        yield running
        assert running.stop() == 0, running.log()
    finally:
        running.kill()


@pytest.mark.engine
def test_it_serves_over_https_and_says_so(safe: Safe):
    assert safe.base_url.startswith("https://127.0.0.1:")
    safe.wait_until_ready(250)
    safe.wait_for_line(f"curl --cacert {re.escape(str(safe.pair.cert))} https://127")  # nobody else vouches for it
    assert "is not for" not in safe.log()
    with safe.client() as client:
        listed = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["service-voice"]
        assert_error(client.get("/v1/models", headers={"Authorization": "Bearer no"}), 401, "invalid_api_key")


@pytest.mark.engine
def test_the_command_line_trusts_the_certificate_of_the_server_that_runs_here(safe: Safe):
    safe.wait_until_ready(250)
    assert safe.admin_key is not None
    environment = {"HEARTH_KEY": safe.admin_key.text, "HEARTH_URL": ""}
    arguments = ["batches", "list", "--json", "--data-dir", str(safe.data_dir)]
    listed = CliRunner().invoke(app, arguments, env=environment)
    assert (listed.exit_code, listed.stderr) == (0, ""), listed.stdout


@pytest.mark.engine
def test_sound_streams_over_https(safe: Safe):
    safe.wait_until_ready(250)  # alone it would take 10: the worker leaves a busy machine to everybody else
    with safe.client() as client, client.stream("POST", SPEECH, json=HELLO_EMMA) as spoken:
        assert spoken.status_code == 200, spoken.read()
        assert sum(len(piece) for piece in spoken.iter_raw()) > 1000


@pytest.mark.engine
def test_what_is_no_http_within_tls_is_answered_and_closed(safe: Safe):
    with safe.connection(safe.pair.client_context()) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"invalid_http"' in answer


@pytest.mark.engine
def test_whoever_speaks_plain_http_gets_nothing_and_the_server_says_nothing(safe: Safe):
    with socket.create_connection(safe.address(), timeout=30) as plain:
        plain.sendall(raw_request("GET", "/health/live", {}))
        answer = plain.makefile("rb").read()
    assert not answer.startswith(b"HTTP/")
    with safe.client() as client:
        assert client.get("/health/live").status_code == 200
    assert "Traceback" not in safe.log()
    assert "SSL" not in safe.log()


@pytest.mark.engine
def test_nothing_older_than_tls_1_2_is_spoken(safe: Safe):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)), safe.connection(old):
        pass


def reload(safe: Safe) -> Result:
    """`hearth reload` with the server's data directory, and without its settings on TLS."""
    return CliRunner().invoke(app, ["reload", "--data-dir", str(safe.data_dir)])


def tls_lines(safe: Safe) -> list[tuple[str, str]]:
    """What `hearth doctor` says of TLS, with the same settings."""
    settings = load_settings(data_dir=safe.data_dir)
    case = Case(settings, None, imagined("cpu"), Cuda(), on_cpu_build=True, plan=None, running=ask(safe.data_dir, 60))
    return [(one.verdict, one.message) for one in tls(case)]


@pytest.mark.engine
def test_a_renewed_certificate_is_taken_over_by_a_reload_and_a_broken_one_is_not(safe: Safe, tmp_path: Path):
    old, renewed = safe.pair.cert.read_bytes(), make_pair(tmp_path)
    same = reload(safe)
    assert (same.exit_code, "nothing has changed" in same.stdout) == (0, True), same.stderr
    ((verdict, told),) = tls_lines(safe)  # of the running server, though no setting here names its certificate
    assert (verdict, "is valid until" in told) == ("warning", True), told
    safe.pair.cert.write_text("garbage")
    garbage = reload(safe)
    assert garbage.exit_code == 1
    assert "The TLS certificate was refused, and the old one is still shown" in garbage.stderr
    assert tls_lines(safe)[0][0] == "problem"
    shutil.copy(renewed.cert, safe.pair.cert)
    other = reload(safe)
    assert (other.exit_code, "does not belong to the certificate" in other.stderr) == (1, True)
    safe.wait_for_line("The TLS certificate stays as it was. The TLS key .* does not belong to the certificate")
    assert safe.serial() == safe.pair.serial
    with httpx2.Client(base_url=safe.root_url, verify=trusting(old, tmp_path), timeout=60) as client:
        assert safe.admin_key is not None
        headers = {"Authorization": f"Bearer {safe.admin_key.text}"}
        refused = client.post("/v1/admin/reload", headers=headers).json()["certificate"]
    assert refused["renewed"] is False
    assert "does not belong to the certificate" in refused["refused"]
    shutil.copy(renewed.key, safe.pair.key)
    (*_, (verdict, told)) = tls_lines(safe)
    assert (verdict, "shows another certificate" in told) == ("problem", True), told
    done = reload(safe)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "  the TLS certificate is renewed\n" in done.stdout
    poll_until(lambda: safe.serial() == renewed.serial, 20, describe=safe.log)


def trusting(certificate: bytes, folder: Path) -> ssl.SSLContext:
    (folder / "old.pem").write_bytes(certificate)
    return ssl.create_default_context(cafile=str(folder / "old.pem"))


@pytest.mark.engine
def test_a_reload_tells_at_once_of_a_changed_model_that_cannot_be_loaded(safe: Safe):
    models = safe.data_dir.parent / "models.yaml"
    models.write_text(VOICES_ONLY.replace("models:\n", "models:\n" + NO_WEIGHTS, 1))
    try:
        done = reload(safe)
    finally:
        models.write_text(VOICES_ONLY)
    assert done.exit_code == 1, done.stdout
    assert "  added: service-image\n" in done.stdout, done.stderr
    assert done.stderr.startswith("service-image cannot be served: there is no folder 'nowhere'")
    assert reload(safe).exit_code == 0


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path / "pair")


def problem(cert: Path | None, key: Path | None) -> str:
    with pytest.raises(TlsError) as caught:
        certificate_of(load_settings(tls_cert=cert, tls_key=key))
    return str(caught.value)


def test_without_certificate_plain_http_is_spoken():
    assert certificate_of(load_settings()) is None


def test_half_a_pair_is_named(pair: Pair):
    assert problem(pair.cert, None).startswith("--tls-cert is given without --tls-key: ")
    assert problem(None, pair.key).startswith("--tls-key is given without --tls-cert: ")


def test_a_file_that_is_not_there_is_named(pair: Pair, tmp_path: Path):
    missing = tmp_path / "missing.pem"
    assert problem(missing, pair.key).startswith(f"The TLS certificate {missing} cannot be read: No such file")
    assert problem(pair.cert, missing).startswith(f"The TLS key {missing} cannot be read: No such file")


def test_a_key_of_another_certificate_is_said_to_be_one(pair: Pair, tmp_path: Path):
    other = make_pair(tmp_path / "other")
    assert "does not belong to the certificate" in problem(pair.cert, other.key)


def test_files_that_are_no_pem_are_said_to_be_none(pair: Pair, tmp_path: Path):
    (tmp_path / "no.pem").write_text("hello")
    assert "Both must be PEM files" in problem(tmp_path / "no.pem", pair.key)
    assert "Both must be PEM files" in problem(pair.cert, tmp_path / "no.pem")


def test_a_pair_that_is_swapped_is_said_to_be(pair: Pair):
    assert problem(pair.key, pair.cert).startswith("The TLS certificate and its key are swapped: ")


def test_files_that_hold_what_they_held_are_nothing_new(pair: Pair, tmp_path: Path):
    found = certificate_of(load_settings(tls_cert=pair.cert, tls_key=pair.key))
    assert found is not None
    assert found.renew() is False
    other = make_pair(tmp_path / "other")
    for ours, theirs in ((pair.cert, other.cert), (pair.key, other.key)):
        shutil.copy(theirs, ours)
    assert (found.renew(), found.renew()) == (True, False)


def test_an_encrypted_key_is_refused_and_nobody_asked_for_its_password(tmp_path: Path):
    secret = make_pair(tmp_path, password=b"secret")
    assert "is encrypted" in problem(secret.cert, secret.key)


def test_a_start_with_a_bad_pair_ends_at_once_with_the_reason(pair: Pair, tmp_path: Path):
    done = subprocess.run(
        [BIN / "hearth", "serve", "--port", "0", "--data-dir", tmp_path / "data", "--tls-cert", pair.cert],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == ("--tls-cert is given without --tls-key: HTTPS needs both, the certificate and its key.\n")


def test_it_is_known_which_addresses_a_certificate_is_for(tmp_path: Path):
    pair = make_pair(tmp_path, authority=make_pair(tmp_path / "authority"))
    found = certificate_of(load_settings(tls_cert=pair.cert, tls_key=pair.key))
    assert found is not None
    hosts = ("localhost", "127.0.0.1", "192.0.2.7", "ai.example.org")
    assert [found.names(host) for host in hosts] == [True, True, False, False]
    assert not found.trusted()
