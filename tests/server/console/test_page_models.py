"""The page of models where there is more than one engine behind a name, adapters beside it, and models without a chat."""

import re
import shutil
from pathlib import Path

import pytest
from adapter_parts import make_adapter
from page_parts import CHROMIUM, MISSING, Browser, Tab, opened
from playwright.sync_api import Locator
from serving import Server

from engine.demo import weights_dir

pytestmark = [pytest.mark.engine, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]
YAML = """\
models:
  plus: {task: chat, tier: standard, capabilities: [chat, streaming], weights: own, replicas: 2}
  legal: {task: adapter, tier: standard, base: plus, weights: adapters/legal, description: For contracts.}
  broken: {task: adapter, tier: standard, base: plus, weights: adapters/broken}
tiers:
  standard: {models: [standard]}
"""


def card(tab: Tab, name: str) -> Locator:
    heading = tab.page.get_by_role("heading", name=re.compile(rf"^{name} "))
    return tab.page.get_by_role("listitem").filter(has=heading)


def test_texts_are_sorted_by_models_for_embeddings_and_reranking(tab: Tab):
    """And each kind of model has lines for programs, with this address."""
    for name in ("service-rerank", "service-embedding"):
        tab.go("Models")
        model = card(tab, name)
        model.get_by_text("Try it").click()
        model.get_by_label("Question").fill("Where is the key?")
        model.get_by_label("Texts").fill("It rains today.\n\nThe key is on the table.")
        model.get_by_role("button", name="Sort by relevance").click()
        model.locator("ol li").nth(1).wait_for()
        assert model.locator("ol li").first.inner_text().startswith("The key is on the table.")
        model.get_by_role("link", name="Use it in a program").click()
        lines = tab.page.get_by_role("main", name="Connect")
        path = name.removeprefix("service-").replace("embedding", "embeddings")
        assert f"curl $HEARTH_URL/{path} " in lines.inner_text()
        assert f'"model": "{name}"' in lines.inner_text()
    tab.go("Models")
    card(tab, "service-transcription").get_by_role("link", name="Transcribe").click()
    tab.page.get_by_role("main", name="Voices").wait_for()


@pytest.mark.rounds
@pytest.mark.timeout(300)
def test_engines_and_adapters_stand_beside_their_model(browser: Browser, tmp_path: Path):
    (tmp_path / "models.yaml").write_text(YAML)
    weights = tmp_path / "weights"
    shutil.copytree(weights_dir("chat"), weights / "own")  # a demo has no adapters
    make_adapter(weights / "adapters" / "legal")
    make_adapter(weights / "adapters" / "broken", sizes={"self_attn.q_proj": (32, 256)})
    server = Server(tmp_path, environment={"HEARTH_MODELS": str(tmp_path / "models.yaml")})
    try:
        server.start()
        server.wait_for_line("Ready, but for 1 of", 200)
        assert server.admin_key is not None
        with opened(browser, server) as one:
            one.sign_in(server.admin_key)
            one.go("Models")
            engines = one.page.get_by_role("region", name="Engines of plus").get_by_role("row")
            for at, name in ((1, "plus"), (2, "plus#2")):
                assert re.match(rf"{name}\s+ready\s+0\s+0\s+RAM [\d.]+ [MG]iB\s+0", engines.nth(at).inner_text())
            model = card(one, "plus")
            assert model.get_by_text("legal (standard): For contracts.").is_visible()
            assert "was made for another model" in model.locator("li", has_text="broken").inner_text()
            assert one.page.locator(".card").count() == 1
            assert one.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            one.check()
    finally:
        server.kill()
