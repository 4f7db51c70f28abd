"""What the page is made of: libraries that are what they say, nothing that makes markup of text, and how much it is."""

import hashlib
import json
import re
import runpy
from pathlib import Path

import pytest
from serving import ROOT

from server.console.routes import files as page_files

STATIC = ROOT / "server/console/static"
OWN = sorted(STATIC.glob("js/*.js"))
SINKS = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "eval(",
    "new Function",
    "srcdoc",
    "dangerously",
)


def test_the_libraries_are_the_ones_that_the_manifest_names():
    manifest = json.loads((STATIC / "vendor/MANIFEST.json").read_text())
    listed = {name: digest for one in manifest for name, digest in one["sha256"].items()}
    there = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in STATIC.glob("vendor/*.mjs")}
    assert there == listed
    for one in manifest:
        assert one["licence"] in {"MIT", "Apache-2.0"}
        assert (STATIC / "vendor" / one["notice"]).is_file()


@pytest.mark.parametrize("sink", SINKS)
def test_no_text_becomes_markup(sink: str):
    assert [path.name for path in OWN if sink in path.read_text()] == []


def test_nothing_comes_from_elsewhere():
    text = "".join(path.read_text() for path in [*OWN, STATIC / "index.html", STATIC / "app.css"])
    addresses = set(re.findall(r"https?://[\w.:-]+", text)) - {"http://your-server:8000"}
    assert addresses == set()
    assert "http" not in (STATIC / "icon.svg").read_text().replace("http://www.w3.org/2000/svg", "")


def test_the_page_is_small_enough_to_be_read():
    lines = {path: len(path.read_text().splitlines()) for path in OWN}
    assert sum(lines.values()) <= 2500, lines
    assert max(map(len, "\n".join(path.read_text() for path in OWN).splitlines())) <= 160
    assert len((STATIC / "app.css").read_text().splitlines()) <= 300
    python = [*(ROOT / "server/console").glob("*.py"), *ROOT.glob("server/*/sessions.py")]
    assert sum(len(path.read_text().splitlines()) for path in python) <= 500


def test_the_page_weighs_at_most_250_kilobytes():
    sent = page_files()
    assert sum(len(file.content) for file in sent.values()) <= 250_000
    assert sum(len(file.packed) for file in sent.values()) <= 80_000


def test_the_policy_allows_nothing_unsafe():
    policy = page_files()["index.html"].headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "*" not in policy
    for part in ("default-src 'none'", "script-src 'self';", "trusted-types 'none'", "frame-ancestors 'none'"):
        assert part in policy


def test_the_lines_for_clients_are_those_of_the_documentation():
    """After a change there: scripts/pages/vendor-console --clients."""
    made = runpy.run_path(str(ROOT / "scripts/pages/vendor-console"))["clients"]()
    assert (STATIC / "clients.json").read_text(encoding="utf-8") == made
    assert len(json.loads(made)) >= 10


def test_no_name_of_a_client_reaches_the_disk():
    assert "../routes.py" not in page_files()
    assert {Path(name).suffix for name in page_files()} <= {".css", ".html", ".js", ".json", ".mjs", ".svg"}
