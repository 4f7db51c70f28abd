"""`hearth doctor` on files: settings that contradict each other, rights, the database. TLS is cli_doctor_tls.py's."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from typing import TYPE_CHECKING

from server.addresses import is_loopback
from server.cli_doctor_findings import Finding
from server.cli_doctor_tls import with_running_tls
from server.command_name import HEARTH, keys_command
from server.store import StoreError
from server.store.migrations import HEAD
from server.store.sqlite import FILE_NAME, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from server.cli_doctor_findings import Case
    from server.settings import Settings

_BASE64 = 4 / 3


def files(case: Case) -> Iterator[Finding]:
    """Look at all of it, but for the weights."""
    yield from settings(case.settings)
    yield from same_as_running(case)
    yield from rights(with_running_tls(case), case.settings.models)
    yield database(case.settings)


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
                f"run this as the server's user: sudo -u {_user(owner)} {HEARTH} doctor",
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
        return Finding("database", "ok", f"{file} is made at the first start, or by: {keys_command(given, 'create')}")
    try:
        version = prepare(file, busy_timeout_seconds=5)
    except StoreError as error:
        return Finding("database", "problem", error.message)
    if version != HEAD:
        return Finding("database", "ok", f"{file} is sound; the next start brings it from {version} to schema {HEAD}")
    return Finding("database", "ok", f"{file} is sound (SQLite's quick_check), schema {HEAD}")
