"""A server with a limit of memory (a container's, or MemoryMax of its unit) that is exceeded: the model's process dies."""

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx2
import psutil
import pytest
from chat_parts import assert_error
from memory_group import MemoryGroup, missing_reason
from process_parts import alive
from serving import Server, poll_until
from small_models import VOICES_ONLY
from speech_parts import HELLO_EMMA, SPEECH, VOICE_MODEL

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

GIB = 2**30
SPARE_BYTES = 100 << 20
BACK_SECONDS = 240
SAID = "The kernel killed its process for lack of memory"


@pytest.fixture(scope="module")
def group() -> Iterator[MemoryGroup]:
    if (reason := missing_reason()) is not None:
        pytest.skip(reason)
    with MemoryGroup(6 * GIB) as made:
        yield made


@pytest.fixture(scope="module")
def server(group: MemoryGroup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("short")
    (folder / "models.yaml").write_text(VOICES_ONLY)
    started = Server(folder, environment={"HEARTH_MODELS": str(folder / "models.yaml")})
    with group.entered():
        started.start()
    try:
        started.wait_until_ready()
        yield started
        assert started.stop() == 0, started.log()
    finally:
        started.kill()


@contextmanager
def eater(group: MemoryGroup, size_bytes: int) -> Iterator[None]:
    """Another process in the group, which takes so much and keeps it."""
    program = f"held = bytearray(b'x') * {size_bytes}; input()"
    with group.entered(), subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        group.leave()
        try:
            yield
        finally:
            process.kill()


def model(server: Server) -> dict[str, Any]:
    return dict(httpx2.get(f"{server.root_url}/health/ready", timeout=60).json()["models"][VOICE_MODEL])


def test_the_models_process_is_killed_and_the_server_says_why_and_has_it_back(server: Server, group: MemoryGroup):
    assert server.admin_key is not None
    headers = {"Authorization": f"Bearer {server.admin_key.text}"}
    found = json.loads(server.hearth("status", "--json"))
    assert found["ram_total_bytes"] == 6 * GIB
    assert found["ram_available_bytes"] <= 6 * GIB - found["models"][0]["memory"]["ram_bytes"]
    (worker,) = map(psutil.Process, found["models"][0]["pids"])
    answers: list[httpx2.Response] = []
    ended = threading.Event()

    def ask() -> None:
        with httpx2.Client(base_url=server.root_url, headers=headers, timeout=240) as client:
            while not ended.is_set():
                with suppress(httpx2.RemoteProtocolError):  # an answer that had begun breaks off
                    answers.append(client.post(SPEECH, json=HELLO_EMMA))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        poll_until(lambda: bool(answers), 60, describe=server.log)  # one that is not refused
        group.limit(group.used_bytes + SPARE_BYTES)
        with eater(group, 2 * SPARE_BYTES):
            poll_until(lambda: not alive(worker), 60, describe=server.log)
            poll_until(lambda: SAID in server.log(), 60, describe=server.log)
            state = model(server)
            assert state["status"] == "loading"
            assert state["restarts"] >= 1  # a start has just as little
            assert SAID in state["reason"]
        group.limit(6 * GIB)  # a model takes more while it is loaded
        poll_until(server.is_ready, BACK_SECONDS, describe=server.log)
        assert model(server)["reason"] is None
    finally:
        ended.set()
        asking.join(240)
    assert Counter(answer.status_code for answer in answers).keys() == {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert_error(answer, 503, "engine_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
    assert httpx2.post(f"{server.root_url}{SPEECH}", json=HELLO_EMMA, headers=headers, timeout=60).status_code == 200
