"""A link to an image that is not there any more: a page for people in a browser, JSON for everybody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chat_parts import assert_error

from server.api.images.routes import wants_page

if TYPE_CHECKING:
    import httpx2

PATH = f"/v1/images/files/{'0123456789abcdef' * 2}.png?expires=1700000000&signature=abc"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
IMAGE_TAG = "image/avif,image/webp,image/apng,image/svg+xml,image/*,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "page"),
    [
        (BROWSER, True),
        ("application/xml, TEXT/HTML ;q=0.5", True),
        (IMAGE_TAG, False),
        ("*/*", False),
        ("", False),
        ("application/json", False),
        ("application/json, text/html;q=0", False),
    ],
)
def test_a_page_is_for_those_who_name_html(accept: str, page: bool):  # noqa: FBT001
    assert wants_page(accept) is page


@pytest.mark.engine
async def test_a_browser_is_told_what_happened_and_what_to_do(http: httpx2.AsyncClient):
    response = await http.get(PATH, headers={"Accept": BROWSER})
    assert response.status_code == 404
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["vary"] == "Accept"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert response.headers["x-request-id"]
    assert "work for 24 hours" in response.text
    assert "have the image made again" in response.text
    assert "abc" not in response.text


@pytest.mark.engine
@pytest.mark.parametrize("accept", ["*/*", IMAGE_TAG, "application/json"])
async def test_programs_get_json(http: httpx2.AsyncClient, accept: str):
    response = await http.get(PATH, headers={"Accept": accept})
    assert_error(response, 404, "not_found")
    assert response.headers["vary"] == "Accept"
