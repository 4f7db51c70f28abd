"""The browser, and a page in it that somebody has signed in to: for all tests of the page."""

from collections.abc import Iterator

import pytest
from page_parts import Browser, Tab, chromium, opened
from serving import Key, Server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def key(server: Server) -> Key:
    return server.make_key("page")


@pytest.fixture
def tab(browser: Browser, server: Server, key: Key) -> Iterator[Tab]:
    """Signed in; at the end nothing has gone to another origin, and the policy has forbidden nothing."""
    with opened(browser, server) as one:
        one.sign_in(key)
        yield one
        one.check()
