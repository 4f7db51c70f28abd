"""`hearth doctor`'s self-test: asks the running server over HTTP, with a key that lives no longer than the test."""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

from engine import AWAITS_TURN
from server.cli_doctor_calls import Call, WrongAnswerError, common, of_model
from server.cli_doctor_findings import Finding
from server.cli_doctor_tls import first_certificate
from server.command_name import HEARTH
from server.settings import database_url
from server.store import Database, KeyLimits, KeyStore, StoreError
from server.store.api_key import DEFAULT_SCOPES, utc_now
from server.store.sqlite import FILE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine import Config
    from server.cli_doctor_findings import Case
    from server.schemas.status import Status
    from server.settings import Settings

_LONGEST_SECONDS = 300.0  # an image of a large model
_CONNECT_SECONDS = 5.0
_KEY_LIVES = timedelta(minutes=30)
_KEY_NAME = "hearth doctor"
# Its own, so that a tier's limits do not make the test fail.
_LIMITS = KeyLimits(
    requests_per_minute=600, tokens_per_minute=1_000_000, parallel_requests=8, batch_items=8, images_per_day=100
)


def selftest(case: Case, *, unloaded: bool) -> Iterator[Finding]:
    """Try every endpoint with every model that is ready; with `unloaded` also those that await their turn."""
    running = case.running
    if running is None:
        yield Finding(
            "self-test",
            "skipped",
            "no running server answers here",
            "start one with scripts/serve, then run this again",
        )
        return
    config = case.config
    if config is None:
        yield Finding("self-test", "skipped", "it needs a tier for its key, and models.yaml cannot be read")
        return
    if running.base_url is None or running.status == "draining":
        yield Finding("self-test", "skipped", "the server is ending")
        return
    if case.settings.database_url is None and not (case.settings.data_dir / FILE_NAME).exists():
        yield Finding(
            "self-test",
            "skipped",
            "the server keeps its keys in another database than the settings here say",
            "run this with the server's HEARTH_DATABASE_URL",
        )
        return
    try:
        with _key(case.settings, config) as key, _client(running, key) as client:
            yield from _calls(client, running, unloaded=unloaded)
    except StoreError as error:
        yield Finding("self-test", "problem", f"its key cannot be made or deleted: {error.message}")
    except httpx2.HTTPError as error:
        yield _cut_short(error, running.paths.tls_cert)
    except OSError as error:
        yield Finding("self-test", "problem", f"the server's certificate {running.paths.tls_cert}: {error.strerror}")


def _cut_short(error: httpx2.HTTPError, tls_cert: str | None) -> Finding:
    """Say what it means that nobody, or somebody else, answers at the address of the server that was just there."""
    if _certificate_refused(error):
        return Finding(
            "self-test",
            "problem",
            f"the server does not show the certificate that {tls_cert} begins with ({_reason_of(error)})",
            f"{HEARTH} reload has it read again; if that does not help, something else listens at its address",
        )
    return Finding(
        "self-test",
        "problem",
        f"the server has ended or does not answer any more ({error or type(error).__name__}); the rest was not tried",
        f"its log says why (journalctl -u hearth); {HEARTH} status tells whether it is back, then run this again",
    )


def _certificate_refused(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def _reason_of(error: BaseException) -> str:
    """OpenSSL's words, without the place in its source."""
    return re.sub(r"^\[SSL: \w+\] | \(\w+\.c:\d+\)$", "", str(error))


@contextmanager
def _key(settings: Settings, config: Config) -> Iterator[str]:
    """Make a key that may use models and read metrics, and change nothing; delete it in the end, whatever happens."""
    tier = max(config.tiers.values(), key=lambda one: len(one.models)).id
    text, public_id = asyncio.run(_made(settings, tier))
    try:
        yield text
    finally:
        asyncio.run(_deleted(settings, public_id))


async def _made(settings: Settings, tier: str) -> tuple[str, str]:
    async with await Database.open(database_url(settings)) as database:
        text, key = await KeyStore(database).create(
            _KEY_NAME, tier, (*DEFAULT_SCOPES, "metrics"), expires_at=utc_now() + _KEY_LIVES, limits=_LIMITS
        )
        return text, key.public_id


async def _deleted(settings: Settings, public_id: str) -> None:
    async with await Database.open(database_url(settings)) as database:
        await KeyStore(database).delete(public_id)


def _client(running: Status, key: str) -> httpx2.Client:
    return httpx2.Client(
        base_url=(running.base_url or "").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {key}"},
        timeout=httpx2.Timeout(_LONGEST_SECONDS, connect=_CONNECT_SECONDS),
        verify=_trust(running.paths.tls_cert),
        trust_env=False,  # a proxy of this machine's user has no business here
    )


def _trust(tls_cert: str | None) -> ssl.SSLContext | bool:
    """Believe the very certificate that the server was told to show, the first in its file, and no other.

    Those after it belong to authorities: trusted, they would vouch for every certificate that they have ever signed.
    The name is not compared, since we call by an address of this machine what is made for a name that clients use
    (`tls` looks at that); nobody but the owner of its key can show this certificate, which says more than a name.
    """
    if tls_cert is None:
        return True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be signed by itself to be believed
    context.load_verify_locations(cadata=first_certificate(Path(tls_cert)))
    return context


def _calls(client: httpx2.Client, running: Status, *, unloaded: bool) -> Iterator[Finding]:
    for call in common():
        found = _tried(client, call)
        if call.path == "/health/ready" and found.verdict == "problem" and running.status == "loading":
            found = Finding(found.area, "warning", "health/ready: models are still loading", "run this again later")
        yield found
        if call.path == "/v1/models" and found.verdict == "problem":
            return  # the key is not known there, and nothing else would come of it
    listed = {one["id"]: one for one in _asked(client, "/v1/models").get("data", [])}
    for state in running.models:
        model = listed.get(state.id)
        if model is None:
            yield _skipped(state.id, "the widest tier does not have it")
        elif state.status == "failed":
            yield Finding(
                "self-test", "problem", f"{state.id} has failed: {state.reason}", f"{HEARTH} reload tries again"
            )
        elif state.status == "ready" or (unloaded and state.status in AWAITS_TURN):
            for call in of_model(model, _voices(client, model)):
                yield _tried(client, call)
        elif state.status == "loading":
            yield _skipped(state.id, f"it is loading ({state.phase})")
        else:
            yield _skipped(state.id, "it awaits its turn", "--unloaded has it loaded, in another one's place")


def _skipped(model: str, why: str, remedy: str | None = None) -> Finding:
    return Finding("self-test", "skipped", f"{model}: {why}", remedy)


def _voices(client: httpx2.Client, model: dict[str, Any]) -> list[str]:
    if "speech" not in model["capabilities"]:
        return []
    listed = _asked(client, "/v1/audio/voices", model=model["id"]).get("voices", [])
    return [one["id"] for one in listed if one["available"]]


def _asked(client: httpx2.Client, path: str, **query: str) -> dict[str, Any]:
    """Return what a list holds that has answered before; nothing if it does not any more, as a server that ends."""
    response = client.get(path, params=query)
    told: dict[str, Any] = response.json() if response.is_success else {}
    return told


def _tried(client: httpx2.Client, call: Call) -> Finding:
    try:
        came, seconds = call.make(client)
    except WrongAnswerError as error:
        return Finding("self-test", "problem", f"{call.name}: {error}")
    except httpx2.ConnectError:
        raise  # nobody is there: the calls to come would say no more than this one
    except httpx2.TimeoutException:
        return Finding("self-test", "problem", f"{call.name}: no answer within {_LONGEST_SECONDS:.0f} s")
    except httpx2.HTTPError as error:
        return Finding("self-test", "problem", f"{call.name}: {error or type(error).__name__}")
    return Finding("self-test", "ok", f"{call.name}: {came}", seconds=seconds)
