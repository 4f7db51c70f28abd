"""Real reverse proxies from Debian's packages, with the configuration of docker/ and a certificate of the tests' own."""

from __future__ import annotations

import datetime as dt
import ipaddress
import shutil
import socket
import ssl
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from serving import ROOT, poll_until

if TYPE_CHECKING:
    from pathlib import Path

PROXIES = {"nginx": "nginx-light", "haproxy": "haproxy", "caddy": "caddy"}


@dataclass(frozen=True)
class Pair:
    """A certificate for this machine that is its own authority, and its key; both in `both`."""

    cert: Path
    key: Path
    both: Path
    serial: int

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.cert))


def make_pair(folder: Path, *, password: bytes | None = None) -> Pair:
    """Write a new certificate and key into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hearth.test")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    cert_pem = certificate.public_bytes(serialization.Encoding.PEM)
    key_pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)
    pair = Pair(folder / "cert.pem", folder / "key.pem", folder / "both.pem", certificate.serial_number)
    pair.cert.write_bytes(cert_pem)
    pair.key.write_bytes(key_pem)
    pair.both.write_bytes(cert_pem + key_pem)
    return pair


def missing_reason(proxy: str) -> str | None:
    """Why this proxy cannot be run here, or None."""
    if shutil.which(proxy, path="/usr/sbin:/usr/bin:/usr/local/bin") is None:
        return f"{proxy} is not installed (apt-get install {PROXIES[proxy]})"
    return None


class Proxy:
    """One proxy in front of a server. Use as `with`; it speaks HTTPS at `url`."""

    def __init__(self, kind: str, folder: Path, upstream: str, pair: Pair) -> None:
        self._kind = kind
        self._folder = folder
        self._port = _free_port()
        self._upstream = upstream
        self._pair = pair
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"https://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        program = shutil.which(self._kind, path="/usr/sbin:/usr/bin:/usr/local/bin")
        assert program is not None
        with (self._folder / "output").open("wb") as output:
            command = [program, *getattr(self, f"_{self._kind}")()]
            environment = {"HOME": str(self._folder), "XDG_DATA_HOME": str(self._folder)}
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=self._folder)
        poll_until(self._listens, 30, describe=self.log)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)

    def log(self) -> str:
        return (self._folder / "output").read_text(errors="replace")

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def _nginx(self) -> list[str]:
        site = _changed(
            (ROOT / "docker" / "nginx.conf").read_text(),
            {
                "listen 443 ssl": f"listen 127.0.0.1:{self._port} ssl",
                "/etc/ssl/hearth/fullchain.pem": str(self._pair.cert),
                "/etc/ssl/hearth/privkey.pem": str(self._pair.key),
                "127.0.0.1:8000;": f"{self._upstream};",
            },
        )
        folders = "".join(
            f"{kind}_temp_path {self._folder}/{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        file = self._folder / "nginx.conf"
        around = f"daemon off; master_process off; pid {self._folder}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n"
        file.write_text(f"{around}{folders}{site}\n}}\n")
        return ["-e", "stderr", "-c", str(file)]

    def _haproxy(self) -> list[str]:
        site = _changed(
            (ROOT / "docker" / "haproxy.cfg").read_text(),
            {
                "bind :443": f"bind 127.0.0.1:{self._port}",
                "/etc/ssl/hearth/hearth.pem alpn": f"{self._pair.both} alpn",
                "one 127.0.0.1:8000": f"one {self._upstream}",
            },
        )
        file = self._folder / "haproxy.cfg"
        file.write_text(site)
        return ["-db", "-f", str(file)]

    def _caddy(self) -> list[str]:
        site = _changed(
            (ROOT / "docker" / "Caddyfile").read_text(),
            {
                "https://hearth.example.org {": f"https://127.0.0.1:{self._port} {{",
                "/etc/ssl/hearth/fullchain.pem": str(self._pair.cert),
                "/etc/ssl/hearth/privkey.pem": str(self._pair.key),
                "reverse_proxy 127.0.0.1:8000": f"reverse_proxy {self._upstream}",
            },
        )
        file = self._folder / "Caddyfile"
        # It would also take port 80, for redirects, and one for its own administration.
        file.write_text(f"{{\n\tadmin off\n\tauto_https disable_redirects\n\tskip_install_trust\n}}\n{site}")
        return ["run", "--config", str(file), "--adapter", "caddyfile"]


def _changed(text: str, changes: dict[str, str]) -> str:
    """The shipped file with this test's places. Each stands in it once, so that nothing is tested but what is shipped."""
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the file"
        text = text.replace(old, new)
    return text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
