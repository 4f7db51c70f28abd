"""What `hearth doctor` checks: files (settings, rights, database, certificate, weights) and this machine."""

import contextlib
import os
import pwd
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from engine import Config
from engine.backends.vllm.processes import runs_on_cpu
from engine.config import (
    AdapterSpec,
    AuxiliaryModelSpec,
    ChatModelSpec,
    EmbeddingModelSpec,
    ImageModelSpec,
    SpeechModelSpec,
    TranscriptionModelSpec,
)
from engine.errors import EngineError
from engine.placement.hardware import Cuda, Hardware, read_cuda
from engine.placement.needs import Footprints, own_folders
from engine.placement.plan import DEMO_OF_TASK, plan
from engine.placement.report import gib, use_line
from engine.placement.types import Plan, Refusal
from engine.voices.catalogue import Catalogue, Voices
from engine.weights.layouts import LoraAdapter, WhisperFolder, check_pooling_folder, read_layout
from engine.weights.manifest import is_complete, required_manifest
from engine.weights.safety import check_chat_folder, check_pipeline_folder
from engine.weights.transfer import local_folders
from server.cli.options import hardware_for
from server.cli.plan import disk_usage, missing_of
from server.cli.weights import verified
from server.http.tls import Certificate, TlsError, certificate_of, first_certificate
from server.observability.status import Status
from server.settings import Settings, is_loopback, outside_address, reserve_bytes
from server.store import StoreError
from server.store.migrations import HEAD
from server.store.sqlite import FILE_NAME, prepare
from server.terminal import HEARTH, keys_command, size_text

_BASE64 = 4 / 3
_SECRETS = (FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm", "image-links.key")
_INVALID = {9: "is not valid yet: is the clock right?", 10: "has expired"}  # by OpenSSL's X509_V_ERR_CERT_...


@dataclass(frozen=True, slots=True)
class Case:
    """The machine and the configuration to check. `running` is the server, None if none answers.

    `config` and `plan` are None if models.yaml cannot be read.
    """

    settings: Settings
    config: Config | None
    hardware: Hardware
    cuda: Cuda
    on_cpu_build: bool
    plan: Plan | Refusal | None
    running: Status | None
    full: bool = False
    """Also hash all weights that were fetched."""
    unloaded: bool = False
    """Also test models that are not loaded."""
    now: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and what to do if it is not well."""

    verdict: Literal["ok", "warning", "problem", "skipped"]
    message: str
    remedy: str | None = None
    seconds: float | None = None
    """How long a request took."""


ok, warning = partial(Finding, "ok"), partial(Finding, "warning")
problem, skipped = partial(Finding, "problem"), partial(Finding, "skipped")


def case_of(given: Settings, config: Config | None, running: Status | None) -> Case:
    """Look at the machine and make the plan for it (some 100 ms). What a running server has taken counts as free."""
    hardware, on_cpu = hardware_for(given), runs_on_cpu()
    planned = replace(hardware, gpus=()) if on_cpu else hardware
    found = None
    if config is not None:
        found = plan(config, planned, Footprints.read(given.data_dir), own_folders(config, given.weights_dir))
    return Case(given, config, hardware, read_cuda(), on_cpu_build=on_cpu, plan=found, running=running)


def settings(case: Case) -> Iterator[Finding]:
    """Values that are valid one by one, but contradict each other or the running server's."""
    given = case.settings
    wrong = list(_contradictions(given))
    names = ", ".join(sorted(f"HEARTH_{name.upper()}" for name in given.model_fields_set))
    which = f"set in this terminal are {names}" if names else "all as shipped"
    yield from wrong or [ok(f"valid; {which}")]
    if case.running is None:
        return
    paths = case.running.paths
    both = {"--models": (given.models, paths.models), "--weights-dir": (given.weights_dir, paths.weights_dir)}
    for option, (ours, theirs) in both.items():
        if str(ours.absolute()) != theirs:
            yield warning(
                f"the running server uses {theirs}, and this command checked {ours}",
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
        yield ok(f"{folder} is created at the first start, readable by its user only")
        return
    wrong = list(_open_to_others(with_running_tls(case)))
    owner, me = _user(folder.stat().st_uid), _user(os.geteuid())
    if owner != me:
        remedy = f"run this as the server's user: sudo -u {owner} {HEARTH} doctor"
        wrong.append(warning(f"{folder} belongs to {owner}, and you are {me}", remedy))
    yield from wrong or [ok(f"only {owner} can read {folder} and its keys")]


def _open_to_others(given: Settings) -> Iterator[Finding]:
    secrets = [*(given.data_dir / name for name in _SECRETS), *([given.tls_key] if given.tls_key else [])]
    for path, forbidden, meaning, command in (
        (given.data_dir, 0o077, "readable by other users", "chmod 700"),
        *((file, 0o007, "other users can read it", "chmod 600") for file in secrets),
        (given.models, 0o002, "other users can change what is served", "chmod o-w"),
    ):
        with contextlib.suppress(OSError):  # absent, or unreadable for us: then the folder's owner is reported below
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
    if not os.access(file.parent, os.X_OK) and file.parent.exists():
        yield skipped(f"{file.parent} is not open to this user")
        return
    if not file.exists():
        yield ok(f"{file} is created at the first start, or by: {keys_command(given, 'create')}")
        return
    try:
        version = prepare(file, busy_timeout_seconds=5)
    except StoreError as error:
        yield problem(error.message)
        return
    migrates = f"; the next start brings it from {version} to schema {HEAD}"
    yield ok(f"{file} is sound" + (migrates if version != HEAD else f" (SQLite's quick_check), schema {HEAD}"))


def tls(case: Case) -> Iterator[Finding]:
    """Check the files, and whether the running server shows their certificate. Nothing for plain HTTP."""
    given = with_running_tls(case)
    yield from certificate(given, case.now)
    if case.running is None or case.running.base_url is None or given.tls_cert is None:
        return
    at = urlsplit(case.running.base_url)
    try:
        served = ssl.get_server_certificate((at.hostname or "", at.port or 443), timeout=10)  # not verified
        same = ssl.PEM_cert_to_DER_cert(served) == ssl.PEM_cert_to_DER_cert(first_certificate(given.tls_cert))
    except (OSError, ValueError):  # the self-test reports a silent server; a broken file was reported above
        return
    if not same:
        yield problem(
            f"the running server shows another certificate than that in {given.tls_cert}: it was not reloaded",
            f"{HEARTH} reload (or systemctl reload hearth)",
        )


def with_running_tls(case: Case) -> Settings:
    """Return the settings with the running server's host, certificate and key, which flags may have set."""
    if case.running is None:
        return case.settings
    given = case.running.paths.model_dump(include={"tls_cert", "tls_key"})
    files = {name: path and Path(path) for name, path in given.items()}
    return case.settings.model_copy(update={"host": case.running.host, **files})


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
        ends_at = pair.ends_at()
    except ssl.SSLCertVerificationError as error:
        wrong = _INVALID.get(error.verify_code, error.verify_message)
        yield problem(f"the certificate {given.tls_cert} {wrong}", renew)
        return
    message = f"the certificate {given.tls_cert} is valid until {datetime.fromtimestamp(ends_at, UTC):%Y-%m-%d}"
    yield ok(message) if ends_at - now > 21 * 86400 else warning(message, renew)
    yield from _name(given, pair)


def _name(given: Settings, pair: Certificate) -> Iterator[Finding]:
    """Compare with the host that clients are told. Behind a proxy, the proxy's certificate has to be for that."""
    public = urlsplit(given.public_base_url or "")
    if given.trusted_proxies or (given.public_base_url and public.scheme != "https"):
        return
    if public.hostname and not pair.names(public.hostname):
        yield problem(
            f"the certificate {given.tls_cert} is not for {public.hostname}, the host of HEARTH_PUBLIC_BASE_URL",
            "get one that names it, or correct HEARTH_PUBLIC_BASE_URL: clients refuse the server otherwise",
        )
    address = None if public.hostname or is_loopback(given.host) else outside_address(given.host)
    if address and not pair.names(address):
        yield warning(
            f"the certificate {given.tls_cert} is not for {address}: clients that use this address refuse the server",
            "HEARTH_PUBLIC_BASE_URL=https://NAME, a name that it is for, or one that has this address, too "
            "(docs/operations.md#https)",
        )


def weights(case: Case) -> Iterator[Finding]:
    """Look at what every model is served with, then at the folders."""
    if case.config is None:
        yield skipped("weights are not checked: models.yaml cannot be read")
    else:
        for spec in case.config.models.values():
            if not isinstance(spec, SpeechModelSpec):
                yield _model(case, spec)
        for adapter in case.config.adapters.values():
            yield _adapter(adapter, case.settings.weights_dir / adapter.weights)
        yield from _missing_room(case)
    yield from _folders(case.settings.weights_dir, full=case.full)


def voices(case: Case) -> Iterator[Finding]:
    """Whether each speech model has voices that can speak."""
    if case.config is not None:
        offered = Voices(case.config, case.settings.weights_dir)
        for spec in case.config.models.values():
            if isinstance(spec, SpeechModelSpec):
                yield from _voices(spec.id, offered.of(spec.id))


def _model(case: Case, spec: ChatModelSpec | ImageModelSpec | AuxiliaryModelSpec) -> Finding:
    own = case.settings.weights_dir / spec.weights
    if own.is_dir():
        try:
            _check_own(spec, own)
        except EngineError as error:
            return problem(f"{spec.id}: {error.message}")
        return ok(f"{spec.id}: the files of your folder {spec.weights} have the right sizes")
    placed = case.plan.of(spec.id) if isinstance(case.plan, Plan) else None
    variant = None if placed is None else placed.variant
    if variant is not None and is_complete(case.settings.weights_dir / variant.id):
        return ok(f"{spec.id}: {variant.id} is complete")
    if spec.demo is None:
        fetched = variant is not None and variant.repository is not None
        remedy = f"{HEARTH} weights pull {spec.id}" if fetched else f"put a model into {own}"
        demo = "vision" if "vision" in spec.capabilities else DEMO_OF_TASK[spec.task]
        remedy += f"; or set `demo: {demo}` in models.yaml"
        return problem(f"{spec.id}: no weights are here, and no demo is named", remedy)
    if variant is None or variant.repository is None:
        return ok(f"{spec.id}: the demo answers; nothing better is planned ({HEARTH} plan says why)")
    return warning(f"{spec.id}: the demo answers, since {variant.id} is not here", f"{HEARTH} weights pull {spec.id}")


def _adapter(spec: AdapterSpec, folder: Path) -> Finding:
    try:
        LoraAdapter.read(folder)
    except EngineError as error:
        return problem(f"{spec.id}: {error.message}")
    return ok(f"{spec.id}: its folder {spec.weights} has a LoRA adapter")


def _check_own(spec: ChatModelSpec | ImageModelSpec | AuxiliaryModelSpec, folder: Path) -> None:
    """Raise `LoadError` for what its loader would refuse."""
    if isinstance(spec, ImageModelSpec):
        check_pipeline_folder(folder)
    elif isinstance(spec, ChatModelSpec):
        check_chat_folder(folder)
    elif isinstance(spec, TranscriptionModelSpec):
        WhisperFolder.read(folder)
    else:
        check_pooling_folder(folder)
        if isinstance(spec, EmbeddingModelSpec):
            read_layout(folder, spec.pooling)


def _voices(model: str, offered: Catalogue) -> Iterator[Finding]:
    if offered.problem is not None:
        yield problem(f"{model}: {offered.problem.message}")
        return
    if warnings := offered.warnings:
        more = "" if len(warnings) == 1 else f" (and {len(warnings) - 1} more remarks on voices)"
        yield warning(f"{model}: {warnings[0].message}{more}", f"{HEARTH} voices shows all")
    able = [voice for voice in offered.voices if voice.available]
    if not able:
        yield problem(f"{model}: no voice can speak", f"{HEARTH} voices says why; docs/voices.md")
        return
    demos = sum(voice.demo for voice in able)
    yield ok(f"{model}: {len(able)} voices can speak, {demos} of them demos")


def _missing_room(case: Case) -> Iterator[Finding]:
    """Whether the planned weights that are not here would fit on the disk."""
    if case.config is None or not isinstance(case.plan, Plan):
        return
    missing = missing_of(case.config, case.settings.weights_dir, case.plan)
    absent = [variant for _, variant in missing if variant.repository is not None]
    needed = sum(variant.fetched_gib for variant in absent) * 2**30
    free = disk_usage(case.settings.weights_dir)[2]
    if needed > free:
        yield warning(
            f"what the plan wants ({', '.join(variant.id for variant in absent)}) takes {size_text(needed)}, and "
            f"{size_text(free)} are free in {case.settings.weights_dir}",
            "free space, or set HEARTH_WEIGHTS_DIR to another disk",
        )


def _folders(weights_dir: Path, *, full: bool) -> Iterator[Finding]:
    try:
        found = local_folders(weights_dir)
    except EngineError as error:
        yield problem(error.message)
        return
    for one in found:
        again = f"{HEARTH} weights pull {one.folder} --again, or import it again"
        if one.state == "damaged":
            yield problem(f"{one.folder} is incomplete: files are missing or have another size", again)
        elif one.state == "partial":
            yield warning(
                f"{one.folder} is partly fetched ({size_text(one.size_bytes)})",
                f"{HEARTH} weights pull {one.folder} or the same import goes on; "
                f"{HEARTH} weights remove {one.folder} frees the space",
            )
        elif one.state == "complete" and full:
            if wrong := verified(weights_dir / one.folder, one.folder, quiet=True):
                yield problem(f"{one.folder}: {'; '.join(wrong)}", again)
            else:
                count = len(required_manifest(weights_dir / one.folder).files)
                yield ok(f"{one.folder}: all {count} files have the content that was fetched (SHA-256)")


def gpu(case: Case) -> Iterator[Finding]:
    """GPUs, and whether the installed build is for them."""
    hardware = case.hardware
    if not hardware.gpus and case.on_cpu_build:
        features = f" ({', '.join(hardware.cpu_features)})" if hardware.cpu_features else ""
        yield ok(f"{hardware.problem or 'no NVIDIA GPU'}: models run on {hardware.cpu_cores} CPU cores{features}")
    elif not hardware.gpus:
        yield problem(
            f"no GPU ({hardware.problem}), but vLLM's build for CUDA is installed",
            "repair the driver until `nvidia-smi` shows the GPU (a container has to be started with GPUs), or serve on "
            "the CPU: ./scripts/setup --cpu",
        )
    elif case.on_cpu_build:
        names = ", ".join(one.name for one in hardware.gpus)
        unused = f"vLLM's build for CPUs is installed, so nothing runs on the GPUs there are: {names}"
        yield problem(unused, "./scripts/setup --cuda")
    else:
        yield from _each_gpu(case)


def _each_gpu(case: Case) -> Iterator[Finding]:
    # CUDA 13 dropped what is older than Turing; before that Volta was the oldest that vLLM is built for.
    oldest = (7, 5) if case.cuda.torch is not None and case.cuda.torch[0] >= 13 else (7, 0)
    for one in case.hardware.gpus:
        if one.compute_capability and one.compute_capability < oldest:
            yield problem(
                f"GPU {one.index}, {one.name}, has compute capability {_dotted(one.compute_capability)}; this build "
                f"needs {_dotted(oldest)}",
                "hide it with CUDA_VISIBLE_DEVICES, or serve on the CPU: ./scripts/setup --cpu",
            )
            continue
        capability = f", compute capability {_dotted(one.compute_capability)}" if one.compute_capability else ""
        yield ok(f"GPU {one.index}, {one.name}, {gib(one.total_bytes)}{capability}, {_driver(case)}")
        if one.foreign_bytes >= 2**30:
            holders = [f"{holder.name} (process {holder.pid})" for holder in one.holders if not holder.ours]
            yield warning(
                f"{gib(one.foreign_bytes)} of GPU {one.index} are taken by others: "
                f"{', '.join(holders) or 'unknown processes'}",
                "stop them if they are not needed: the plan does not use their memory",
            )


def cuda(case: Case) -> Iterator[Finding]:
    """Whether the driver is new enough for torch. Nothing where the CPU serves."""
    if not case.hardware.gpus or case.on_cpu_build:
        return
    build, driver = case.cuda.torch, case.cuda.driver
    if build is None:
        yield problem("torch is installed without CUDA", "./scripts/setup --cuda")
    elif driver is None:
        yield warning(f"torch is built for CUDA {_dotted(build)}; the {_driver(case)} does not say")
    elif driver[0] < build[0]:  # within one major version newer libraries run on older drivers
        yield problem(
            f"torch is built for CUDA {_dotted(build)}, the driver supports up to CUDA {_dotted(driver)}",
            f"install a driver for CUDA {build[0]} or newer (`nvidia-smi` shows which CUDA it is for)",
        )
    else:
        yield ok(f"torch is built for CUDA {_dotted(build)}, {_driver(case)}")


def memory(case: Case) -> Iterator[Finding]:
    """Compare the memory that the models need with what there is."""
    found, hardware = case.plan, case.hardware
    if found is None:
        yield skipped("memory is not planned: models.yaml cannot be read")
    elif isinstance(found, Refusal):
        yield problem(found.message, found.change)
    else:
        turns = [one.id for one in found.models if one.state == "swapped"]
        share = f"; {', '.join(turns)} take turns" if turns else ""
        yield ok(f"the planned weights fit{share}. {'; '.join(use_line(use) for use in found.devices)}")
    given = case.settings.ram_gib
    if given is not None and given * 2**30 > hardware.ram_bytes:
        yield problem(
            f"HEARTH_RAM_GIB={given:g} is more than this machine's {gib(hardware.ram_bytes)}",
            f"HEARTH_RAM_GIB={int(hardware.ram_bytes * 0.9 / 2**30) or 1}, or leave it out",
        )


def disk(case: Case) -> Iterator[Finding]:
    """The free space of the disks of data and weights."""
    reserve = reserve_bytes(case.settings) if case.running is None else case.running.reserve_bytes
    for name, folder in {"data": case.settings.data_dir, "weights": case.settings.weights_dir}.items():
        total, _, free = disk_usage(folder)
        message = f"{size_text(free)} of {size_text(total)} are free for {name} ({folder})"
        if free < 256 * 2**20:
            yield problem(message, "free space: without it neither keys nor usage can be written")
        elif name == "data" and free < reserve:
            yield warning(
                f"{message}, less than HEARTH_DISK_RESERVE_GIB ({reserve / 2**30:g}): files and recordings are refused",
                "free space, or lower HEARTH_DISK_RESERVE_GIB",
            )
        elif free < 0.05 * total:
            yield warning(message, f"free space: {HEARTH} weights list, HEARTH_IMAGE_FOLDER_GIB")
        else:
            yield ok(message)


def port(case: Case) -> Iterator[Finding]:
    """Whether the server listens, or can."""
    if case.running is not None and case.running.base_url is not None:
        yield ok(f"the server (process {case.running.pid}) listens at {case.running.base_url}")
        return
    host, number = case.settings.host, case.settings.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            see = f"`ss -ltnp sport = :{number}` shows it"
            remedy = f"stop what listens there ({see}), or take another port with HEARTH_PORT"
            yield problem(f"{host} port {number} cannot be listened on: {error.strerror}", remedy)
        else:
            yield ok(f"{host} port {number} is free for the server")


def clock(case: Case) -> Iterator[Finding]:
    """Compare the time with the date of our own files, which cannot be in the future."""
    now = datetime.fromtimestamp(case.now, UTC)
    installed = datetime.fromtimestamp(Path(__file__).stat().st_mtime, UTC)
    if now < installed - timedelta(days=1):
        before = f"it is {now:%Y-%m-%d %H:%M:%S} UTC, before Hearth was installed ({installed:%Y-%m-%d})"
        remedy = "set the clock: timedatectl set-ntp true"
        yield problem(f"{before}; keys, limits, links and certificates depend on it", remedy)
    else:
        yield ok(f"it is {now:%Y-%m-%d %H:%M:%S} UTC, after the installation; not compared with another clock")


def _driver(case: Case) -> str:
    made_for = case.cuda.driver
    return f"driver {case.hardware.driver}" + (f" for CUDA {_dotted(made_for)}" if made_for else "")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# In this order; shown under their names
CHECKS = (settings, rights, database, tls, gpu, cuda, memory, disk, port, clock, weights, voices)
