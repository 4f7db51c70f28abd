"""HTTPS without a proxy: the server's certificate, read at the start and again when it was renewed."""

import contextlib
import hashlib
import ssl
from pathlib import Path

from server.settings import Settings

_OTHER_NAME = {62, 64}  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and ..._IP_ADDRESS_MISMATCH
_CERTIFICATE, _KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"


class TlsError(Exception):
    """The certificate or its key cannot be used; the message says why and what to do."""


class Certificate:
    """A certificate chain and its key, in PEM. Connections that begin after `renew` get what the files hold then."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Raise `TlsError` when the files cannot be used."""
        self.cert = cert
        self._key = key
        self.context, self._content = self._load()

    def renew(self) -> bool:
        """Read the files again; return whether they changed. Raises `TlsError`, and the old certificate stays."""
        fresh, content = self._load()
        if content == self._content:
            return False
        self._content = content

        def use_renewed(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = fresh

        # Called for every connection, with a name or without. Loading the pair into the old context would keep the old
        # one, too, if their keys are of different kinds.
        self.context.sni_callback = use_renewed
        return True

    def ends_at(self, name: str | None = None, *, by_system: bool = False) -> float:
        """Return when it ends, in seconds since 1970, by a handshake in memory.

        `by_system`: the client trusts this machine's authorities, else only this certificate. Raises
        `ssl.SSLCertVerificationError` for one that is not valid now, not trusted, or not for `name`.
        """
        trust = ssl.create_default_context() if by_system else trusting(self.cert)
        trust.check_hostname = name is not None
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self.context.wrap_bio(to_server, to_client, server_side=True)
        client = trust.wrap_bio(to_client, to_server, server_hostname=name)
        for _ in range(3):  # hello, the server's certificate, the end
            for side in (client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        return float(ssl.cert_time_to_seconds(str((client.getpeercert() or {})["notAfter"])))

    def names(self, host: str) -> bool:
        try:
            self.ends_at(host)
        except ssl.SSLCertVerificationError as error:
            return error.verify_code not in _OTHER_NAME
        return True

    def trusted(self) -> bool:
        """Whether clients on this machine trust it by default."""
        try:
            self.ends_at(by_system=True)
        except ssl.SSLCertVerificationError:
            return False
        return True

    def _load(self) -> tuple[ssl.SSLContext, list[bytes]]:
        """Return an SSL context, and hashes of both files: only OpenSSL keeps the key in memory."""
        content = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        for file, what in ((self.cert, "certificate"), (self._key, "key")):
            try:
                content.append(hashlib.sha256(file.read_bytes()).digest())
            except OSError as error:
                advice = "Check the path, and that this user may read it."
                raise TlsError(f"The TLS {what} {file} cannot be read: {error.strerror}. {advice}") from error
        try:
            context.load_cert_chain(self.cert, self._key, password=self._refuse_password)
        except ssl.SSLError as error:
            raise TlsError(self._reason(error)) from error
        return context, content

    def _refuse_password(self) -> str:
        """Raise `TlsError`: else OpenSSL would ask for a password at the terminal."""
        raise TlsError(
            f"The TLS key {self._key} is encrypted, and a server cannot ask for a password. "
            f"Write one without: openssl pkey -in {self._key} -out plain.key; chmod 600 plain.key"
        )

    def _reason(self, error: ssl.SSLError) -> str:
        if error.reason == "KEY_VALUES_MISMATCH":
            return (
                f"The TLS key {self._key} does not belong to the certificate {self.cert}. Pick one: 1. name the key "
                "that the certificate was made for; 2. if the certificate's file has a chain, the server's own has "
                "to come first in it."
            )
        cert, key = self.cert.read_bytes(), self._key.read_bytes()
        if _KEY in cert and _CERTIFICATE in key and _CERTIFICATE not in cert:
            return (
                f"The TLS certificate and its key are swapped: {self.cert} has a private key, and {self._key} a "
                "certificate. Name them the other way round."
            )
        return (
            f"The TLS certificate {self.cert} with the key {self._key} cannot be used ({error.reason or 'no PEM'}). "
            "Both must be PEM files (they begin with -----BEGIN): the certificate with its chain, and its private key."
        )


def certificate_of(settings: Settings) -> Certificate | None:
    """Return the certificate for HTTPS; None for plain HTTP. Raises `TlsError`."""
    cert, key = settings.tls_cert, settings.tls_key
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing, given = ("--tls-cert", "--tls-key") if cert is None else ("--tls-key", "--tls-cert")
        raise TlsError(f"{given} is given without {missing}: HTTPS needs both, the certificate and its key.")
    return Certificate(cert, key)


def first_certificate(file: Path) -> str:
    """Return the server's own certificate of a chain in PEM, which has to come first. Raises `OSError`."""
    own, end, _ = file.read_text(encoding="ascii", errors="replace").partition(ssl.PEM_FOOTER)
    return own[max(own.find(ssl.PEM_HEADER), 0) :] + end


def trusting(cert: Path) -> ssl.SSLContext:
    """Return a client context that trusts only the first certificate of a file, for any name. Raises `OSError`.

    Those after it belong to authorities: if trusted, every certificate that they have signed would be valid.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be self-signed
    context.load_verify_locations(cadata=first_certificate(cert))
    return context
