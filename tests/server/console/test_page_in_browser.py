"""The page in a real browser, as somebody uses it. One server for all of it, the run's own."""

import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from batch_parts import ENDPOINT, jsonl, line, read_jsonl
from hostile_texts import HOSTILE
from page_parts import CHROMIUM, ENDLESS_TOKENS, MISSING, Browser, Tab, new_tab, opened
from serving import Key, Server, poll_until

pytestmark = [pytest.mark.engine, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]
STORY = "Tell me a short story."


def test_an_answer_streams_and_can_be_asked_for_again_after_an_edit(tab: Tab):
    tab.ask("What is the capital of France?")
    assert tab.answered() == "The capital of France is Paris."
    tab.page.get_by_role("button", name="Edit").click()
    tab.page.get_by_label("Your message").fill("What is the capital of Japan?")
    tab.page.locator("form.message").get_by_role("button", name="Send").click()
    poll_until(lambda: tab.answered() == "The capital of Japan is Tokyo.", 45)
    tab.page.get_by_role("button", name="Regenerate").click()
    assert tab.answered() == "The capital of Japan is Tokyo."
    assert re.search(r"8 tokens · .*first after", tab.page.locator(".message.assistant footer").inner_text())
    assert tab.page.locator(".message").count() == 2
    answer_exactly(tab, 600)  # a shorter one may come in one piece on a busy machine, and has no rate then
    tab.ask(STORY)
    tab.answered(2)
    assert re.search(r"\d+ tokens · \d+ tokens/s", tab.page.locator(".message.assistant footer").last.inner_text())


def answer_exactly(tab: Tab, tokens: int) -> None:
    """Have answers in this tab end after so many tokens, and not before."""

    def lengthen(route, request):
        body = request.post_data_json | {"ignore_eos": True, "max_tokens": tokens, "temperature": 0}
        route.continue_(post_data=json.dumps(body))

    tab.page.route("**/v1/chat/completions", lengthen)


def test_stop_ends_the_answer_in_the_engine(server: Server, tab: Tab, key: Key):
    answer_exactly(tab, ENDLESS_TOKENS)
    tab.ask(STORY)
    tab.page.locator(".message.assistant .markdown").wait_for()
    tab.page.get_by_role("button", name="Stop").click()

    def chats() -> list[dict[str, Any]]:
        mine = [line for line in server.access_lines() if line.get("key") == key.public_id]
        return [line for line in mine if "completion_tokens" in line]

    poll_until(lambda: bool(chats()), 30)
    (chat,) = chats()
    assert (chat["status"], chat["completion_tokens"] < ENDLESS_TOKENS) == (499, True)
    assert "stopped" in tab.page.locator(".message.assistant footer").inner_text()


def test_a_tool_call_is_shown_and_its_result_goes_back(tab: Tab):
    tools = json.loads((Path(__file__).parents[3] / "scripts/demo_models/chat/tools.json").read_text())["offered"]
    tab.page.get_by_text("Settings").click()
    tab.page.get_by_label("Tools (JSON)").fill(json.dumps(tools))
    tab.page.get_by_label("Temperature").fill("0")
    tab.ask("What is the weather in Paris?")
    tab.page.get_by_label("What get_weather says").wait_for()
    assert "Paris" in tab.page.locator(".call pre").inner_text()
    tab.page.get_by_label("What get_weather says").fill('{"degrees": 18, "sky": "sunny"}')
    tab.page.locator(".message.assistant form button").click()
    assert tab.answered(2) == "It is 18 degrees and sunny in Paris."


def test_the_address_keeps_nothing_of_a_sign_in_link_and_the_tab_nothing_of_the_key(
    browser: Browser, server: Server, key: Key
):
    with opened(browser, server) as one:
        one.page.goto(f"{server.root_url}/#once=wrong")
        one.page.get_by_role("alert").get_by_text("This link was used").wait_for()
        assert "once" not in one.page.url
        one.page.get_by_label("Your key").fill(key.text)
        one.page.get_by_role("button", name="Sign in").click()
        one.page.get_by_role("main", name="Chat").wait_for()
        kept = one.page.evaluate(
            "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie, location.href])"
        )
        assert key.secret not in kept
        assert re.search(r'"hearth.session":"[\w-]{43}"', kept)
        assert [cookie["httpOnly"] for cookie in one.page.context.cookies()] == [True]


def test_a_second_tab_is_signed_in_and_signing_out_ends_both(tab: Tab):
    other = new_tab(tab.page.context, tab.address)
    other.page.goto(tab.address)
    other.page.get_by_role("main", name="Chat").wait_for()
    tab.sign_out()
    other.page.get_by_label("Your key").wait_for()


def test_the_lines_to_connect_have_this_address_and_the_model(tab: Tab, key: Key):
    tab.go("Connect")
    tab.page.get_by_label("Model").select_option("service-pro")
    text = tab.page.get_by_role("main").inner_text()
    assert f"export HEARTH_URL={tab.address}/v1" in text
    assert "HEARTH_MODEL=service-pro" in text
    tab.page.locator("summary").nth(9).wait_for()
    assert "your-server" not in tab.page.get_by_role("main").text_content()
    tab.go("My key")
    assert key.public_id in tab.page.get_by_role("main").inner_text()


def test_hostile_texts_are_shown_as_they_are_written_and_do_nothing(tab: Tab, server: Server):
    """As answers, reasoning, tool calls, titles, pictures and settings of an imported chat: the way that all texts take."""
    calls = [{"id": text, "name": text, "arguments": text} for text in HOSTILE[:20]]
    answers = [{"role": "assistant", "text": text, "reasoning": text, "stats": text, "error": text} for text in HOSTILE]
    asked = {"role": "user", "text": HOSTILE[1], "pictures": ["javascript:window.ran=1", "http://attacker.test/x.png"]}
    chat = {"id": HOSTILE[1], "title": HOSTILE[0], "settings": {"system": HOSTILE[2], "tools": HOSTILE[3]}}
    messages = [asked, *answers, {"role": "assistant", "calls": calls}]
    file = json.dumps({"chats": [chat | {"messages": messages}]}).encode()
    tab.page.get_by_text("Settings").click()
    upload = {"name": "chats.json", "mimeType": "application/json", "buffer": file}
    tab.page.get_by_label("File of chats").set_input_files(upload)
    tab.page.locator(".message.assistant").nth(len(HOSTILE)).wait_for()
    shown = tab.page.locator(".messages").text_content()
    for text in HOSTILE[:45]:
        assert text.replace("\x00", "").strip() in shown.replace("\ufffd", "").replace("\x00", ""), text
    for open_ in tab.page.locator(".reasoning summary").all()[:3]:
        open_.click()
    for link in tab.page.locator(".message a").all():
        assert re.match("https?://", link.get_attribute("href"))
        assert link.get_attribute("rel") == "noreferrer noopener"
    assert (
        tab.page.locator(".message :is(script, iframe, object, embed, svg, style, link, meta, base, video)").count()
        == 0
    )
    assert tab.page.evaluate("window.ran") == 0


def test_a_hostile_name_of_a_key_is_only_a_name(tab: Tab, server: Server, admin_key: Key):
    name = "<img src=x onerror=window.ran=1>" + "W" * 30
    server.make_key(name)
    tab.sign_out()
    tab.sign_in(admin_key)
    tab.go("Keys")
    tab.page.get_by_text(name).wait_for()
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.page.evaluate("window.ran") == 0


def test_an_admin_hands_out_a_key_that_works_and_takes_it_back(browser: Browser, server: Server, admin_key: Key):
    with opened(browser, server) as one:
        one.sign_in(admin_key)
        one.go("Keys")
        one.page.get_by_role("button", name="New key").click()
        one.page.get_by_label("Name: whose it is, or what for").fill("Selam of the office")
        one.page.get_by_role("dialog").get_by_label("Tier").select_option("standard")
        one.page.get_by_role("button", name="Make the key").click()
        shown = one.page.get_by_role("dialog", name="The key, shown once")
        text = shown.locator("code").first.inner_text()
        server.made_keys.append(Key(text))
        headers = {"Authorization": f"Bearer {text}"}
        own = httpx2.get(f"{server.base_url}/key", headers=headers).json()
        assert (own["name"], own["tier"]) == ("Selam of the office", "standard")
        assert "admin" not in own["scopes"]
        shown.get_by_role("button", name="Close").click()
        assert text not in one.page.content()
        revoke = one.page.get_by_role("row", name="Selam of the office").get_by_role(
            "button", name=re.compile("Revoke|Sure")
        )
        revoke.click()
        revoke.click()
        poll_until(lambda: httpx2.get(f"{server.base_url}/key", headers=headers).status_code == 401, 60)
        one.check()


def test_batches_are_listed_with_their_progress_and_their_files(tab: Tab, server: Server, key: Key):
    headers = {"Authorization": f"Bearer {key.text}"}
    with httpx2.Client(base_url=server.base_url, headers=headers, timeout=30) as http:
        lines = jsonl([line("good"), line("wrong", temperature=7)])
        sent = http.post("/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "batch"}).json()
        body = {"input_file_id": sent["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        batch = http.post("/batches", json=body | {"metadata": {"who": "<b>Selam</b>"}}).json()["id"]
    tab.go("Batches")
    card = tab.page.get_by_role("listitem").filter(has_text=batch)
    card.get_by_text("completed").wait_for()
    assert card.get_by_text("2 of 2 lines, 1 of them errors").is_visible()
    assert card.get_by_role("progressbar").evaluate("one => one.value / one.max") == 1
    assert card.get_by_text("who: <b>Selam</b>").is_visible()
    for name, custom_id in (("Answers", "good"), ("Errors", "wrong")):
        with tab.page.expect_download() as download:
            card.get_by_role("button", name=name).click()
        (one,) = read_jsonl(Path(download.value.path()).read_bytes())
        assert one["custom_id"] == custom_id
