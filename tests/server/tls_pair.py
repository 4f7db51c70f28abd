"""A certificate of the tests' own for this machine, and whoever trusts it."""

import datetime as dt
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """A certificate for this machine that is its own authority, and its key; both in `both`."""

    cert: Path
    key: Path
    both: Path
    serial: int

    def private_key(self) -> ec.EllipticCurvePrivateKey:
        key = serialization.load_pem_private_key(self.key.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.cert))


def make_pair(folder: Path, *, password: bytes | None = None, authority: Pair | None = None) -> Pair:
    """Write a new certificate and key into `folder`; one signed by `authority` comes with the authority's behind it."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_named("hearth.test" if authority is None else "leaf.test"))
        .issuer_name(_named("hearth.test"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key if authority is None else authority.private_key(), hashes.SHA256())
    )
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    cert_pem = certificate.public_bytes(serialization.Encoding.PEM)
    if authority is not None:
        cert_pem += authority.cert.read_bytes()
    key_pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)
    pair = Pair(folder / "cert.pem", folder / "key.pem", folder / "both.pem", certificate.serial_number)
    pair.cert.write_bytes(cert_pem)
    pair.key.write_bytes(key_pem)
    pair.both.write_bytes(cert_pem + key_pem)
    return pair


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
