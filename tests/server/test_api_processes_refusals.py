"""What is refused is refused by a server with two API processes as by one with one, and none outlives its lead."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import httpx2
import psutil
import pytest
from chat_parts import CHAT
from front_parts import fronts
from process_parts import assert_all_gone
from serving import Server
from small_models import VOICES_ONLY

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine


def small(folder: Path, processes: int) -> Server:
    (folder / "models.yaml").write_text(VOICES_ONLY)
    return Server(
        folder, environment={"HEARTH_MODELS": str(folder / "models.yaml"), "HEARTH_API_PROCESSES": str(processes)}
    )


VOICE = {"model": "service-voice", "messages": [{"role": "user", "content": "Hello"}]}
REFUSED: list[tuple[str, str, Any]] = [
    ("POST", CHAT, VOICE),  # by the engine
    ("POST", CHAT, VOICE),  # by the limits
    ("POST", CHAT, VOICE | {"model": "no-such-model"}),
    ("POST", CHAT, VOICE | {"temperature": 9}),
    ("POST", CHAT, VOICE | {"stream": True}),
    ("POST", CHAT, b'{"model": NaN}'),
    ("POST", CHAT, b"x" * 2**21),
    ("POST", "/v1/messages", VOICE | {"max_tokens": 3}),
    ("POST", "/v1/messages", VOICE | {"max_tokens": 0}),
    ("POST", "/v1/responses", {"model": "service-voice", "input": 3}),
    ("POST", "/v1/completions", {"model": "service-voice", "prompt": []}),
    ("POST", f"{CHAT}/", VOICE),
    ("POST", "/chat/completions", VOICE),
    ("GET", CHAT, None),
    ("OPTIONS", CHAT, None),
    ("DELETE", "/v1/models", None),
    ("POST", "/v1/audio/speech", {"model": "service-voice", "input": ""}),
    ("GET", "/v1/images/files/none.png", None),
]
_OWN = {"date", "x-request-id"}


def refusals(server: Server) -> list[Any]:
    """What each is answered, with a key that has one request per minute, and without any."""
    assert server.admin_key is not None
    made = httpx2.post(
        f"{server.base_url}/admin/keys",
        json={"name": "one", "tier": "standard", "limits": {"requests_per_minute": 1}},
        headers={"Authorization": f"Bearer {server.admin_key.text}"},
        timeout=30,
    )
    headers = {"Authorization": f"Bearer {made.json()['key']}"}
    found = []
    for sent in (headers, {}):
        for method, path, body in REFUSED:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            typed = sent | {"Content-Type": "application/json"}
            answer = httpx2.request(method, server.root_url + path, headers=typed, timeout=30, **content)
            kept = {name: value for name, value in answer.headers.items() if name not in _OWN}
            found.append((method, path, answer.status_code, kept, answer.content))
    return found


def test_refusals_are_the_same_as_of_one_process_and_kill_9_of_the_lead_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    with small(tmp_path / "1", 1) as one:
        expected = refusals(one)
        assert fronts(one) == []
    with small(tmp_path / "2", 2) as two:
        for found, wanted in zip(refusals(two), expected, strict=True):
            assert found == wanted
        family = psutil.Process(two.pid).children(recursive=True)
        assert len(fronts(two)) == 2
        os.kill(two.pid, signal.SIGKILL)
        assert_all_gone(family)
