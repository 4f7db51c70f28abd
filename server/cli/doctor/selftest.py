"""`hearth doctor`'s self-test: asks the running server over HTTP, with a key that lives no longer than the test."""

import io
import json
import re
import struct
import time
import wave
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from engine import AWAITS_TURN, Config
from server.cli.doctor.checks import Case, Finding, problem, skipped, warning
from server.cli.options import in_store
from server.http.tls import trusting
from server.observability.status import Status
from server.settings import Settings
from server.store import StoreError
from server.store.keys import DEFAULT_SCOPES, KeyLimits, KeyStore
from server.store.schema import utc_now
from server.store.sqlite import FILE_NAME
from server.terminal import HEARTH

_LONGEST_SECONDS = 300.0  # an image of a large model
# Its own, so that a tier's limits do not make the test fail.
_LIMITS = KeyLimits(
    requests_per_minute=600, tokens_per_minute=1_000_000, parallel_requests=8, batch_items=8, images_per_day=100
)
_ERROR = re.compile(rb'"error":\s*\{.*?"message":\s*("(?:[^"\\]|\\.)*")', re.DOTALL)


class Call(NamedTuple):
    """One request: POST with a body, else GET. An answer has to match `pattern`. With a `file` it is a form."""

    name: str
    path: str
    pattern: bytes
    body: Mapping[str, Any] | None = None
    file: bytes | None = None


_HELLO = [{"role": "user", "content": "Say hello."}]
_SHORT = {"messages": _HELLO, "max_tokens": 8, "temperature": 0}
_TOKENS = rb'"completion_tokens":\s*[1-9]'
_COMMON = (
    Call("health/live", "/health/live", rb'"status":\s*"'),
    Call("health/ready", "/health/ready", rb'"models":\s*\{\s*"'),
    Call("models", "/v1/models", rb'"data":\s*\['),
    Call("usage", "/v1/usage", rb'"data":\s*\['),
    Call("audio/voices", "/v1/audio/voices", rb'"voices":\s*\['),
    Call("audio/models", "/v1/audio/models", rb'"data":\s*\['),
    Call("metrics", "/metrics", rb"\nhearth_build_info\{"),
)
_OF_CHAT = (
    Call("chat", "/v1/chat/completions", _TOKENS, _SHORT),
    Call("chat, streamed", "/v1/chat/completions", rb"\ndata: \[DONE\]\s*\Z", {**_SHORT, "stream": True}),
    Call("messages", "/v1/messages", rb'"content":\s*\[\s*\{', _SHORT),
    Call("count_tokens", "/v1/messages/count_tokens", rb'"input_tokens":\s*[1-9]', {"messages": _HELLO}),
    Call(
        "responses", "/v1/responses", rb'"output":\s*\[\s*\{', {"input": "Hi.", "max_output_tokens": 16, "store": False}
    ),
    Call("completions", "/v1/completions", _TOKENS, {"prompt": "Hello", "max_tokens": 8}),
)


def _of_model(model: Mapping[str, Any], voices: Sequence[str]) -> Iterator[Call]:
    """Return the requests for one model, by its capabilities; `voices` are those that it can speak with."""
    name, able = model["id"], model["capabilities"]
    if "chat" in able:
        for call in _OF_CHAT:
            yield call._replace(name=f"{name}: {call.name}", body={"model": name, **(call.body or {})})
        two = {"requests": [{"model": name, **_SHORT}] * 2}
        yield Call(f"{name}: batch of 2", "/v1/chat/completions/batch", _TOKENS, two)
    if "embedding" in able:
        yield Call(f"{name}: embeddings", "/v1/embeddings", rb'"embedding":\[-?\d', {"model": name, "input": "Hello."})
    if "rerank" in able:
        pair = {"model": name, "query": "Hello?", "documents": ["Hello.", "Good night."]}
        yield Call(f"{name}: rerank", "/v1/rerank", rb'"relevance_score":\d', pair)
    if "image_generation" in able:
        size = (model.get("sizes") or ["256x256"])[0]
        image = {"model": name, "prompt": "a red circle", "size": size, "response_format": "b64_json"}
        yield Call(f"{name}: image", "/v1/images/generations", rb'"iVBORw0KGgo', image)  # a PNG in Base64
    if "speech" in able and voices:
        text = {"model": name, "input": "Hello.", "voice": voices[0], "response_format": "wav"}
        yield Call(f"{name}: speech", "/v1/audio/speech", rb"\ARIFF", text)
    if "transcription" in able:
        form = {"model": name, "response_format": "verbose_json"}
        yield Call(f"{name}: transcription", "/v1/audio/transcriptions", rb'"duration":1\.0\b', form, _hum())


def _hum() -> bytes:
    """A second of sound that is clearly not silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(8000)
        writer.writeframes(b"".join(struct.pack("<h", 4000 * (at // 20 % 2)) for at in range(8000)))
    return file.getvalue()


def selftest(case: Case) -> Iterator[Finding]:
    """Try every endpoint with every model that is ready; with `unloaded` also those that await their turn."""
    running, config = case.running, case.config
    if running is None:
        return
    if config is None:
        yield skipped("it needs a tier for its key, and models.yaml cannot be read")
    elif running.base_url is None or running.status == "draining":
        yield skipped("the server is ending")
    elif case.settings.database_url is None and not (case.settings.data_dir / FILE_NAME).exists():
        yield skipped(
            "the server keeps its keys in another database than the settings here say",
            "run this with the server's HEARTH_DATABASE_URL",
        )
    else:
        try:
            with _key(case.settings, config) as key, _client(running, key) as client:
                yield from _calls(client, running, unloaded=case.unloaded)
        except StoreError as error:
            yield problem(f"its key cannot be made or deleted: {error.message}")
        except httpx2.HTTPError as error:
            yield _cut_short(error, running.paths.tls_cert)
        except OSError as error:
            yield problem(f"the server's certificate {running.paths.tls_cert}: {error.strerror}")


def _cut_short(error: httpx2.HTTPError, tls_cert: str | None) -> Finding:
    """Say why the server that just answered does so no more, or why something else answers at its address."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        reason = re.sub(r"^\[SSL: \w+\] | \(\w+\.c:\d+\)$", "", str(error))  # without the place in OpenSSL's source
        return problem(
            f"the server does not show the certificate that {tls_cert} begins with ({reason})",
            f"{HEARTH} reload has it read again; if that does not help, something else listens at its address",
        )
    return problem(
        f"the server has ended or does not answer any more ({error or type(error).__name__}); the rest was not tried",
        f"its log says why (journalctl -u hearth); {HEARTH} status tells whether it is back, then run this again",
    )


@contextmanager
def _key(settings: Settings, config: Config) -> Iterator[str]:
    """Make a key that may use models and read metrics, and change nothing; delete it at the end, whatever happens."""
    tier = max(config.tiers.values(), key=lambda one: len(one.models)).id
    scopes, end = (*DEFAULT_SCOPES, "metrics"), utc_now() + timedelta(minutes=30)
    text, key = in_store(
        settings,
        lambda database: KeyStore(database).create("hearth doctor", tier, scopes, expires_at=end, limits=_LIMITS),
    )
    try:
        yield text
    finally:
        in_store(settings, lambda database: KeyStore(database).delete(key.public_id))


def _client(running: Status, key: str) -> httpx2.Client:
    """Return a client that trusts only the certificate that the server was told to show.

    The name is not compared: the certificate has the name that clients use (`tls` checks that), and we call an address
    of this machine. Only the owner of its key can show this certificate, which proves more than a name.
    """
    cert = running.paths.tls_cert
    return httpx2.Client(
        base_url=(running.base_url or "").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {key}"},
        timeout=httpx2.Timeout(_LONGEST_SECONDS, connect=5),
        verify=True if cert is None else trusting(Path(cert)),
        trust_env=False,  # not through the user's proxy
    )


def _calls(client: httpx2.Client, running: Status, *, unloaded: bool) -> Iterator[Finding]:
    for call in _COMMON:
        found = _tried(client, call)
        if call.path == "/health/ready" and found.verdict == "problem" and running.status == "loading":
            found = warning("health/ready: models are still loading", "run this again later")
        yield found
        if call.path == "/v1/models" and found.verdict == "problem":
            return  # the server does not know the key: all else would fail too
    listed = {one["id"]: one for one in _asked(client, "/v1/models").get("data", [])}
    for state in running.models:
        model = listed.get(state.id)
        if model is None:
            yield skipped(f"{state.id}: the tier with the most models does not list it")
        elif state.status == "failed":
            yield problem(f"{state.id} has failed: {state.reason}", f"{HEARTH} reload tries again")
        elif state.status == "ready" or (unloaded and state.status in AWAITS_TURN):
            for call in _of_model(model, _voices(client, model)):
                yield _tried(client, call)
        elif state.status == "loading":
            yield skipped(f"{state.id}: it is loading ({state.phase})")
        else:
            yield skipped(f"{state.id}: it is waiting for its turn", "--unloaded loads it and evicts another one")


def _voices(client: httpx2.Client, model: dict[str, Any]) -> list[str]:
    if "speech" not in model["capabilities"]:
        return []
    listed = _asked(client, "/v1/audio/voices", model=model["id"]).get("voices", [])
    return [one["id"] for one in listed if one["available"]]


def _asked(client: httpx2.Client, path: str, **query: str) -> dict[str, Any]:
    """Return the content of a list; empty where the server, which may be ending, refuses."""
    response = client.get(path, params=query)
    answer: dict[str, Any] = response.json() if response.is_success else {}
    return answer


def _tried(client: httpx2.Client, call: Call) -> Finding:
    began = time.monotonic()
    try:
        sent: dict[str, Any] = {"json": call.body}
        if call.file is not None:
            sent = {"data": call.body, "files": {"file": ("sound.wav", call.file)}}
        response = client.request("GET" if call.body is None else "POST", call.path, **sent)
    except httpx2.ConnectError:
        raise  # no server is there: further calls would tell no more
    except httpx2.TimeoutException:
        return problem(f"{call.name}: no answer within {_LONGEST_SECONDS:.0f} s")
    except httpx2.HTTPError as error:
        return problem(f"{call.name}: {error or type(error).__name__}")
    seconds = round(time.monotonic() - began, 4)
    content = response.content
    failure = _ERROR.search(content)  # streams and batches report it with status 200
    words = json.loads(failure[1]) if failure else content[:160].decode(errors="replace")
    if response.status_code != httpx2.codes.OK:
        return problem(f"{call.name}: HTTP {response.status_code}: {words}")
    if failure or not re.search(call.pattern, content):
        return problem(f"{call.name}: the answer is wrong: {words}")
    return Finding("ok", f"{call.name}: {len(content)} bytes", seconds=seconds)
