"""`hearth doctor` on HTTPS: the certificate and key of the running server, or of the settings where none runs."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from server.cli.doctor.findings import Case, Finding, ok, problem, warning
from server.http.tls import TlsError, certificate_of
from server.settings import Settings
from server.terminal import HEARTH

_SOON_SECONDS = 21 * 86400
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED
_NOT_VALID = 9
_PEM_BEGIN = "-----BEGIN CERTIFICATE-----"
_PEM_END = "-----END CERTIFICATE-----"
_ANSWER_SECONDS = 10.0


def tls(case: Case) -> Iterator[Finding]:
    """Look at the files, and whether the running server shows what they hold. Nothing where plain HTTP is spoken."""
    given = with_running_tls(case)
    yield from certificate(given, case.now)
    if case.running is not None and case.running.base_url is not None and given.tls_cert is not None:
        yield from shown(case.running.base_url, given.tls_cert)


def with_running_tls(case: Case) -> Settings:
    """Return the settings with certificate and key as the running server was given them, by whatever way."""
    if case.running is None:
        return case.settings
    paths = case.running.paths
    given = {
        "tls_cert": None if paths.tls_cert is None else Path(paths.tls_cert),
        "tls_key": None if paths.tls_key is None else Path(paths.tls_key),
    }
    return case.settings.model_copy(update=given)


def shown(base_url: str, cert: Path) -> Iterator[Finding]:
    """Compare the certificate that a new connection is shown with the first one in the file."""
    at = urlsplit(base_url)
    try:
        served = ssl.get_server_certificate((at.hostname or "", at.port or 443), timeout=_ANSWER_SECONDS)  # looks only
        same = ssl.PEM_cert_to_DER_cert(served) == ssl.PEM_cert_to_DER_cert(first_certificate(cert))
    except (OSError, ValueError):  # who does not answer is the self-test's to tell, and a broken file was told above
        return
    if not same:
        yield problem(
            f"the running server shows another certificate than {cert} holds: it has not read it again since",
            f"{HEARTH} reload (or systemctl reload hearth)",
        )


def certificate(given: Settings, now: float) -> Iterator[Finding]:
    """Say until when the certificate is valid. Nothing without one."""
    try:
        pair = certificate_of(given)
    except TlsError as error:
        yield problem(str(error))
        return
    if pair is None or given.tls_cert is None:
        return
    renew = f"renew it, then: {HEARTH} reload (or systemctl reload hearth)"
    try:
        ends_at = _end_of(given.tls_cert, pair.context)
    except ssl.SSLCertVerificationError as error:
        words = {_EXPIRED: "has expired", _NOT_VALID: "is not valid yet: is the clock right?"}
        yield problem(
            f"the certificate {given.tls_cert} {words.get(error.verify_code, error.verify_message)}",
            renew,
        )
        return
    until = datetime.fromtimestamp(ends_at, UTC).date().isoformat()
    message = f"the certificate {given.tls_cert} is valid until {until}"
    yield ok(message) if ends_at - now > _SOON_SECONDS else warning(message, renew)
    yield from _name(given, given.tls_cert, pair.context)


def _name(given: Settings, cert: Path, server_context: ssl.SSLContext) -> Iterator[Finding]:
    """Compare with the name that clients are told. Behind a proxy that one is the proxy's to prove."""
    public = urlsplit(given.public_base_url or "")
    if public.scheme != "https" or given.trusted_proxies:
        return
    try:
        _end_of(cert, server_context, public.hostname)
    except ssl.SSLCertVerificationError as error:
        yield problem(
            f"the certificate {cert} is not for the host of HEARTH_PUBLIC_BASE_URL: {error.verify_message}",
            "get one that names it, or correct HEARTH_PUBLIC_BASE_URL: clients refuse the server otherwise",
        )


def first_certificate(file: Path) -> str:
    """Return the server's own certificate of a chain in PEM, which has to come first. Raises OSError."""
    own, end, _ = file.read_text(encoding="ascii", errors="replace").partition(_PEM_END)
    return own[max(own.find(_PEM_BEGIN), 0) :] + end


def _end_of(cert: Path, server_context: ssl.SSLContext, name: str | None = None) -> float:
    """Return when the certificate ends, by shaking hands with ourselves in memory, where it alone is trusted.

    Raises ssl.SSLCertVerificationError for one that is not valid now, or not for `name`.
    """
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = name is not None
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client_context.load_verify_locations(cadata=first_certificate(cert))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    for _ in range(3):  # hello, the server's certificate, the end
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return float(ssl.cert_time_to_seconds(str((client.getpeercert() or {})["notAfter"])))
