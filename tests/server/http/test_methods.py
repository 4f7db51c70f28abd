"""A method that an address does not take is refused with all those that it does (RFC 9110, 15.5.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from access_parts import APP, address

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"}


def methods_by_address() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for route in APP.routes:
        found.setdefault(address(route), set()).update(getattr(route, "methods", None) or ())
    return found


ADDRESSES = methods_by_address()


def test_what_makes_something_takes_post_only():
    assert ADDRESSES["/v1/images/generations"] == ADDRESSES["/v1/audio/speech"] == {"POST"}
    assert len(ADDRESSES["/v1/admin/keys"]) > 1


@pytest.mark.parametrize(("address", "methods"), sorted(ADDRESSES.items()))
async def test_allow_names_exactly_what_the_address_takes(http: httpx2.AsyncClient, address: str, methods: set[str]):
    for method in sorted(METHODS - methods):
        response = await http.request(method, address)
        assert response.status_code == 405, f"{method} {address}"
        assert response.headers["allow"].split(", ") == sorted(methods)
        if method != "HEAD":
            assert response.json()["error"]["code"] == "method_not_allowed"
            assert ", ".join(sorted(methods)) in response.json()["error"]["message"]
