"""`hearth doctor --bundle FILE`: what a bug report needs, in one archive, without secrets and without words of clients.

Secrets are removed twice: known ones are left out at their source, and every text is then searched for values of the
environment, for what looks like a key or a password, and for names of users.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import pwd
import re
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from engine.placement.report import as_data
from server.cli.doctor.checks import Case, Finding
from server.cli.options import refuse
from server.observability.status import StatusError, ask_metrics, ask_refusals
from server.settings import Settings

_MASK = "***"
_SHORTEST_SECRET = 6
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|HEADERS|DATABASE_URL|AUTH", re.IGNORECASE)
_LOOKS_SECRET = (
    (re.compile(r"hk_[0-9A-Za-z]+_\w+"), _MASK),  # keys of ours, and tokens of hubs
    (re.compile(r"\b(?:hf|sk|ghp|gho)[_-][\w-]{8,}"), _MASK),
    (re.compile(r"://[^\s\"'/]*@"), f"://{_MASK}@"),
    (re.compile(r"(?i)\b(password|passwd|pwd|token|secret|api_?key)=[^\s&\"']+"), rf"\1={_MASK}"),
    (re.compile(r"(?i)\bbearer\s+[^\s\"']+"), f"Bearer {_MASK}"),
    (re.compile(r"/(home|Users)/[^/\s\"':]+"), rf"/\1/{_MASK}"),
)
_README = """\
Made by `hearth doctor --bundle` at {at}.

{server}

In it: versions and the platform, the settings, models.yaml as it was read, the plan, what `hearth doctor` found
(without requests to the server), and of the running server its state, what it refused or failed lately, the last lines
of its log, and its metrics. Left out: keys, passwords, addresses of clients, paths that clients asked for, and
everything that clients wrote. Names of users in paths are masked. Look through it before you share it.
"""


def write_bundle(file: Path, case: Case | None, findings: Sequence[tuple[str, Finding]]) -> None:
    """Write the archive (tar.gz, mode 0600). `case` is None where the settings cannot be read.

    Ends with a message where the file cannot be written, or exists.
    """
    parts, names = _parts(case, findings)
    mask = _Mask(os.environ, names)
    try:
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        refuse(f"{file} was made meanwhile, and is not overwritten. Name another file.", code=1)
    except OSError as error:
        refuse(f"{file} cannot be written: {error.strerror}. Name a file in a folder of yours.", code=1)
    with os.fdopen(opened, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, part in parts.items():
            text = part if isinstance(part, str) else json.dumps(part, indent=1, default=str, ensure_ascii=False)
            data = mask(text).encode()
            entry = tarfile.TarInfo(f"hearth/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))


def _parts(case: Case | None, findings: Sequence[tuple[str, Finding]]) -> tuple[dict[str, Any], list[str]]:
    """Return texts and data by file name, and words to mask in all of them."""
    running = None if case is None else case.running
    server = "No server answered on this data directory: only what is on the disk is in it."
    if running is not None:
        server = f"The server was {running.status}, version {running.version}."
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    parts: dict[str, Any] = {
        "README.txt": _README.format(at=at, server=server),
        "versions.json": _versions(),
        "doctor.json": [{"area": area, **asdict(finding)} for area, finding in findings],
    }
    if case is None:
        return parts, []
    parts["settings.json"] = _settings(case.settings)
    names = _users(case.settings)
    if case.config is not None:
        models, tiers = case.config.entries.items(), case.config.tiers.items()
        shown = {name: spec.model_dump(mode="json") for name, spec in models}
        parts["models.json"] = {"models": shown, "tiers": {name: tier.model_dump(mode="json") for name, tier in tiers}}
    if case.plan is not None:
        parts["plan.json"] = as_data(case.plan, case.hardware)
    if running is not None:
        parts["status.json"] = running.model_dump(mode="json", exclude={"refused"})
        with suppress(StatusError):
            refusals = ask_refusals(case.settings.data_dir)
            found = [] if refusals is None else refusals.data
            parts["refusals.json"] = [one.model_dump(exclude={"path", "request_id", "key"}) for one in found]
            names += [one.request_id for one in found if not one.request_id.startswith("req_")]  # clients chose them
            parts["metrics.txt"] = ask_metrics(case.settings.data_dir) or ""
    return parts, names


def _users(given: Settings) -> list[str]:
    """Return the names of this user and of the data directory's owner, but for those that name no person."""
    found = set()
    for number in {os.geteuid(), *(path.stat().st_uid for path in [given.data_dir] if path.exists())}:
        with suppress(KeyError):
            found.add(pwd.getpwuid(number).pw_name)
    return sorted(found - {"root", "hearth"})


def _versions() -> dict[str, Any]:
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "packages": sorted(f"{one.name}=={one.version}" for one in importlib.metadata.distributions()),
    }


def _settings(given: Settings) -> dict[str, Any]:
    shown = given.model_dump(mode="json")  # secrets are masked by their type
    names = sorted(name for name in os.environ if name.startswith(("HEARTH_", "OTEL_", "VLLM_", "CUDA_", "OMP_")))
    return {"settings": shown, "set": sorted(given.model_fields_set), "environment_names": names}


class _Mask:
    def __init__(self, environment: Mapping[str, str], names: Sequence[str]) -> None:
        secrets = {value for name, value in environment.items() if _SECRET_NAME.search(name)}
        for value in [*environment.values()]:
            with suppress(ValueError):
                secrets.add(urlsplit(value).password or "")
        secrets |= {unquote(secret) for secret in secrets}
        long = sorted((secret for secret in secrets if len(secret) >= _SHORTEST_SECRET), key=len, reverse=True)
        # As they are, and as JSON writes them
        self._secrets = [form for secret in long for form in {secret, json.dumps(secret)[1:-1]}]
        self._home = str(Path.home())
        self._names = [re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])") for name in names]

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, _MASK)
        if len(self._home) > 1:
            text = text.replace(self._home, "~")
        for pattern, mask in _LOOKS_SECRET:
            text = pattern.sub(mask, text)
        for name in self._names:
            text = name.sub(_MASK, text)
        return text
