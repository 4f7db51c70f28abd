"""Signing in to the page over HTTP: both halves, only from the page itself, ended by logout and by revocation."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from chat_parts import assert_error
from serving import Key, Server, poll_until
from small_models import VOICES_ONLY

pytestmark = pytest.mark.engine
ADDRESSES = (f"198.51.100.{number}" for number in itertools.count(1))


@dataclass(frozen=True)
class Signed:
    cookie: dict[str, str]
    token: dict[str, str]

    @property
    def both(self) -> dict[str, str]:
        return {**self.cookie, **self.token}


@pytest.fixture
def client(chat_server: Server) -> Iterator[httpx2.Client]:
    """From an address of its own, by the proxy that `chat_server` trusts."""
    headers = {"X-Forwarded-For": next(ADDRESSES)}
    with httpx2.Client(base_url=chat_server.root_url, headers=headers, timeout=60) as opened:
        yield opened


def sign_in(client: httpx2.Client, key: Key, **headers: str) -> Signed:
    answer = client.post("/console/session", json={"key": key.text}, headers=headers)
    assert answer.status_code == 200, answer.text
    client.cookies.clear()  # the test says which halves are sent
    cookie = answer.headers["set-cookie"]
    assert re.search(r"; Path=/; Max-Age=604800; HttpOnly; SameSite=Strict", cookie)
    assert ("; Secure" in cookie) == cookie.startswith("__Host-") == (headers.get("X-Forwarded-Proto") == "https")
    assert key.secret not in answer.text + cookie
    return Signed({"Cookie": cookie.partition(";")[0]}, {"X-Hearth-Session": answer.json()["token"]})


@pytest.fixture
def key(chat_server: Server) -> Key:
    return chat_server.make_key("page", tier="standard")


def test_both_halves_are_the_key_and_one_alone_is_nothing(client: httpx2.Client, key: Key):
    signed, other = sign_in(client, key), sign_in(client, key)
    assert client.get("/v1/key", headers=signed.both).json()["public_id"] == key.public_id
    for headers in (signed.cookie, signed.token, {**signed.cookie, **other.token}, {**other.cookie, **signed.token}):
        assert_error(client.get("/v1/key", headers=headers), 401, "invalid_api_key")


def test_a_session_may_do_what_its_key_may_and_is_accounted_for_as_it(
    chat_server: Server, client: httpx2.Client, key: Key
):
    signed = sign_in(client, key)
    assert client.get("/v1/models", headers=signed.both).status_code == 200
    assert_error(client.get("/v1/admin/keys", headers=signed.both), 403, "insufficient_permissions")
    asked = client.get("/v1/models", headers={**signed.both, "X-Request-Id": "page-asks"})
    assert asked.status_code == 200

    def written() -> list[str]:
        return [line["key"] for line in chat_server.access_lines() if line["request_id"] == "page-asks"]

    poll_until(lambda: written() == [key.public_id], 60)


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
def test_a_page_of_another_origin_cannot_use_a_session_or_begin_one(client: httpx2.Client, key: Key, site: str):
    signed = sign_in(client, key)
    elsewhere = {"Sec-Fetch-Site": site, "Origin": "https://chat.example.org"}
    assert_error(client.get("/v1/key", headers={**signed.both, **elsewhere}), 401, "invalid_api_key")
    begun = client.post("/console/session", json={"key": key.text}, headers=elsewhere)
    assert_error(begun, 403, "insufficient_permissions")
    here = {"Sec-Fetch-Site": "same-origin"}
    assert client.get("/v1/key", headers={**signed.both, **here}).status_code == 200


def test_a_form_of_another_page_begins_no_session(client: httpx2.Client, key: Key):
    body = {"content": f'{{"key": "{key.text}"}}', "headers": {"Content-Type": "text/plain"}}
    assert_error(client.post("/console/session", **body), 415, "unsupported_media_type")


def test_the_key_in_a_header_wins_over_a_session(client: httpx2.Client, key: Key):
    signed = sign_in(client, key)
    headers = {**signed.both, "Authorization": "Bearer hk_wrong"}
    assert_error(client.get("/v1/key", headers=headers), 401, "invalid_api_key")


def test_signing_out_ends_the_session_at_once(client: httpx2.Client, key: Key):
    signed = sign_in(client, key)
    ended = client.delete("/console/session", headers=signed.both)
    assert ended.status_code == 204
    assert "Max-Age=0" in ended.headers["set-cookie"]
    assert_error(client.get("/v1/key", headers=signed.both), 401, "invalid_api_key")


def test_a_revoked_key_is_out_of_the_page_within_ten_seconds(chat_server: Server, client: httpx2.Client, key: Key):
    signed = sign_in(client, key)
    chat_server.revoke(key)
    poll_until(lambda: client.get("/v1/key", headers=signed.both).status_code == 401, 10)


def test_wrong_keys_are_refused_and_ten_a_minute_are_enough(client: httpx2.Client, key: Key):
    for _ in range(10):
        assert_error(client.post("/console/session", json={"key": "hk_wrong"}), 401, "invalid_api_key")
    refused = client.post("/console/session", json={"key": key.text})
    assert_error(refused, 429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60


@pytest.mark.parametrize("body", [{}, {"key": "a", "once": "b"}, {"key": 1}, {"key": "x" * 300}])
def test_a_sign_in_needs_one_of_the_two(client: httpx2.Client, body: dict[str, object]):
    assert client.post("/console/session", json=body).status_code == 400


def test_under_https_the_cookie_is_for_https_alone(client: httpx2.Client, key: Key):
    secure = {"X-Forwarded-Proto": "https"}
    signed = sign_in(client, key, **secure)
    assert client.get("/v1/key", headers={**signed.both, **secure}).status_code == 200
    assert client.get("/v1/key", headers=signed.both).status_code == 401


@pytest.mark.parametrize("host", ["a:b", "[::1", "x:99999999999", "a b", "/"])
def test_an_address_that_is_none_is_no_failure_of_ours(client: httpx2.Client, host: str):
    headers = {"X-Hearth-Session": "x" * 43, "Host": host}
    assert client.get("/v1/key", headers=headers).status_code in {400, 401}


def test_the_key_says_its_limits_and_what_is_left(chat_server: Server, client: httpx2.Client):
    key = chat_server.make_key("page", tier="requests")
    shown = client.get("/v1/key", headers={"Authorization": f"Bearer {key.text}"}).json()
    assert (shown["name"], shown["tier"], shown["models"], shown["expires_at"]) == ("page", "requests", None, None)
    assert (shown["limits"]["requests_per_minute"], shown["limits"]["tokens_per_minute"]) == (20, None)
    assert shown["left"] == {"requests": 20, "tokens": None, "parallel_requests": None, "images": None}
    asked = client.post(
        "/v1/chat/completions",
        json={"model": "service-plus", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4},
        headers={"Authorization": f"Bearer {key.text}"},
    )
    assert asked.status_code == 200, asked.text
    later = client.get("/v1/key", headers={"Authorization": f"Bearer {key.text}"}).json()
    assert later["left"]["requests"] == 19


def test_the_link_of_the_first_start_signs_in_once(tmp_path: Path):
    (tmp_path / "models.yaml").write_text(VOICES_ONLY)
    with Server(tmp_path, environment={"HEARTH_MODELS": str(tmp_path / "models.yaml")}) as fresh:
        once = {"once": fresh.wait_for_line(r"#once=(\S+)")[1]}
        signed = httpx2.post(f"{fresh.root_url}/console/session", json=once, timeout=60)
        assert signed.status_code == 200
        assert "admin" in signed.json()["key"]["scopes"]
        assert_error(httpx2.post(f"{fresh.root_url}/console/session", json=once, timeout=60), 401, "invalid_api_key")
