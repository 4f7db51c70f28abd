"""`hearth doctor` on files: settings that contradict each other, rights, the database, the certificate, weights."""

from __future__ import annotations

import contextlib
import os
import pwd
import ssl
import stat
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from server.addresses import is_loopback
from server.cli_doctor_findings import Finding
from server.store import StoreError
from server.store.database_url import FILE_NAME
from server.store.migrations import HEAD
from server.store.sqlite_file import prepare
from server.tls import TlsError, certificate_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from server.cli_doctor_findings import Case
    from server.settings import Settings

_BASE64 = 4 / 3
_SOON_SECONDS = 21 * 86400
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED
_NOT_YET = 9
_PEM_BEGIN = "-----BEGIN CERTIFICATE-----"
_PEM_END = "-----END CERTIFICATE-----"


def files(case: Case) -> Iterator[Finding]:
    """Look at all of it, but for the weights."""
    yield from settings(case.settings)
    yield from same_as_running(case)
    yield from rights(case.settings, case.config.path)
    yield database(case.settings)
    yield from certificate(case.settings, time.time())


def settings(given: Settings) -> Iterator[Finding]:
    """Values that are right one by one, and do not go together."""
    wrong = list(_contradictions(given))
    names = [name for name in given.model_fields_set if name not in {"data_dir", "weights_dir", "models"}]
    said = f"set are {', '.join(sorted(f'HEARTH_{name.upper()}' for name in names))}" if names else "all as shipped"
    yield from wrong or [Finding("settings", "ok", f"known, valid, without contradictions; {said}")]


def _contradictions(given: Settings) -> Iterator[Finding]:
    if not (is_loopback(given.host) or given.tls_cert or given.trusted_proxies):
        yield Finding(
            "settings",
            "warning",
            f"HEARTH_HOST={given.host} is reached from other machines, without HTTPS: keys and conversations can be "
            "read on the way",
            "set HEARTH_TLS_CERT and HEARTH_TLS_KEY, or put a proxy in front and name it in HEARTH_TRUSTED_PROXIES",
        )
    if "*" in given.cors_origins:
        yield Finding(
            "settings",
            "warning",
            "HEARTH_CORS_ORIGINS=* lets every web page call from a browser",
            "name the origins instead, like https://chat.example.org",
        )
    if given.max_image_bytes * _BASE64 > given.max_body_bytes:
        yield Finding(
            "settings",
            "warning",
            f"a picture of HEARTH_MAX_IMAGE_BYTES={given.max_image_bytes} does not fit into HEARTH_MAX_BODY_BYTES="
            f"{given.max_body_bytes}",
            f"HEARTH_MAX_BODY_BYTES={int(given.max_image_bytes * _BASE64) + 2**20}",
        )
    outside = given.public_base_url
    if outside is not None and outside.startswith("http://") and given.tls_cert is not None:
        yield Finding(
            "settings",
            "problem",
            f"HEARTH_PUBLIC_BASE_URL={outside} is http, and this server speaks only https: no link opens",
            f"HEARTH_PUBLIC_BASE_URL={outside.replace('http://', 'https://', 1)}",
        )


def same_as_running(case: Case) -> Iterator[Finding]:
    """Tell when the running server was started with other paths, so that what is said here is about another one."""
    if case.running is None:
        return
    paths = case.running.paths
    for option, ours, theirs in (
        ("--models", case.settings.models, paths.models),
        ("--weights-dir", case.settings.weights_dir, paths.weights_dir),
    ):
        if str(ours.absolute()) != theirs:
            yield Finding(
                "settings",
                "warning",
                f"the running server uses {theirs}, and {ours} is looked at here",
                f"run this with the server's settings, or with {option} {theirs}",
            )


def rights(given: Settings, models: Path) -> Iterator[Finding]:
    """Whether only the server's user may read what is secret and change what is served."""
    folder = given.data_dir
    if not folder.is_dir():
        yield Finding("rights", "ok", f"{folder} is made, for its user alone, at the first start")
        return
    wrong = [*_folder_rights(folder), *_secret_rights(given), *_writable(models)]
    owner = folder.stat().st_uid
    if owner != os.geteuid():
        wrong.append(
            Finding(
                "rights",
                "warning",
                f"{folder} belongs to {_user(owner)}, and you are {_user(os.geteuid())}",
                f"run this as the server's user: sudo -u {_user(owner)} hearth doctor",
            )
        )
    yield from wrong or [Finding("rights", "ok", f"{folder} and the keys in it are for {_user(owner)} alone")]


def _folder_rights(folder: Path) -> Iterator[Finding]:
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        yield Finding(
            "rights",
            "problem" if mode & 0o007 else "warning",
            f"{folder} has mode {mode:o}: others may look into it",
            f"chmod 700 {folder}",
        )


def _secret_rights(given: Settings) -> Iterator[Finding]:
    names = (FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm", "image-links.key")
    for file in [*(given.data_dir / name for name in names), *([given.tls_key] if given.tls_key else [])]:
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(file.stat().st_mode)
            if mode & 0o007:
                yield Finding(
                    "rights", "problem", f"{file} has mode {mode:o}: everybody may read it", f"chmod 600 {file}"
                )


def _writable(models: Path) -> Iterator[Finding]:
    mode = stat.S_IMODE(models.stat().st_mode)
    if mode & 0o002:
        yield Finding(
            "rights",
            "problem",
            f"{models} has mode {mode:o}: everybody may change what is served",
            f"chmod o-w {models}",
        )


def _user(number: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)


def database(given: Settings) -> Finding:
    """Have SQLite check its file; one on a PostgreSQL server is seen by the self-test, which makes a key in it."""
    file = given.data_dir / FILE_NAME
    if given.database_url is not None:
        return Finding("database", "skipped", "HEARTH_DATABASE_URL is set: the self-test uses that database")
    if not file.exists():
        return Finding("database", "ok", f"{file} is made at the first start, or by: hearth keys create")
    try:
        version = prepare(file, busy_timeout_seconds=5)
    except StoreError as error:
        return Finding("database", "problem", error.message)
    if version != HEAD:
        return Finding("database", "ok", f"{file} is sound; the next start brings it from {version} to schema {HEAD}")
    return Finding("database", "ok", f"{file} is sound (SQLite's quick_check), schema {HEAD}")


def certificate(given: Settings, now: float) -> Iterator[Finding]:
    """Say until when the certificate is valid. Nothing without one."""
    try:
        pair = certificate_of(given)
    except TlsError as error:
        yield Finding("tls", "problem", str(error))
        return
    if pair is None or given.tls_cert is None:
        return
    renew = "renew it, then: hearth reload (or systemctl reload hearth)"
    try:
        ends_at = _end_of(given.tls_cert, pair.context)
    except ssl.SSLCertVerificationError as error:
        told = {_EXPIRED: "has expired", _NOT_YET: "is not valid yet: is the clock right?"}
        yield Finding(
            "tls",
            "problem",
            f"the certificate {given.tls_cert} {told.get(error.verify_code, error.verify_message)}",
            renew,
        )
        return
    until = datetime.fromtimestamp(ends_at, UTC).date().isoformat()
    verdict: bool = ends_at - now > _SOON_SECONDS
    message = f"the certificate {given.tls_cert} is valid until {until}"
    yield Finding("tls", "ok", message) if verdict else Finding("tls", "warning", message, renew)
    yield from _name(given, given.tls_cert, pair.context)


def _name(given: Settings, cert: Path, server_context: ssl.SSLContext) -> Iterator[Finding]:
    """Compare with the name that clients are told. Behind a proxy that one is the proxy's to prove."""
    public = urlsplit(given.public_base_url or "")
    if public.scheme != "https" or given.trusted_proxies:
        return
    try:
        _end_of(cert, server_context, public.hostname)
    except ssl.SSLCertVerificationError as error:
        yield Finding(
            "tls",
            "problem",
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
