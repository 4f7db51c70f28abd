"""What a person gives the page beside text: his voice by a microphone, sound files, and pictures to be changed."""

import io
import re
import wave
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
from demo_models.transcription.sentences import fixed_sentences
from page_parts import CHROMIUM, MISSING, Browser, Tab, chromium, opened
from PIL import Image
from playwright.sync_api import expect
from serving import Key, Server, poll_until
from sound_parts import RATE, needs_espeak, samples_of, wav

pytestmark = [pytest.mark.engine, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]
SAID = fixed_sentences()[-3]
expect.set_options(timeout=45_000)  # other tests may share the cores
ELSEWHERE = "hearth.test"


@pytest.fixture(scope="module")
def sound(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence that the demo knows, with silence around it: what Chromium's microphone hears once."""
    assert server.admin_key is not None
    headers = {"Authorization": f"Bearer {server.admin_key.text}"}
    body = {"model": "service-voice", "voice": "emma", "input": SAID, "response_format": "wav"}
    answer = httpx2.post(f"{server.base_url}/audio/speech", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    file = tmp_path_factory.mktemp("sound") / "said.wav"
    silence = np.zeros(RATE)
    file.write_bytes(wav(np.concatenate([silence, samples_of(answer.content), silence])))
    return file


@pytest.fixture(scope="module")
def browser(sound: Path) -> Iterator[Browser]:
    """A browser whose microphone hears the sentence, and that knows the server by another name, too."""
    heard = f"--use-file-for-fake-audio-capture={sound}%noloop"
    elsewhere = f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1"
    with chromium("--use-fake-device-for-media-stream", heard, elsewhere) as running:
        yield running


def record(tab: Tab, name: str, sound: Path) -> None:
    with wave.open(str(sound)) as reader:
        seconds = reader.getnframes() / reader.getframerate()
    tab.page.get_by_role("button", name=name, exact=True).click()
    stop = tab.page.get_by_role("button", name="Stop recording")
    # A busy browser may leave out a second.
    stop.get_by_text(re.compile("|".join(f"0:{at:02d}" for at in range(int(seconds) + 1, 60)))).wait_for()
    stop.click()


@needs_espeak
def test_what_the_microphone_hears_becomes_text_for_reading_and_for_the_chat(
    browser: Browser, server: Server, key: Key, sound: Path
):
    with opened(browser, server, permissions=["microphone"]) as one:
        one.sign_in(key)
        record(one, "Dictate", sound)
        expect(one.page.get_by_label("Message", exact=True)).to_have_value(SAID)
        one.go("Voices")
        record(one, "Record", sound)
        expect(one.page.get_by_role("log", name="Transcript")).to_have_text(SAID)
        one.page.get_by_role("button", name="Copy").wait_for()
        assert one.page.locator("audio").evaluate("one => one.src").startswith("blob:")
        one.check()


@needs_espeak
def test_a_sound_file_is_transcribed_as_text_and_as_subtitles(tab: Tab, sound: Path):
    tab.go("Voices")
    tab.page.get_by_label("Sound file").set_input_files(sound)
    text = tab.page.get_by_role("log", name="Transcript")
    expect(text).to_have_text(SAID)
    tab.page.get_by_label("Result as").select_option("srt")
    tab.page.get_by_role("button", name="Again").click()
    expect(text).to_have_text(re.compile(rf"1\s00:00:0\S+ --> 00:00:0\S+\s{SAID}"))
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Save", exact=True).click()
    assert download.value.suggested_filename == "transcript.srt"
    silence = {"name": "silence.wav", "mimeType": "audio/wav", "buffer": wav(np.zeros(RATE))}
    tab.page.get_by_label("Result as").select_option("text")
    tab.page.get_by_label("Sound file").set_input_files(silence)
    expect(text).to_have_text("No speech was found in it.")
    tab.page.get_by_label("Sound file").set_input_files({**silence, "buffer": b"no sound" * 99})
    expect(tab.page.get_by_role("alert").last).to_contain_text("cannot be read")
    tab.errors.clear()  # Chromium's own line on a 400


def test_a_browser_that_refuses_the_microphone_is_explained(browser: Browser, server: Server, key: Key):
    """Nobody has allowed it; and a page of another host without HTTPS has none to ask for."""
    elsewhere = server.root_url.replace("127.0.0.1", ELSEWHERE)
    for address, words in ((server, "Allow it beside the address"), (elsewhere, "only on pages with HTTPS")):
        with opened(browser, address) as one:
            one.sign_in(key)
            one.go("Voices")
            one.page.get_by_role("button", name="Record", exact=True).click()
            failure = one.page.get_by_role("alert").get_by_text(words)
            failure.wait_for()
            assert "hoose a sound file" in failure.inner_text()
            one.check()


def test_only_this_server_may_ask_for_the_microphone(server: Server):
    for path in ("/", "/console/js/app.js"):
        answer = httpx2.get(f"{server.root_url}{path}", headers={"Accept": "text/html"}, timeout=60)
        assert "microphone=(self)" in answer.headers["permissions-policy"]
        assert "camera=()" in answer.headers["permissions-policy"]


def picture_of(tab: Tab, at: int) -> np.ndarray:
    """The pixels of an image of the gallery, the newest first."""
    link = tab.page.locator(".gallery figure > a").nth(at).get_attribute("href")
    answer = tab.page.request.get(f"{tab.address}/{link}")
    return np.asarray(Image.open(io.BytesIO(answer.body())).convert("RGB"))


def test_what_is_painted_over_changes_and_the_rest_stays_as_it_is(tab: Tab):
    tab.go("Images")
    tab.page.get_by_label("Size").select_option("256x256")
    tab.page.get_by_label("What it shows", exact=True).fill("a red circle")
    tab.page.get_by_role("button", name="Make", exact=True).click()
    tab.page.get_by_role("button", name="Edit", exact=True).click(timeout=60_000)
    tab.page.get_by_label("What it does not show").wait_for(state="detached")  # the demo refuses it
    canvas = tab.page.get_by_label("What may change")
    box = canvas.bounding_box()
    assert box is not None
    tab.page.get_by_label("Brush").fill("25")
    tab.page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.5)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5, steps=5)
    tab.page.mouse.up()
    tab.page.get_by_text("Only what is painted changes.").wait_for()
    tab.page.get_by_label("What it shows when it is done").fill("a blue circle")
    tab.page.locator("form").get_by_role("button", name="Edit", exact=True).click()
    tab.page.get_by_text("of a picture").wait_for(timeout=60_000)
    before, after = picture_of(tab, 1).astype(int), picture_of(tab, 0).astype(int)
    changed = np.abs(before - after).max(axis=2) > 0
    rows, columns = np.nonzero(changed)
    assert changed.sum() > 500
    brush = 0.25 / 2 + 0.01
    assert columns.min() >= 256 * (0.4 - brush)
    assert columns.max() <= 256 * (0.6 + brush)
    assert rows.min() >= 256 * (0.5 - brush)
    assert rows.max() <= 256 * (0.5 + brush)


def test_a_picture_of_ones_own_is_varied_and_painted_by_keyboard(tab: Tab):
    """A photograph of another shape is cut as the server would; paint comes from the keys of a keyboard, too."""
    file = io.BytesIO()
    Image.new("RGB", (300, 200), "navy").save(file, "JPEG")
    tab.go("Images")
    tab.page.get_by_label("Size").select_option("256x256")
    picture = {"name": "one.jpg", "mimeType": "image/jpeg", "buffer": file.getvalue()}
    tab.page.get_by_label("Picture to start from").set_input_files(picture)
    canvas = tab.page.get_by_label("What may change")
    canvas.focus()
    for name in ("ArrowLeft", "Shift+ArrowUp", "Space"):
        tab.page.keyboard.press(name)
    tab.page.get_by_text("Only what is painted changes.").wait_for()
    painted = "one => one.getContext('2d').getImageData(0, 0, 256, 256).data.filter((value) => value === 255).length"
    assert canvas.evaluate(painted) > 300
    tab.page.get_by_role("button", name="Clear").click()
    assert canvas.evaluate(painted) == 0
    with tab.page.expect_request("**/v1/images/variations") as asked:
        tab.page.get_by_role("button", name="Variations").click()
        poll_until(lambda: tab.page.locator(".gallery figure > a").count() == 1, 60)
    sent = asked.value.post_data_buffer or b""
    assert b'name="mask"' not in sent
    assert picture_of(tab, 0).shape == (256, 256, 3)
    junk = {"name": "one.png", "mimeType": "image/png", "buffer": b"no picture"}
    tab.page.get_by_label("Picture to start from").set_input_files(junk)
    expect(tab.page.get_by_role("alert")).to_contain_text("cannot read this file")
