"""`hearth doctor` on files: settings that contradict each other, rights, the database."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from collections.abc import Iterator

from server.cli.doctor.findings import Case, Finding, ok, problem, skipped, warning
from server.cli.doctor.tls import with_running_tls
from server.settings import Settings, is_loopback
from server.store import StoreError
from server.store.migrations import HEAD
from server.store.sqlite import FILE_NAME, prepare
from server.terminal import HEARTH, keys_command

_BASE64 = 4 / 3
_SECRETS = (FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm", "image-links.key")


def settings(case: Case) -> Iterator[Finding]:
    """Values that are right one by one, and do not go together, or not with those of the running server."""
    given = case.settings
    wrong = list(_contradictions(given))
    names = [name for name in given.model_fields_set if name not in {"data_dir", "weights_dir", "models"}]
    which = f"set are {', '.join(sorted(f'HEARTH_{name.upper()}' for name in names))}" if names else "all as shipped"
    yield from wrong or [ok(f"known, valid, without contradictions; {which}")]
    if case.running is None:
        return
    paths = case.running.paths
    for option, ours, theirs in (
        ("--models", given.models, paths.models),
        ("--weights-dir", given.weights_dir, paths.weights_dir),
    ):
        if str(ours.absolute()) != theirs:
            yield warning(
                f"the running server uses {theirs}, and {ours} is looked at here",
                f"run this with the server's settings, or with {option} {theirs}",
            )


def _contradictions(given: Settings) -> Iterator[Finding]:
    if not (is_loopback(given.host) or given.tls_cert or given.trusted_proxies):
        yield warning(
            f"HEARTH_HOST={given.host} is reached from other machines, without HTTPS: keys and conversations can be "
            "read on the way",
            "set HEARTH_TLS_CERT and HEARTH_TLS_KEY, or put a proxy in front and name it in HEARTH_TRUSTED_PROXIES",
        )
    if "*" in given.cors_origins:
        yield warning(
            "HEARTH_CORS_ORIGINS=* lets every web page call from a browser",
            "name the origins instead, like https://chat.example.org",
        )
    if given.max_image_bytes * _BASE64 > given.max_body_bytes:
        yield warning(
            f"a picture of HEARTH_MAX_IMAGE_BYTES={given.max_image_bytes} does not fit into HEARTH_MAX_BODY_BYTES="
            f"{given.max_body_bytes}",
            f"HEARTH_MAX_BODY_BYTES={int(given.max_image_bytes * _BASE64) + 2**20}",
        )
    outside = given.public_base_url
    if outside is not None and outside.startswith("http://") and given.tls_cert is not None:
        yield problem(
            f"HEARTH_PUBLIC_BASE_URL={outside} is http, and this server speaks only https: no link opens",
            f"HEARTH_PUBLIC_BASE_URL={outside.replace('http://', 'https://', 1)}",
        )


def rights(case: Case) -> Iterator[Finding]:
    """Whether only the server's user may read what is secret and change what is served."""
    folder = case.settings.data_dir
    if not folder.is_dir():
        yield ok(f"{folder} is made, for its user alone, at the first start")
        return
    wrong = list(_open_to_others(with_running_tls(case)))
    owner = folder.stat().st_uid
    if owner != os.geteuid():
        wrong.append(
            warning(
                f"{folder} belongs to {_user(owner)}, and you are {_user(os.geteuid())}",
                f"run this as the server's user: sudo -u {_user(owner)} {HEARTH} doctor",
            )
        )
    yield from wrong or [ok(f"{folder} and the keys in it are for {_user(owner)} alone")]


def _open_to_others(given: Settings) -> Iterator[Finding]:
    secrets = [*(given.data_dir / name for name in _SECRETS), *([given.tls_key] if given.tls_key else [])]
    for path, forbidden, meaning, command in (
        (given.data_dir, 0o077, "others may look into it", "chmod 700"),
        *((file, 0o007, "everybody may read it", "chmod 600") for file in secrets),
        (given.models, 0o002, "everybody may change what is served", "chmod o-w"),
    ):
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & forbidden:
                finding = problem if mode & 0o007 else warning
                yield finding(f"{path} has mode {mode:o}: {meaning}", f"{command} {path}")


def _user(number: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)


def database(case: Case) -> Iterator[Finding]:
    """Have SQLite check its file; one on a PostgreSQL server is seen by the self-test, which makes a key in it."""
    given = case.settings
    file = given.data_dir / FILE_NAME
    if given.database_url is not None:
        yield skipped("HEARTH_DATABASE_URL is set: the self-test uses that database")
        return
    if not file.exists():
        yield ok(f"{file} is made at the first start, or by: {keys_command(given, 'create')}")
        return
    try:
        version = prepare(file, busy_timeout_seconds=5)
    except StoreError as error:
        yield problem(error.message)
        return
    if version != HEAD:
        yield ok(f"{file} is sound; the next start brings it from {version} to schema {HEAD}")
    else:
        yield ok(f"{file} is sound (SQLite's quick_check), schema {HEAD}")
