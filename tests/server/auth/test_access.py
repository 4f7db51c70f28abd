"""Deny by default: who gets in with which key, and that nothing but health and signed links answers without one."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from access_parts import (
    ANY_BODY,
    CLOSED,
    FOR_ALL_KEYS,
    IMAGE_FILE,
    OPEN,
    PAGE_FILE,
    ROUTES,
    SCOPED,
    SCOPES_ASKED,
    SIGN_IN,
    routes_that_name_a_model,
)
from chat_parts import CHAT, HELLO, MODEL, assert_error
from serving import Key, Server, contents, poll_until

from server.http.middleware import OPEN_PATHS, needs_key
from server.store.keys import SCOPES

pytestmark = pytest.mark.engine

REQUEST = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 1}
GARBAGE = [
    None,
    "",
    "Bearer",
    "Bearer a b",
    "Bearer garbage",
    "Bearer " + "x" * 50_000,
    "Bearer hk_",
    "Bearer hk_aaaaaaaaaaaa_" + "b" * 49,
    "Bearer \u00e9".encode(),
    "Basic dXNlcjpwYXNz",
    "Bearer null",
]


@pytest.fixture(scope="module")
def anonymous(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.root_url, timeout=60) as opened:
        yield opened


@pytest.fixture(scope="module")
def standard_key(server: Server) -> Key:
    return server.make_key("standard", tier="standard")


@pytest.fixture(scope="module")
def models_only_key(server: Server) -> Key:
    return server.make_key_by_command("models only", options=["--scope", "models"])


@pytest.fixture(scope="module")
def chat_only_key(server: Server) -> Key:
    return server.make_key("chat only", scopes=["chat"], models=["service-pro"])


def bearer(key: Key) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.text}"}


def assert_unauthorized(response: httpx2.Response) -> None:
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-should-retry"] == "false"
    if response.request.method == "HEAD":
        assert response.status_code == 401
    else:
        assert_error(response, 401, "invalid_api_key")


def test_the_app_has_the_routes_of_the_contract_and_few_of_them_are_open():
    assert {("POST", CHAT), ("GET", "/v1/models"), ("GET", f"/v1/models/{MODEL}")} <= set(ROUTES)
    assert {"/", "/docs", "/health", "/health/live", "/health/ready", "/openapi.json", "/ping"} == OPEN_PATHS
    page = {PAGE_FILE, SIGN_IN}
    assert {path for method, path in ROUTES if not needs_key(method, path)} == OPEN_PATHS | {IMAGE_FILE} | page
    assert needs_key("DELETE", SIGN_IN)
    assert {route for route in ROUTES if not needs_key(*route)} <= OPEN


def test_an_image_file_without_its_signed_link_is_not_there_for_anybody(anonymous: httpx2.Client, standard_key: Key):
    for headers in ({}, {"Authorization": "Bearer garbage"}, bearer(standard_key)):
        assert_error(anonymous.get(IMAGE_FILE, headers=headers), 404, "not_found")


def test_every_route_asks_for_exactly_one_scope_unless_it_is_for_all_keys():
    """A route that is added without a scope fails here, and has to be named above if that is meant."""
    for (method, path), scopes in SCOPES_ASKED.items():
        if (method, path) not in OPEN | FOR_ALL_KEYS:
            assert len(scopes) == 1, f"{method} {path} asks for {scopes or 'no scope'}"
            assert scopes <= set(SCOPES)
    for route in FOR_ALL_KEYS:
        assert SCOPES_ASKED[route] == set()
    admins = {path for (_, path), scopes in SCOPES_ASKED.items() if scopes == {"admin"}}
    assert admins == {path for _, path in ROUTES if path.startswith("/v1/admin/")}


@pytest.fixture(scope="module")
def keys_without(server: Server, admin_key: Key) -> dict[str, Key]:
    """By scope, a key that has all others."""
    made = {}
    with httpx2.Client(base_url=server.root_url, headers=bearer(admin_key), timeout=60) as admin:
        for scope in SCOPES:
            body = {
                "name": f"all but {scope}",
                "tier": "enhanced",
                "scopes": [name for name in SCOPES if name != scope],
            }
            made[scope] = Key(admin.post("/v1/admin/keys", json=body).json()["key"])
    server.made_keys += made.values()
    return made


@pytest.mark.parametrize(("method", "path", "scope"), SCOPED)
def test_a_key_that_lacks_only_the_one_scope_is_refused(
    anonymous: httpx2.Client, keys_without: dict[str, Key], method: str, path: str, scope: str
):
    """The scope is asked for before the body is judged: this one is wrong for most."""
    body = {"json": ANY_BODY} if method in {"POST", "PATCH", "PUT"} else {}
    response = anonymous.request(method, path, headers=bearer(keys_without[scope]), **body)
    assert_error(response, 403, "insufficient_permissions")
    assert f"`{scope}`" in response.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path", "fields"), list(routes_that_name_a_model()))
def test_no_route_tells_a_standard_key_of_a_model_that_is_not_for_it(
    anonymous: httpx2.Client, standard_key: Key, method: str, path: str, fields: dict[str, Any]
):
    body = {"json": fields} if fields else {}
    response = anonymous.request(method, path, headers=bearer(standard_key), **body)
    assert response.status_code == 404, response.text
    assert "GET /v1/models lists" in response.text


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_nothing_answers_without_a_valid_key(anonymous: httpx2.Client, method: str, path: str):
    for header in GARBAGE:
        headers = {} if header is None else {"Authorization": header}
        response = anonymous.request(method, path, headers=headers, json=REQUEST if method == "POST" else None)
        assert_unauthorized(response)


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
@pytest.mark.parametrize("header", GARBAGE[:4])
def test_what_is_open_answers_anybody(anonymous: httpx2.Client, path: str, header: str | None):
    headers = {} if header is None else {"Authorization": header}
    assert anonymous.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/health/live/",
        "/health/../v1/models",
        "/HEALTH/LIVE",
        "/health/live%2f..",
        "/healthz",
        "/docs/",
        "/console",
        "/console/",
        "/console/session",
        "/v1/console/x",
    ],
)
def test_what_only_looks_like_health_needs_a_key(anonymous: httpx2.Client, path: str):
    assert_unauthorized(anonymous.get(path))


def test_a_key_in_the_address_is_no_key(anonymous: httpx2.Client, admin_key: Key):
    response = anonymous.get("/v1/models", params={"api_key": admin_key.public_id, "key": admin_key.public_id})
    assert_unauthorized(response)


def test_a_key_with_one_letter_changed_is_refused(anonymous: httpx2.Client, admin_key: Key):
    for position in (3, 16, len(admin_key.text) - 1):
        letter = "A" if admin_key.text[position] != "A" else "B"
        changed = admin_key.text[:position] + letter + admin_key.text[position + 1 :]
        response = anonymous.get("/v1/models", headers={"Authorization": f"Bearer {changed}"})
        assert_unauthorized(response)
        assert changed[16:] not in response.text


def test_the_scheme_is_read_in_any_case(anonymous: httpx2.Client, admin_key: Key):
    assert anonymous.get("/v1/models", headers={"Authorization": f"bearer {admin_key.text}"}).status_code == 200


def test_a_revoked_key_is_refused_within_ten_seconds(server: Server, anonymous: httpx2.Client):
    key = server.make_key_by_command("soon gone")
    assert anonymous.get("/v1/models", headers=bearer(key)).status_code == 200
    server.revoke(key)
    poll_until(lambda: anonymous.get("/v1/models", headers=bearer(key)).status_code == 401, 10)
    for method, path in CLOSED:
        assert_unauthorized(anonymous.request(method, path, headers=bearer(key)))


def test_a_key_does_only_what_its_scopes_say(anonymous: httpx2.Client, models_only_key: Key, chat_only_key: Key):
    assert anonymous.get("/v1/models", headers=bearer(models_only_key)).status_code == 200
    refused = anonymous.post(CHAT, json=REQUEST, headers=bearer(models_only_key))
    assert_error(refused, 403, "insufficient_permissions")
    assert "`chat`" in refused.json()["error"]["message"]
    for path in ("/v1/models", f"/v1/models/{MODEL}"):
        assert_error(anonymous.get(path, headers=bearer(chat_only_key)), 403, "insufficient_permissions")


def test_a_missing_scope_is_told_before_the_body_is_judged(anonymous: httpx2.Client, models_only_key: Key):
    response = anonymous.post(CHAT, json=REQUEST | {"model": "nobody"}, headers=bearer(models_only_key))
    assert_error(response, 403, "insufficient_permissions")


@pytest.mark.parametrize(("method", "path", "scope"), [route for route in SCOPED if route[0] in {"POST", "PATCH"}])
def test_a_missing_scope_is_told_before_the_body_is_read(
    anonymous: httpx2.Client, keys_without: dict[str, Key], method: str, path: str, scope: str
):
    for content_type, body in (("application/json", b"{"), ("application/json", b"[]"), ("text/plain", b"x")):
        headers = bearer(keys_without[scope]) | {"Content-Type": content_type}
        response = anonymous.request(method, path, headers=headers, content=body)
        assert_error(response, 403, "insufficient_permissions")


def test_a_standard_key_does_not_see_that_there_is_more(anonymous: httpx2.Client, standard_key: Key):
    headers = bearer(standard_key)
    listed = anonymous.get("/v1/models", headers=headers).json()["data"]
    assert [model["id"] for model in listed] == [
        "service-plus",
        "service-embedding",
        "service-rerank",
        "service-transcription",
        "service-image",
        "service-voice",
    ]
    assert anonymous.post(CHAT, json=REQUEST, headers=headers).status_code == 200
    for name in ("service-pro", "nobody"):
        hidden = anonymous.get(f"/v1/models/{name}", headers=headers)
        assert_error(hidden, 404, "model_not_found", "model")
        for stream in (False, True):
            response = anonymous.post(CHAT, json=REQUEST | {"model": name, "stream": stream}, headers=headers)
            assert_error(response, 404, "model_not_found", "model")
            assert response.json() == hidden.json()


def test_a_misspelt_model_is_answered_with_one_that_the_key_may_use(anonymous: httpx2.Client, standard_key: Key):
    def told(name: str) -> str:
        refused = anonymous.post(CHAT, json=REQUEST | {"model": name}, headers=bearer(standard_key))
        assert_error(refused, 404, "model_not_found", "model")
        return str(refused.json()["error"]["message"])

    assert "Did you mean `service-plus`?" in told("servce-plus")
    assert "service-pro" not in told("service-pro")
    assert "Did you mean" not in told("gpt-5")


def test_a_key_for_one_model_may_use_no_other(anonymous: httpx2.Client, chat_only_key: Key):
    headers = bearer(chat_only_key)
    assert anonymous.post(CHAT, json=REQUEST | {"model": "service-pro"}, headers=headers).status_code == 200
    assert_error(anonymous.post(CHAT, json=REQUEST, headers=headers), 404, "model_not_found", "model")


def test_no_secret_is_written_down(server: Server, standard_key: Key, models_only_key: Key, chat_only_key: Key):
    """The database and the access log hold public ids only, and the server printed nothing of these keys."""
    files = contents(server.data_dir).values()
    for key in (standard_key, models_only_key, chat_only_key):
        assert key.secret not in server.log()
        assert not any(key.secret.encode() in content for content in files)
        assert any(key.public_id.encode() in content for content in files)
