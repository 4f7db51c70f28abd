"""What answers a person who opens the server's address, and what asks whether it is there."""

import re

import httpx2
import pytest
from chat_parts import assert_error
from serving import Key, Server

pytestmark = pytest.mark.engine


def get(server: Server, path: str, **headers: str) -> httpx2.Response:
    return httpx2.get(f"{server.root_url}{path}", headers=headers, timeout=60)


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_probes_of_other_servers_are_told_whether_the_models_answer(server: Server, path: str):
    answer, ready = get(server, path), get(server, "/health/ready")
    assert (
        (answer.status_code, answer.json()["status"]) == (ready.status_code, ready.json()["status"]) == (200, "ready")
    )
    assert httpx2.head(f"{server.root_url}{path}", timeout=60).status_code == 200


def test_the_version_is_for_every_key(server: Server, admin_key: Key):
    assert_error(get(server, "/version"), 401, "invalid_api_key")
    found = get(server, "/version", Authorization=f"Bearer {admin_key.text}").json()
    assert found == {"version": get(server, "/").json()["version"]}


def test_a_browser_gets_the_page_and_a_program_json_that_says_where_to_go(server: Server):
    page, told = get(server, "/", Accept="text/html,*/*;q=0.8"), get(server, "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert told.json()["base_url"] == server.base_url
    assert told.json()["docs"] == f"{server.root_url}/docs"
    for link in re.findall(r'(?:href|src)="([^"]+)"', page.text):
        assert get(server, f"/{link}").status_code == 200, link


def test_the_page_does_not_repeat_what_an_address_holds(server: Server):
    page = get(server, "/?<script>", Accept="text/html", Host='a"<b>:1')
    assert "<script>" not in page.text
    assert "<b>" not in page.text


def test_the_reference_shows_every_field_without_anything_from_elsewhere(server: Server):
    page, description = get(server, "/docs"), get(server, "/openapi.json").json()
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<script" not in page.text
    assert "http://" not in page.text.replace("http://&lt;", "")
    for path, operations in description["paths"].items():
        for method in operations:
            assert f"<b>{method.upper()}</b> {path}</code>" in page.text
    for name in description["components"]["schemas"]["ChatCompletionBody"]["properties"]:
        assert f"<code>{name}</code>" in page.text


@pytest.mark.parametrize("name", ["x-api-key", "api-key", "Authorization"])
def test_a_key_may_come_in_the_headers_of_other_services(server: Server, admin_key: Key, name: str):
    assert get(server, "/v1/models", **{name: admin_key.text}).status_code == 200
    assert get(server, "/v1/models", **{name: f"{admin_key.text}x"}).status_code == 401
