"""Open WebUI in a browser, set up with its block of docs/clients.md and nothing else: it gives a chat its title and
tags, answers from ten texts and names the right one, writes down what is dictated, and has a picture edited.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
import wave
from collections.abc import Iterator
from pathlib import Path

import checks
from checks import API_KEY, BASE_URL, DEMO
from PIL import Image, ImageDraw
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

ADDRESS = f"http://127.0.0.1:{os.environ['FREE_PORT']}"
PICTURES = Path(os.environ["PICTURES"])  # of what it shows; with `PAGE_PICTURES=docs` those of the documentation
DOCS = Path(__file__).parents[3] / "docs" / "clients.md"
FOUND = json.loads(Path(__file__).with_name("texts.json").read_text(encoding="utf-8"))
SOUND = Path("said.wav").absolute()
SILENCE = 1  # second, before and after
expect.set_options(timeout=60_000)


def say() -> float:
    """Have the sentence spoken into SOUND, with silence around it; how long that is."""
    body = {"model": "service-voice", "voice": "emma", "input": DEMO["said"], "response_format": "wav"}
    request = urllib.request.Request(  # noqa: S310  the server under test
        f"{BASE_URL}/audio/speech",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        spoken = answer.read()
    with wave.open(io.BytesIO(spoken)) as reader, wave.open(str(SOUND), "wb") as writer:
        writer.setparams(reader.getparams())
        silence = bytes(SILENCE * reader.getframerate() * reader.getsampwidth() * reader.getnchannels())
        writer.writeframes(silence + reader.readframes(reader.getnframes()) + silence)
        return 2 * SILENCE + reader.getnframes() / reader.getframerate()


@contextlib.contextmanager
def open_webui() -> Iterator[None]:
    """Run it as the documentation says, on another port and with its data here."""
    section = DOCS.read_text(encoding="utf-8").partition("\n### Open WebUI\n")[2]
    (_, block, *_) = re.split(r"^```\w*\n", section, flags=re.MULTILINE)
    environment = {name: os.environ[name] for name in ("HOME", "LANG")}
    environment |= {"PATH": f"{os.environ['PROGRAMS']}:{os.environ['PATH']}", "DATA_DIR": str(Path.cwd())}
    environment |= {"HEARTH_URL": BASE_URL, "HEARTH_KEY": API_KEY, "OFFLINE_MODE": "true"}
    command = f"{block.strip()} --host 127.0.0.1 --port {os.environ['FREE_PORT']}"
    with Path("open-webui.log").open("wb") as log:
        running = subprocess.Popen(["bash", "-c", command], env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 150
        while True:
            try:
                urllib.request.urlopen(f"{ADDRESS}/health", timeout=10).close()  # noqa: S310  its address stands above
                break
            except OSError:
                if running.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(Path("open-webui.log").read_text(encoding="utf-8")[-3000:]) from None
                time.sleep(0.5)
        yield
    finally:
        running.terminate()
        running.wait(30)


def sign_up() -> None:
    page.goto(ADDRESS)
    page.get_by_role("button", name="Get started").click()
    page.get_by_placeholder("Enter Your Full Name").fill("Ada")
    page.get_by_placeholder("Enter Your Email").fill("ada@example.org")
    page.get_by_placeholder("Enter Your Password").fill("a long password")
    page.get_by_role("button", name="Create Admin Account").click()
    page.get_by_role("button", name="Okay, Let's Go!").click()  # what is new in this version


def chat(path: str = "/") -> None:
    page.goto(ADDRESS + path)
    page.locator("#chat-input").wait_for()


def ask(text: str) -> None:
    page.locator("#chat-input").fill(text)
    page.locator("#send-message-button").click()


def keep(name: str) -> None:
    picture = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB").quantize(96)
    picture.save(PICTURES / f"open-webui-{name}.png", optimize=True)


def title_and_tags() -> None:
    chat(f"/?models={checks.SEEING}")
    ask("what is the capital of france?")
    expect(page.locator(".chat-assistant")).to_contain_text("Paris")
    expect(page).to_have_title(re.compile("Capital Cities"))
    expect(page.get_by_role("button", name="Tell me a short story.")).to_be_visible()  # what could be said next
    keep("title")
    token = {"Authorization": f"Bearer {page.evaluate('localStorage.token')}"}
    tags = page.request.get(f"{ADDRESS}/api/v1/chats/all/tags", headers=token).json()
    checks.same([tag["name"] for tag in tags], ["Capital Cities"])


def answer_from_texts() -> None:
    page.goto(f"{ADDRESS}/workspace/knowledge/create")
    page.get_by_placeholder("Name your knowledge base").fill("House rules")
    page.get_by_placeholder("Describe your knowledge base and objectives").fill("What everybody here asks")
    page.get_by_role("button", name="Create Knowledge").click()
    page.get_by_label("Knowledge Name").wait_for()
    files = [{"name": name, "mimeType": "text/plain", "buffer": text.encode()} for name, text in FOUND["texts"].items()]
    page.locator("#files-input").set_input_files(files)
    for text in FOUND["texts"].values():  # their sizes stand where "Uploading" and "Processing" stood
        page.get_by_text(f"{len(text)}.0 B", exact=True).wait_for()

    chat()
    page.locator("#input-menu-button").click()
    page.get_by_text("Attach Knowledge").click()
    page.get_by_role("button", name="House rules").click()
    ask(FOUND["question"])
    right = FOUND["texts"][FOUND["file"]]
    answer = page.locator(".chat-assistant")
    expect(answer).to_contain_text(right)
    expect(answer.get_by_role("button", name=FOUND["file"])).to_be_visible()
    page.get_by_role("button", name=re.compile(r"Toggle \d+ source")).click()
    source = page.get_by_role("button", name=f"View source: 1 {FOUND['file']}")
    source.wait_for()
    keep("texts")
    source.click()
    expect(page.get_by_role("dialog")).to_contain_text(right)


def dictation() -> None:
    chat()
    page.locator("#voice-input-button").click()
    page.get_by_text(f"0:0{int(SECONDS) + 2}").wait_for()
    page.locator("#confirm-recording-button").click()
    expect(page.locator("#chat-input")).to_have_text(DEMO["said"])
    keep("dictation")


def edited_picture() -> None:
    picture, file = Image.new("RGB", (256, 256), "white"), io.BytesIO()
    ImageDraw.Draw(picture).rectangle((64, 64, 191, 191), "red")
    picture.save(file, "PNG")
    chat(f"/?models={checks.SEEING}")
    page.locator("input[type=file][multiple]").first.set_input_files(
        {"name": "square.png", "mimeType": "image/png", "buffer": file.getvalue()}
    )
    page.locator("#integration-menu-button").click()
    page.get_by_role("menuitemcheckbox", name="Image").click()
    page.keyboard.press("Escape")
    ask("a blue square")
    shown = page.locator(".chat-assistant img[src*='/files/']")
    expect(shown).to_be_visible()
    edited = Image.open(io.BytesIO(page.request.get(f"{ADDRESS}{shown.get_attribute('src')}").body())).convert("RGB")
    red, green, blue = edited.getpixel((edited.width // 2, edited.height // 2))
    checks.true(blue > 128 > max(red, green), (red, green, blue))
    checks.true(min(edited.getpixel((5, 5))) > 240, "around it the picture is as it was")
    page.set_viewport_size({"width": 1100, "height": 1200})  # both pictures
    keep("picture")


SECONDS = say()
HEARD = ("--use-fake-device-for-media-stream", f"--use-file-for-fake-audio-capture={SOUND}%noloop")
with open_webui(), sync_playwright() as playwright:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", *HEARD])
    context: BrowserContext = browser.new_context(viewport={"width": 1100, "height": 700}, permissions=["microphone"])
    context.set_default_timeout(60_000)
    page: Page = context.new_page()
    sign_up()
    every = (title_and_tags, answer_from_texts, dictation, edited_picture)
    checks.run(*(check for check in every if check.__name__ in os.environ["CHECKS"].split()))
