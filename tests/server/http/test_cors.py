"""Web pages of other origins: none may call by default, those of the setting may, and none needs a key to ask."""

from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from chat_parts import CHAT, assert_error

from engine import load_config
from server.app import create_app
from server.http.disconnect import Drain
from server.settings import SettingsError, load_settings

MODELS = Path(__file__).parents[3] / "models.yaml"
ORIGIN = "https://chat.example.org"
PREFLIGHT = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}


@pytest.fixture
def browser() -> Callable[[str], httpx2.AsyncClient]:
    """A client of an app with this setting. No engine runs: nothing here comes as far as one."""

    def client(cors_origins: str) -> httpx2.AsyncClient:
        app = create_app(load_settings(cors_origins=cors_origins), load_config(MODELS))
        app.state.drain, app.state.keys, app.state.access_log = Drain(), None, []
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://hearth")

    return client


async def test_no_page_may_call_by_default(browser: Callable[[str], httpx2.AsyncClient]):
    async with browser("") as client:
        refused = await client.options(CHAT, headers=PREFLIGHT)
        assert_error(refused, 403, "origin_not_allowed")
        assert "HEARTH_CORS_ORIGINS" in refused.text
        assert "access-control-allow-origin" not in refused.headers
        answer = await client.get("/health/live", headers={"Origin": ORIGIN})
        assert not [name for name in answer.headers if name.startswith("access-control-")]


async def test_a_page_of_a_named_origin_may_ask_with_any_header_of_its_client(
    browser: Callable[[str], httpx2.AsyncClient],
):
    wanted = "authorization,content-type,x-stainless-retry-count"
    async with browser(f"http://localhost:3000, {ORIGIN}") as client:
        answer = await client.options(CHAT, headers=PREFLIGHT | {"Access-Control-Request-Headers": wanted})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["access-control-allow-headers"] == wanted
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-max-age"] == "600"
    assert "access-control-allow-credentials" not in answer.headers
    assert "Origin" in answer.headers["vary"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("origin", ["https://elsewhere.example", "null", "http://chat.example.org", f"{ORIGIN}:8443"])
async def test_a_page_of_another_origin_may_not(origin: str, browser: Callable[[str], httpx2.AsyncClient]):
    async with browser(ORIGIN) as client:
        refused = await client.options(CHAT, headers=PREFLIGHT | {"Origin": origin})
        assert_error(refused, 403, "origin_not_allowed")
        answer = await client.get("/health/live", headers={"Origin": origin})
    assert "access-control-allow-origin" not in {*refused.headers, *answer.headers}


async def test_a_page_may_read_errors_and_the_headers_that_say_when_to_come_again(
    browser: Callable[[str], httpx2.AsyncClient],
):
    async with browser(ORIGIN) as client:
        answer = await client.post(CHAT, json={}, headers={"Origin": ORIGIN})
    assert_error(answer, 401, "invalid_api_key")
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
    assert {"x-request-id", "retry-after", "x-should-retry", "x-ratelimit-remaining-tokens"} <= {*exposed}


async def test_a_star_lets_every_page_ask_and_still_not_without_a_key(browser: Callable[[str], httpx2.AsyncClient]):
    async with browser("*") as client:
        allowed = await client.options(CHAT, headers=PREFLIGHT)
        assert allowed.headers["access-control-allow-origin"] == "*"
        refused = await client.post(CHAT, json={}, headers={"Origin": "https://anywhere.example"})
    assert_error(refused, 401, "invalid_api_key")
    assert refused.headers["access-control-allow-origin"] == "*"


async def test_every_answer_tells_browsers_to_guess_and_run_nothing(browser: Callable[[str], httpx2.AsyncClient]):
    async with browser("") as client:
        for answer in (await client.get("/health/live"), await client.get("/v1/models"), await client.get("/none")):
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
            assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("https://Chat.Example.org:443/", ("https://chat.example.org",)),
        ("http://localhost:3000,tauri://localhost", ("http://localhost:3000", "tauri://localhost")),
        ("http://[::1]:5173", ("http://[::1]:5173",)),
        (" , ", ()),
        ("*", ("*",)),
    ],
)
def test_origins_are_taken_as_browsers_write_them(
    written: str, meant: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEARTH_CORS_ORIGINS", written)
    assert load_settings().cors_origins == meant


@pytest.mark.parametrize(
    "written", ["null", "chat.example.org", "https://chat.example.org/app", "https://*.example.org"]
)
def test_what_is_no_origin_is_named(written: str):
    with pytest.raises(SettingsError, match=r"HEARTH_CORS_ORIGINS: `.*` is not an origin"):
        load_settings(cors_origins=written)


def test_proxies_are_addresses_or_networks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEARTH_TRUSTED_PROXIES", "127.0.0.1, 172.18.0.0/16,::1")
    assert load_settings().trusted_proxies == ("127.0.0.1", "172.18.0.0/16", "::1")


@pytest.mark.parametrize("written", ["*", "0.0.0.0/0", "::/0", "proxy.example.org", "10.0.0.1/8"])
def test_no_setting_believes_everybody(written: str):
    with pytest.raises(SettingsError, match=r"HEARTH_TRUSTED_PROXIES: `.*` is not the address of a proxy"):
        load_settings(trusted_proxies=written)
