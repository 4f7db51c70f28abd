"""The page on a bad day: a key that ends, files that are no exports, two tabs, a server that is lost in an answer."""

import json
import socket
from pathlib import Path

import pytest
from page_parts import CHROMIUM, ENDLESS_TOKENS, MISSING, Browser, Route, Tab, new_tab, opened
from playwright.sync_api import expect
from serving import Key, Server, poll_until

pytestmark = [pytest.mark.engine, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]
FRANCE, JAPAN = "What is the capital of France?", "What is the capital of Japan?"
DAMAGED = [b"", b"{", b"[1]", b"null", b'{"chats": 5}', b'{"chats": []}', b"\xff\xfe"]
ONE_MODEL = """\
models:
  service-plus: {task: chat, tier: standard, capabilities: [chat, streaming], weights: service-plus, demo: chat}
tiers:
  standard: {models: [standard]}
"""

# The longest time that handling an event took, in ms: what other processes do on the same cores does not count.
_MEASURED = """
window.cost = 0;
for (const type of ['keydown', 'input']) {
  let began;
  addEventListener(type, () => (began = performance.now()), true);  // before the page, and after it has rendered
  addEventListener(type, () => (window.cost = Math.max(window.cost, performance.now() - began)));
}
"""


def lengthened(route: Route, tokens: int) -> None:
    body = (route.request.post_data_json or {}) | {"ignore_eos": True, "max_tokens": tokens, "temperature": 0}
    route.continue_(post_data=json.dumps(body))


def endless(route: Route) -> None:
    lengthened(route, ENDLESS_TOKENS)


def import_file(tab: Tab, content: bytes) -> None:
    upload = {"name": "chats.json", "mimeType": "application/json", "buffer": content}
    tab.page.get_by_label("File of chats").set_input_files(upload)


def test_a_file_that_is_no_export_changes_nothing_and_a_damaged_one_gives_what_it_has(tab: Tab):
    tab.page.get_by_text("Settings").click()
    for content in DAMAGED:
        import_file(tab, content)
        tab.page.get_by_role("alert").get_by_text("There are no chats in this file").wait_for()
    assert tab.page.locator(".chats li").count() == 1
    good = {
        "id": "a",
        "title": "አማርኛ",
        "messages": [None, 5, {"role": "user", "text": "ሰላም"}, {"role": "x", "text": 7}],
    }
    import_file(tab, json.dumps({"chats": [None, 7, good, good | {"title": "עברית"}]}).encode())
    tab.page.get_by_text("Chats added: 4.").wait_for()
    assert tab.page.locator(".chats li").count() == 5
    tab.page.get_by_role("button", name="עברית", exact=True).click()
    expect(tab.page.locator(".message.user").nth(1)).to_have_text("ሰላምCopyEdit")
    tab.page.reload()
    tab.page.locator(".chats li").nth(4).wait_for()


def test_who_is_out_keeps_the_chats_and_who_signs_out_leaves_nothing(tab: Tab, server: Server, key: Key):
    """A key that ends while the page is open is no reason to lose what was written."""
    tab.ask(FRANCE)
    tab.answered()
    headers = {"Authorization": f"Bearer {server.admin_key.text}"} if server.admin_key else {}
    tab.page.request.post(f"{server.base_url}/admin/keys/{key.public_id}/revoke", headers=headers)
    tab.page.get_by_role("alert").get_by_text("Your session has ended").wait_for()
    tab.errors.clear()  # Chromium's own lines on a 401
    other = server.make_key("another")
    tab.page.get_by_label("Your key").fill(other.text)
    tab.page.get_by_role("button", name="Sign in").click()
    tab.page.locator(".message.assistant").wait_for()
    tab.sign_out()
    assert "Paris" not in tab.page.evaluate("JSON.stringify({...sessionStorage})")
    tab.page.get_by_label("Your key").fill(other.text)
    tab.page.get_by_role("button", name="Sign in").click()
    tab.page.get_by_text("Ask something.").wait_for()
    assert tab.page.locator(".message").count() == 0


def test_two_chats_answer_at_once_and_a_tab_that_signs_in_takes_the_others_along(tab: Tab, server: Server):
    tab.page.route("**/v1/chat/completions", endless)
    tab.ask(FRANCE)
    tab.page.get_by_role("button", name="New chat").click()
    tab.page.unroute("**/v1/chat/completions")
    tab.ask(JAPAN)
    assert tab.answered() == "The capital of Japan is Tokyo."
    tab.page.get_by_role("button", name=FRANCE, exact=True).click()
    tab.page.get_by_role("button", name="Stop").wait_for()
    tab.page.keyboard.press("Escape")
    tab.page.locator(".message.assistant footer").get_by_text("stopped").wait_for()
    second = new_tab(tab.page.context, tab.address)
    second.page.goto(tab.address)
    second.page.get_by_role("main", name="Chat").wait_for()
    assert second.page.locator(".message").count() == 0  # chats are a tab's own
    second.sign_out()
    tab.page.get_by_label("Your key").wait_for()
    second.sign_in(server.make_key("second"))
    tab.page.get_by_role("main", name="Chat").wait_for()
    assert tab.page.get_by_role("navigation").get_by_text("second").is_visible()


@pytest.mark.rounds
def test_an_answer_that_is_on_its_way_is_there_when_the_page_is_loaded_again(tab: Tab):
    tab.page.route("**/v1/chat/completions", lambda route: lengthened(route, 1900))
    tab.ask("Count from one to fifty.")
    tab.page.locator(".message.assistant .markdown").get_by_text("five").wait_for()
    tab.page.reload()
    tab.page.get_by_role("button", name="Regenerate").wait_for()
    assert "five" in tab.page.locator(".message.assistant .markdown").inner_text()


@pytest.mark.rounds
@pytest.mark.timeout(300)
def test_a_server_that_is_lost_in_an_answer_and_comes_back_is_used_again(browser: Browser, tmp_path: Path):
    (tmp_path / "models.yaml").write_text(ONE_MODEL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    how = {"arguments": ["--port", port], "environment": {"HEARTH_MODELS": str(tmp_path / "models.yaml")}}
    with Server(tmp_path, **how) as first, opened(browser, first) as one:  # type: ignore[arg-type]
        assert first.admin_key is not None
        one.sign_in(first.admin_key)
        one.page.route("**/v1/chat/completions", endless)
        one.ask("Count from one to fifty.")
        one.page.locator(".message.assistant .markdown").get_by_text("five").wait_for()
        first.kill()
        one.page.locator(".message .failure").get_by_text("The connection was lost").wait_for()
        assert "five" in one.page.locator(".message.assistant .markdown").inner_text()
        one.page.get_by_role("alert").get_by_text("The server cannot be reached").wait_for()
        with Server(tmp_path, **how):  # type: ignore[arg-type]
            expect(one.page.get_by_text("The server cannot be reached")).to_have_count(0, timeout=20_000)
            one.page.unroute("**/v1/chat/completions")
            one.ask(FRANCE)
            poll_until(lambda: "Paris" in one.answered(2), 60)
            one.errors.clear()
            one.check()


@pytest.mark.rounds
def test_a_very_long_chat_stays_quick(tab: Tab):
    """Forty messages, half of them of 2,500 tokens with code, tables and lists: a key that is typed is seen within a moment."""
    part = "## Part\n\nSome **bold** `code`.\n\n- one\n  - two\n\n|a|b|\n|-|-|\n|1|ሰላም|\n\n```python\nprint(1)\n```\n\n"
    pair = [{"role": "user", "text": "And?"}, {"role": "assistant", "text": part * 60}]
    tab.page.get_by_text("Settings").click()
    import_file(tab, json.dumps({"chats": [{"title": "Long", "messages": pair * 20}]}).encode())
    tab.page.locator(".message").nth(39).wait_for()
    tab.page.evaluate(_MEASURED)
    tab.page.get_by_label("Message", exact=True).press_sequentially("How are you today?", delay=30)
    assert 0 < tab.page.evaluate("window.cost") < 50
