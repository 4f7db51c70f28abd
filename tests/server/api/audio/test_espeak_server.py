"""The voices that come with Hearth from a real server: nine that say words, fifty at once, and back after a kill."""

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx2
import psutil
import pytest
from serving import Server, poll_until
from small_models import VOICES_ONLY
from speech_parts import HELLO_EMMA, NINE, SPEECH, TEXTS, VOICES, decoded, seconds

pytest.importorskip("espeakng_loader", reason="set up with --no-espeak")
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("espeak")
    (folder / "models.yaml").write_text(
        VOICES_ONLY.replace("    demo: voices\n", "    demo: voices\n    espeak: true\n")
    )
    with Server(folder, environment={"HEARTH_MODELS": str(folder / "models.yaml")}) as running:
        yield running
        assert running.stop() == 0, running.log()


@pytest.fixture
def headers(speaker: Server) -> dict[str, str]:
    assert speaker.admin_key is not None
    return {"Authorization": f"Bearer {speaker.admin_key.text}"}


async def test_fifty_at_once_are_all_spoken(speaker: Server, headers: dict[str, str]):
    async with httpx2.AsyncClient(base_url=speaker.root_url, headers=headers, timeout=120) as http:
        listed = (await http.get(VOICES)).json()["voices"]
        assert {voice["id"]: (voice["gender"], voice["language"]) for voice in listed} == NINE
        assert {voice["quality"] for voice in listed} == {"formant"}

        async def spoken(number: int) -> float:
            voice = list(NINE)[number % len(NINE)]
            text = " ".join([TEXTS[NINE[voice][1]]] * 2)
            body = HELLO_EMMA | {"voice": voice, "input": text, "response_format": "wav"}
            response = await http.post(SPEECH, json=body)
            assert response.status_code == 200, response.text
            return seconds(response.content, "wav")

        assert all(length > 1 for length in await asyncio.gather(*map(spoken, range(50))))


def test_a_killed_worker_is_back_at_once(speaker: Server, headers: dict[str, str]):
    def worker() -> psutil.Process | None:
        children = psutil.Process(speaker.pid).children(recursive=True)
        return next((one for one in children if "engine.backends.tts.service:open_service" in one.cmdline()), None)

    with httpx2.Client(base_url=speaker.root_url, headers=headers, timeout=120) as http:

        def is_back() -> bool:
            response = http.post(SPEECH, json=HELLO_EMMA | {"response_format": "wav"})
            assert response.status_code in {200, 503}, response.text
            return response.status_code == 200 and len(decoded(response.content, "wav")[1]) > 0

        assert is_back()
        killed = worker()
        assert killed is not None
        os.kill(killed.pid, signal.SIGKILL)
        poll_until(lambda: worker() not in {killed, None}, 60, describe=speaker.log)
        poll_until(is_back, 60, describe=speaker.log)
