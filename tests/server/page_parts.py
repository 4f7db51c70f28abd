"""The page in a real browser: Debian's Chromium, steered by Playwright. Everything that leads elsewhere is cut off."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, BrowserContext, Page, Route, sync_playwright
from serving import Key, Server

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MISSING = "no browser: apt-get install chromium fonts-noto-core"
PAGES = ["Chat", "Images", "Voices", "Batches", "Models", "Usage", "Connect", "My key", "Keys", "Status"]
# Of an answer that somebody has to stop: a minute's work, also for the demo.
ENDLESS_TOKENS = 20_000
# Reports what the policy forbids, and what would have become markup or a script.
_WATCH = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (event) => window.violations.push(event.violatedDirective));
window.ran = 0;
"""


@dataclass
class Tab:
    """A page of the browser, and what went wrong in it."""

    page: Page
    address: str
    foreign: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def sign_in(self, key: Key) -> None:
        self.page.goto(self.address)
        self.page.get_by_label("Your key").fill(key.text)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.locator("nav").wait_for(state="attached")

    def sign_out(self) -> None:
        self.page.get_by_role("button", name="Sign out").click()
        self.page.get_by_label("Your key").wait_for()

    def go(self, name: str) -> None:
        """Open a page by its name in the menu."""
        menu = self.page.get_by_role("button", name="Menu")
        if menu.is_visible():
            menu.click()
        self.page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
        self.page.get_by_role("main", name=name).wait_for()

    def ask(self, text: str) -> None:
        self.page.get_by_label("Model", exact=True).locator("option").first.wait_for(state="attached")
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def answered(self, answers: int = 1) -> str:
        """Wait for so many whole answers; the text of the last."""
        self.page.get_by_role("button", name="Regenerate").nth(answers - 1).wait_for()
        self.page.get_by_role("button", name="Send", exact=True).wait_for()
        return self.page.locator(".message.assistant .markdown").last.inner_text()

    def check(self) -> None:
        """Nothing went anywhere else, nothing was forbidden, nothing failed."""
        assert self.foreign == []
        assert self.errors == []
        assert self.page.evaluate("window.violations") == []


@contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *flags])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, server: Server | str, **how: object) -> Iterator[Tab]:
    """A tab of a browser of its own, of a server or an address: no cookies of another.

    `how` is for Playwright's `new_context`.
    """
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **how})
    context.set_default_timeout(45_000)  # other tests may share the cores
    with context:
        yield new_tab(context, server if isinstance(server, str) else server.root_url)


def new_tab(context: BrowserContext, address: str) -> Tab:
    tab = Tab(context.new_page(), address)
    tab.page.add_init_script(_WATCH)
    tab.page.route(lambda url: not url.startswith((address, "data:", "blob:")), _cut_off(tab))
    tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
    tab.page.on("console", lambda line: tab.errors.append(line.text) if line.type == "error" else None)
    return tab


def _cut_off(tab: Tab) -> Callable[[Route], None]:
    def cut_off(route: Route) -> None:
        tab.foreign.append(route.request.url)
        route.abort()

    return cut_off
