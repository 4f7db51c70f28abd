"""The voices that come with Hearth from a real server: nine that say words, fifty at once, and back after a kill."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
from serving import READY_SECONDS, Server, poll_until
from small_models import VOICES_ONLY
from speech_parts import HELLO_EMMA, NINE, SPEECH, TEXTS, VOICE_MODEL, VOICES, decoded, seconds
from standstill import standstill, until_asked

pytest.importorskip("espeakng_loader", reason="set up with --no-espeak")
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("espeak")
    (folder / "models.yaml").write_text(
        VOICES_ONLY.replace("    demo: voices\n", "    demo: voices\n    espeak: true\n")
    )
    temporary = folder / "tmp"
    ended = subprocess.Popen(["true"])
    ended.wait()
    (temporary / f"hearth-{ended.pid}-worker-of-a-killed-server").mkdir(parents=True)
    environment = {"HEARTH_MODELS": str(folder / "models.yaml"), "TMPDIR": str(temporary)}
    with Server(folder, environment=environment) as running:
        yield running
        assert running.stop() == 0, running.log()
        assert list(temporary.glob("hearth-*")) == []


@pytest.fixture
def headers(speaker: Server) -> dict[str, str]:
    assert speaker.admin_key is not None
    return {"Authorization": f"Bearer {speaker.admin_key.text}"}


async def test_fifty_at_once_are_all_spoken(speaker: Server, headers: dict[str, str]):
    async with httpx2.AsyncClient(base_url=speaker.root_url, headers=headers, timeout=240) as http:
        listed = (await http.get(VOICES)).json()["voices"]
        assert {voice["id"]: (voice["gender"], voice["language"]) for voice in listed} == NINE
        assert {voice["quality"] for voice in listed} == {"formant"}

        async def spoken(number: int) -> tuple[float, float]:
            voice = list(NINE)[number % len(NINE)]
            text = " ".join([TEXTS[NINE[voice][1]]] * 5)
            body = HELLO_EMMA | {"voice": voice, "input": text, "response_format": "mp3"}
            pieces, first = [], 0.0
            async with http.stream("POST", SPEECH, json=body) as response:
                assert response.status_code == 200, await response.aread()
                async for piece in response.aiter_bytes():
                    first = first or time.monotonic()
                    pieces.append(piece)
            assert seconds(b"".join(pieces), "mp3") > 5
            return first, time.monotonic()

        with standstill(speaker, VOICE_MODEL):  # no text ends before the last is there
            speaking = [asyncio.create_task(spoken(number)) for number in range(50)]
            await until_asked(speaker, VOICE_MODEL, 50)
        begun, ended = zip(*await asyncio.gather(*speaking), strict=True)
        assert max(begun) < min(ended)  # all are heard before one has come whole


def test_a_killed_worker_is_back_at_once(speaker: Server, headers: dict[str, str]):
    def worker() -> psutil.Process | None:
        children = psutil.Process(speaker.pid).children(recursive=True)
        return next((one for one in children if "engine.backends.tts.service:open_service" in one.cmdline()), None)

    with httpx2.Client(base_url=speaker.root_url, headers=headers, timeout=240) as http:

        def is_back() -> bool:
            response = http.post(SPEECH, json=HELLO_EMMA | {"response_format": "wav"})
            assert response.status_code in {200, 503}, response.text
            return response.status_code == 200 and len(decoded(response.content, "wav")[1]) > 0

        assert is_back()
        killed = worker()
        assert killed is not None
        folder = Path(killed.environ()["TMPDIR"])
        assert len(list(folder.glob("hearth-espeak-*/phondata"))) == 1
        os.kill(killed.pid, signal.SIGKILL)
        poll_until(lambda: worker() not in {killed, None}, READY_SECONDS, describe=speaker.log)
        poll_until(is_back, READY_SECONDS, describe=speaker.log)
        assert not folder.exists()
        assert len(list(folder.parent.glob("hearth-*-worker-*"))) == 1
