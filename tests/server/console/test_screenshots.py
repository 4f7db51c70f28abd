"""The pictures of README and docs/page.md, taken of a server at work: `PAGE_PICTURES=docs` puts them there."""

import io
import os
from pathlib import Path

import pytest
from page_parts import CHROMIUM, MISSING, Tab, chromium, opened
from PIL import Image
from serving import Key, Server

pytestmark = [pytest.mark.engine, pytest.mark.rounds, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]
SIZE = {"width": 1100, "height": 700}
PROMPTS = ("a red circle", "a blue star", "a green triangle", "a yellow square")


def fill(tab: Tab) -> None:
    """Ask, draw and speak, so that there is something to see."""
    for at, text in enumerate(("What is the capital of Ethiopia?", "Tell me a short story."), 1):
        tab.ask(text)
        tab.answered(at)
    tab.go("Images")
    tab.page.get_by_label("Size").select_option("256x256")
    for at, prompt in enumerate(PROMPTS, 1):
        tab.page.get_by_label("What it shows").fill(prompt)
        tab.page.get_by_role("button", name="Make", exact=True).click()
        tab.page.get_by_role("button", name="Use seed").nth(at - 1).wait_for(timeout=60_000)
        tab.page.get_by_role("button", name="Make", exact=True).wait_for()
    tab.go("Voices")
    tab.page.get_by_role("button", name="Speak").click()
    tab.page.locator("audio").wait_for()


def test_the_pictures_show_a_server_at_work(server: Server, admin_key: Key, tmp_path: Path):
    folder = Path(os.environ.get("PAGE_PICTURES", tmp_path))
    with chromium() as browser, opened(browser, server, viewport=SIZE) as tab:
        tab.sign_in(admin_key)
        fill(tab)
        for name in ("Chat", "Images", "Models", "Usage"):
            tab.go(name)
            if name == "Models":
                tab.page.get_by_role("region", name="Memory").wait_for()
            for scheme in ("light", "dark"):
                tab.page.emulate_media(color_scheme=scheme)
                tab.page.wait_for_load_state("networkidle")
                picture = Image.open(io.BytesIO(tab.page.screenshot())).convert("RGB").quantize(96)
                file = folder / f"page-{name.lower()}-{scheme}.png"
                picture.save(file, optimize=True)
                assert 4_000 < file.stat().st_size < 120_000
        tab.check()
