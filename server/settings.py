"""How this machine runs Hearth: environment variables `HEARTH_*`, read once. models.yaml says what is served."""

import ipaddress
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, SecretStr, ValidationError

from server.validation import sentence

_PREFIX = "HEARTH_"
# Read by set-up, by `hearth batches`, and by examples in the docs and the banner.
_NOT_OURS = {"HEARTH_PYTHON", "HEARTH_KEY", "HEARTH_URL", "HEARTH_MODEL"}
_CHECKOUT = Path(__file__).parents[1]
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_][A-Za-z0-9._-]*)*/?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class SettingsError(Exception):
    """A setting is wrong; the message lists every problem and says what to do."""


def _in_checkout(name: str) -> Path:
    """Return a default path: in the checkout, if this is one, else relative to the current folder."""
    return _CHECKOUT / name if (_CHECKOUT / "models.yaml").is_file() else Path(name)


def _base_address(value: str) -> str:
    """Return the base address of client libraries, which ends in /v1; the server's address is accepted, too."""
    parts = urlsplit(value)
    more = "@" in parts.netloc or parts.query or parts.fragment
    if parts.scheme not in {"http", "https"} or not parts.hostname or more:
        raise ValueError("must be an address like https://hearth.example.org or https://hearth.example.org/v1")
    return f"{value.rstrip('/').removesuffix('/v1')}/v1"


def _origin(value: str) -> str:
    """Write an origin as browsers send it: lower case, no path, no default port."""
    if value == "*":
        return value
    origin = value.lower().rstrip("/")
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(
            f"`{value}` is not an origin: name scheme and host, and the port if it is not the usual one, like "
            "https://chat.example.org or http://localhost:3000, separated by commas; or * for every web page"
        )
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition("://")[0], "-"))


def _files_url(value: str) -> str:
    parts = urlsplit(value)
    is_folder = parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")
    is_bucket = parts.scheme == "s3" and _BUCKET.fullmatch(value)
    if not (is_folder or is_bucket) or parts.query or parts.fragment:
        raise ValueError("must be a folder like file:///srv/hearth-files, or a bucket like s3://hearth or s3://my/part")
    return value.rstrip("/") if is_bucket else value


def _network(value: str) -> str:
    """Check the address or network of a proxy. Host names are refused: their address could change."""
    with suppress(ValueError):
        if ipaddress.ip_network(value).prefixlen > 0:
            return value
    raise ValueError(
        f"`{value}` is not the address of a proxy: name each one like 10.0.0.2, or its network like 172.18.0.0/16, "
        "separated by commas. A wildcard is not accepted: any client could then claim any address"
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def outside_address(host: str) -> str | None:
    """Return the address at which other machines reach a server that listens on `host`; None if unknown."""
    if host not in {"0.0.0.0", "::"}:  # noqa: S104
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address for documentation; nothing is sent, the kernel picks a route
        return str(probe.getsockname()[0])
    return None


def _split_commas(value: Any) -> Any:
    """Return the items of a comma-separated environment variable as a tuple."""
    return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value


_Item = TypeVar("_Item", bound=str)
_List = Annotated[tuple[_Item, ...], BeforeValidator(_split_commas)]


class Settings(BaseModel, frozen=True, extra="forbid"):
    """Every field is `HEARTH_<NAME>` in the environment; flags of `hearth serve` win over it."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    data_dir: Path = Field(
        default_factory=lambda: _in_checkout("var"), description="key store, logs and generated files"
    )
    database_url: SecretStr | None = Field(
        None, description="postgresql+psycopg://user:password@host/name; else a SQLite file in the data directory"
    )
    key_stale_seconds: float = Field(
        300.0, ge=0, allow_inf_nan=False, description="how long known keys work while the database fails"
    )
    weights_dir: Path = Field(default_factory=lambda: _in_checkout("weights"), description="one folder per real model")
    models: Path = Field(default_factory=lambda: _in_checkout("models.yaml"), description="what is served")
    max_body_bytes: int = Field(25 * 2**20, ge=1024, description="larger request bodies are refused (413)")
    max_bodies_bytes: int = Field(
        512 * 2**20, ge=2**20, description="request bodies in memory; beyond it, keys with their share get 503"
    )
    max_running_requests: int = Field(1024, ge=1, description="of all keys; beyond it, keys with their share get 503")
    max_messages: int = Field(2048, ge=1, le=4096, description="messages in one conversation")
    max_batch_items: int = Field(256, ge=1, le=4096, description="chat bodies in one batch")
    max_file_bytes: int = Field(2**30, ge=1024, description="one uploaded file; larger ones are refused (413)")
    max_recording_bytes: int = Field(
        500 * 2**20, ge=1024, description="one recording to transcribe; larger ones are refused (413)"
    )
    key_files_gib: float = Field(10, gt=0, le=2**20, description="the files of a key together (429)")
    file_retention_days: float = Field(
        30, gt=0, le=3660, description="files are deleted after that, unless their client has said when"
    )
    files_url: Annotated[str, AfterValidator(_files_url)] | None = Field(
        None, description="file:///folder or s3://bucket/part that all servers of one PostgreSQL share"
    )
    max_batch_lines: int = Field(50_000, ge=1, le=1_000_000, description="lines in the file of a batch")
    disk_reserve_gib: float = Field(
        1, ge=0, le=2**20, description="what files of batches leave free on the disk of the data directory (507)"
    )
    max_image_bytes: int = Field(10 * 2**20, ge=1024, description="one picture as a file")
    max_image_megapixels: float = Field(36, gt=0, le=1000, description="one picture; together twice as many")
    fetch_images: bool = Field(default=False, description="whether pictures may be https addresses, too")
    public_base_url: Annotated[str, AfterValidator(_base_address)] | None = Field(
        None, description="where clients reach this server, for links to images; else as each client has called it"
    )
    ram_gib: float | None = Field(None, gt=0, le=2**20, description="RAM that models may take together")
    prefer: Literal["resident", "quality"] = Field(
        "resident", description="where not all models fit: that they stay loaded, or better ones that take turns"
    )
    image_retention_hours: float = Field(24, gt=0, le=24 * 366, description="generated images are deleted after that")
    image_folder_gib: float = Field(2, ge=0.1, le=2**20, description="generated images together; the oldest go first")
    image_mark: bool = Field(
        default=True, description="whether images and audio files say in their metadata that a model made them"
    )
    open_voice_list: bool = Field(
        default=False, description="whether the lists of voices and speech models answer without a key"
    )
    trusted_proxies: _List[Annotated[str, AfterValidator(_network)]] = Field(
        (), description="addresses or networks of proxies whose X-Forwarded-For and -Proto are believed, with commas"
    )
    cors_origins: _List[Annotated[str, AfterValidator(_origin)]] = Field(
        (), description="origins of web pages that may call from a browser, with commas; * for all"
    )
    console: bool = Field(default=True, description="whether this server has a page for browsers at its address")
    tls_cert: Path | None = Field(None, description="certificate with its chain, PEM: speak HTTPS")
    tls_key: Path | None = Field(None, description="the certificate's private key, PEM")
    drain_seconds: float = Field(30.0, ge=0, description="time for running requests after SIGTERM")
    keep_alive_seconds: float = Field(15.0, gt=0, description="pause between SSE comments while a stream waits")
    write_stall_seconds: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="a client that takes nothing of its answer for so long has left"
    )
    vllm_metrics: bool = Field(default=True, description="whether vLLM counts for /metrics; some 5 us per token")
    trace_key_ids: bool = Field(default=False, description="whether the spans of requests name the key's public id")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what goes to standard error")


def files_folder(settings: Settings) -> Path | None:
    """Return the folder that all servers share for files; None: there is none, or a bucket is shared."""
    shared = None if settings.files_url is None else urlsplit(settings.files_url)
    return Path(unquote(shared.path)) if shared is not None and shared.scheme == "file" else None


def files_bucket(settings: Settings) -> str | None:
    """Return the address of the bucket that all servers share for files; None: there is none."""
    return settings.files_url if settings.files_url is not None and settings.files_url.startswith("s3:") else None


def reserve_bytes(settings: Settings) -> int:
    """Return what files leave free on the disk of the data directory."""
    return int(settings.disk_reserve_gib * 2**30)


def database_url(settings: Settings) -> str:
    """Return where keys, limits and usage are kept. It may have a password: only for `Database.open`."""
    if settings.database_url is not None:
        return settings.database_url.get_secret_value()
    from server.store.sqlite import FILE_NAME, sqlite_url

    return sqlite_url(settings.data_dir / FILE_NAME)


def load_settings(**flags: Any) -> Settings:
    """Read the environment; `flags` that are not None win. Raises `SettingsError`."""
    problems = _unknown_names()
    variables = {name: os.environ.get(f"{_PREFIX}{name.upper()}") for name in Settings.model_fields}
    given = variables | {name: value for name, value in flags.items() if value is not None}
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        problems += [f"{_PREFIX}{str(item['loc'][0]).upper()}: {sentence(item)}" for item in error.errors()]
    else:
        if settings.files_url is not None and settings.database_url is None:
            problems.append("HEARTH_FILES_URL: needs HEARTH_DATABASE_URL, which says whose the shared files are")
    if problems:
        raise SettingsError("The settings are wrong:\n" + "\n".join(f"  {problem}" for problem in problems))
    return settings


def _unknown_names() -> list[str]:
    known = {_PREFIX + name.upper() for name in Settings.model_fields} | _NOT_OURS
    problems = []
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in known:
            from engine.config.messages import near_miss

            near = near_miss(name, known)
            hint = f"did you mean {near}?" if near else f"known are {', '.join(sorted(known))}"
            problems.append(f"{name}: there is no such setting; {hint}")
    return problems


def check_for_cluster(settings: Settings) -> None:
    """Refuse what replicas on several machines cannot share. Raises `SettingsError`."""
    problems = []
    if settings.database_url is None:
        problems.append(
            "HEARTH_DATABASE_URL: a cluster needs PostgreSQL (postgresql+psycopg://user:password@host/name). A SQLite "
            "file belongs to one server: limits and revoked keys would be each replica's own"
        )
    if settings.files_url is None:
        problems.append(
            "HEARTH_FILES_URL: a cluster needs a place for files that all machines share, like file:///srv/hearth or "
            "s3://bucket/hearth. A link to an image may be opened at any replica"
        )
    if settings.tls_cert is not None:
        problems.append("HEARTH_TLS_CERT: in a cluster a proxy in front of it has the certificate (docs/cluster.md)")
    if problems:
        raise SettingsError("The settings are wrong:\n" + "\n".join(f"  {problem}" for problem in problems))
