"""HTTPS without a proxy: the server's certificate, read at the start and again when it was renewed."""

import hashlib
import ssl
from pathlib import Path

from server.settings import Settings

_CERTIFICATE, _KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"


class TlsError(Exception):
    """The certificate or its key cannot be used; the message says why and what to do."""


class Certificate:
    """A certificate chain and its key, in PEM. Connections that begin after `renew` get what the files hold then."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Raise `TlsError` when the files cannot be used."""
        self._cert = cert
        self._key = key
        self.context, self._content = self._load()

    def renew(self) -> bool:
        """Read the files again; whether they hold something new. Raises `TlsError`; the old certificate then stays."""
        fresh, content = self._load()
        if content == self._content:
            return False
        self._content = content

        def use_renewed(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = fresh

        # Asked for every connection, with a name or without. A context that is given a second pair keeps the first one,
        # too, where their keys are of different kinds.
        self.context.sni_callback = use_renewed
        return True

    def _load(self) -> tuple[ssl.SSLContext, list[bytes]]:
        """Return what to show, with hashes of both files: the key is held in memory once, by OpenSSL."""
        content = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        for file, what in ((self._cert, "certificate"), (self._key, "key")):
            try:
                content.append(hashlib.sha256(file.read_bytes()).digest())
            except OSError as error:
                advice = "Check the path, and that this user may read it."
                raise TlsError(f"The TLS {what} {file} cannot be read: {error.strerror}. {advice}") from error
        try:
            context.load_cert_chain(self._cert, self._key, password=self._refuse_password)
        except ssl.SSLError as error:
            raise TlsError(self._reason(error)) from error
        return context, content

    def _refuse_password(self) -> str:
        """OpenSSL would ask for it at the terminal."""
        raise TlsError(
            f"The TLS key {self._key} is encrypted, and a server cannot ask for a password. "
            f"Write one without: openssl pkey -in {self._key} -out plain.key; chmod 600 plain.key"
        )

    def _reason(self, error: ssl.SSLError) -> str:
        if error.reason == "KEY_VALUES_MISMATCH":
            return (
                f"The TLS key {self._key} does not belong to the certificate {self._cert}. Pick one: 1. name the key "
                "that the certificate was made for; 2. if the certificate's file has a chain, the server's own has "
                "to come first in it."
            )
        cert, key = self._cert.read_bytes(), self._key.read_bytes()
        if _KEY in cert and _CERTIFICATE in key and _CERTIFICATE not in cert:
            return (
                f"The TLS certificate and its key are swapped: {self._cert} has a private key, and {self._key} a "
                "certificate. Name them the other way round."
            )
        return (
            f"The TLS certificate {self._cert} with the key {self._key} cannot be used ({error.reason or 'no PEM'}). "
            "Both must be PEM files (they begin with -----BEGIN): the certificate with its chain, and its private key."
        )


def certificate_of(settings: Settings) -> Certificate | None:
    """Return what HTTPS is spoken with, None if plain HTTP is. Raises `TlsError`."""
    cert, key = settings.tls_cert, settings.tls_key
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing, given = ("--tls-cert", "--tls-key") if cert is None else ("--tls-key", "--tls-cert")
        raise TlsError(f"{given} is given without {missing}: HTTPS needs both, the certificate and its key.")
    return Certificate(cert, key)
