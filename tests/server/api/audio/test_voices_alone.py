"""A server that only speaks: lists without a key, models that are put there while it runs, a worker that dies, nobody who listens."""

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import psutil
import pytest
from chat_parts import assert_error
from leaving_parts import line_of
from lost_network import lost_network, missing_reason, open_socket_to_lose
from serving import Server, async_poll_until, open_socket, poll_until, raw_request
from small_models import VOICES_ONLY
from speech_parts import (
    HELLO_EMMA,
    LONGEST,
    NINE,
    SPEECH,
    SPEECH_MODELS,
    TONES_HZ,
    VOICE_MODEL,
    VOICES,
    decoded,
    pitch_hz,
    seconds,
    speech_events,
    spoken,
)
from stalling_proxy import StallingProxy

from engine.demo import weights_dir
from server.observability.status import ask

pytestmark = pytest.mark.engine

YAML = f"{VOICES_ONLY}  nothing: {{models: [nothing]}}\n"


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("speaker")
    (folder / "models.yaml").write_text(YAML)
    environment = {
        "HEARTH_OPEN_VOICE_LIST": "true",
        "HEARTH_WRITE_STALL_SECONDS": "3",  # a busy test reads again before
        "HEARTH_MODELS": str(folder / "models.yaml"),
    }
    with Server(folder, environment=environment) as running:
        yield running
        assert running.stop() == 0, running.log()


@pytest.fixture(scope="module")
async def admin(speaker: Server) -> AsyncIterator[httpx2.AsyncClient]:
    assert speaker.admin_key is not None
    headers = {"Authorization": f"Bearer {speaker.admin_key.text}"}
    async with httpx2.AsyncClient(base_url=speaker.root_url, headers=headers, timeout=240) as client:
        yield client


async def test_both_lists_are_open_as_open_webui_asks_for_them_and_nothing_else_is(speaker: Server):
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{speaker.base_url}/audio/voices") as response:
            response.raise_for_status()
            shown = {voice["id"]: voice["name"] for voice in (await response.json()).get("voices", [])}
        async with session.get(f"{speaker.base_url}/audio/models") as response:
            response.raise_for_status()
            models = (await response.json()).get("models", [])
    assert shown == {voice: voice.capitalize() for voice in NINE}
    assert models == [{"id": VOICE_MODEL}]
    async with httpx2.AsyncClient(base_url=speaker.root_url, timeout=60) as nobody:
        assert (await nobody.get(VOICES, params={"language": "ti"})).json()["voices"][0]["id"] == "berhane"
        other_scheme = {"Authorization": "Basic cHJveHk6cHJveHk="}
        assert (await nobody.get(VOICES, headers=other_scheme)).status_code == 200
        assert_error(await nobody.get(VOICES, params={"lang": "ti"}), 400, "invalid_value", "lang")
        assert_error(await nobody.post(SPEECH, json=HELLO_EMMA), 401, "invalid_api_key")
        for path in ("/v1/models", f"{VOICES}/", f"{VOICES}/emma", "/v1/audio", "/v1/usage"):
            assert_error(await nobody.get(path), 401, "invalid_api_key")
        assert_error(await nobody.post(VOICES), 401, "invalid_api_key")


async def test_a_key_that_is_sent_to_an_open_list_is_held_to_what_it_may_do(speaker: Server):
    nothing = speaker.make_key("nothing", tier="nothing")
    no_audio = speaker.make_key("no audio", tier="standard", scopes=["models"])
    async with httpx2.AsyncClient(base_url=speaker.root_url, timeout=60) as client:
        for path in (VOICES, SPEECH_MODELS):
            wrong = await client.get(path, headers={"Authorization": "Bearer hk_wrong"})
            assert_error(wrong, 401, "invalid_api_key")
            lacks = await client.get(path, headers={"x-api-key": no_audio.text})
            assert_error(lacks, 403, "insufficient_permissions")
        listed = await client.get(VOICES, headers={"x-api-key": nothing.text})
        assert listed.json() == {"object": "list", "voices": []}


async def test_speech_that_nobody_reads_frees_its_place_for_the_next(speaker: Server):
    assert speaker.admin_key is not None
    body = {"model": VOICE_MODEL, "voice": "emma", "input": LONGEST, "response_format": "wav"}
    headers = {
        "Authorization": f"Bearer {speaker.admin_key.text}",
        "Content-Type": "application/json",
        "X-Request-Id": "unread",
    }
    with open_socket(speaker) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.sendall(raw_request("POST", SPEECH, headers, json.dumps(body).encode()))
        assert opened.recv(16).startswith(b"HTTP/1.1 200 ")
        await async_poll_until(lambda: any(line["request_id"] == "unread" for line in speaker.access_lines()), 60)
    assert (await line_of(speaker, "unread"))["status"] == 499


async def test_speech_for_a_client_that_vanished_without_a_word_frees_its_place(
    speaker: Server, admin: httpx2.AsyncClient
):
    body = {"model": VOICE_MODEL, "voice": "emma", "input": LONGEST, "response_format": "wav"}
    headers = {
        "Authorization": admin.headers["Authorization"],
        "Content-Type": "application/json",
        "X-Request-Id": "vanished",
    }
    with StallingProxy(speaker) as proxy:
        with socket.create_connection(proxy.address, timeout=60) as client:
            client.sendall(raw_request("POST", SPEECH, headers, json.dumps(body).encode()))
            assert client.recv(16).startswith(b"HTTP/1.1 200 ")
            proxy.fall_silent()
        # The client is gone, and its line to the server still open.
        await async_poll_until(lambda: any(line["request_id"] == "vanished" for line in speaker.access_lines()), 60)
        assert (await line_of(speaker, "vanished"))["status"] == 499
        assert (await admin.get("/v1/admin/status")).json()["requests_running"] == 1, "this one"
        assert await spoken(admin)


async def until_running(server: Server, requests: int) -> None:
    def so_many() -> bool:
        status = ask(server.data_dir, 60)
        return status is not None and status.requests_running >= requests

    await asyncio.to_thread(poll_until, so_many, 60)


@pytest.mark.parametrize("doing", ["sends", "waits", "reads"])
async def test_a_client_whose_network_is_gone_is_found_whatever_it_was_doing(
    speaker: Server, admin: httpx2.AsyncClient, doing: str
):
    if (reason := missing_reason()) is not None:
        pytest.skip(reason)
    name = f"lost-{doing}"
    body = {"model": VOICE_MODEL, "voice": "emma", "input": LONGEST}
    names = {"Authorization": admin.headers["Authorization"], "Content-Type": "application/json"}
    whole = json.dumps(body | {"response_format": "wav"}).encode()
    request = raw_request("POST", SPEECH, names | {"X-Request-Id": name}, whole)
    others = 24 if doing == "waits" else 0  # all places are taken, for longer than it takes to find it
    with ExitStack() as opened:
        for _ in range(others):
            task = asyncio.create_task(admin.post(SPEECH, json=body | {"response_format": "mp3"}))
            opened.callback(task.cancel)
        await until_running(speaker, others)
        client = opened.enter_context(open_socket_to_lose(speaker))
        client.sendall(request[:-1] if doing == "sends" else request)
        if doing == "reads":
            assert client.recv(16).startswith(b"HTTP/1.1 200 ")
        await until_running(speaker, others + 1)
        opened.enter_context(lost_network())
        await async_poll_until(lambda: any(line["request_id"] == name for line in speaker.access_lines()), 60)
    assert (await line_of(speaker, name))["status"] == 499


def put_models(root: Path) -> None:
    """One model of each family: the first speaks, the others are as their families lay them out."""
    vits = root / "office"
    shutil.copytree(weights_dir("voices") / "demo-en", vits)
    voices = [
        {"speaker": 0, "id": "olga", "name": "Olga", "gender": "female"},
        {"speaker": 1, "id": "emma", "name": "Emma II", "gender": "male", "description": "Not who you think."},
    ]
    (vits / "voices.yaml").write_text(json.dumps({"licence": "ours", "voices": voices}))  # JSON is YAML
    piper = root / "piper-so"
    piper.mkdir()
    config = {"audio": {"sample_rate": 22050}, "language": {"code": "so_SO"}, "num_speakers": 1}
    (piper / "so_SO-asad-medium.onnx.json").write_text(json.dumps(config))
    (piper / "so_SO-asad-medium.onnx").write_bytes(b"\x08\x08\x12\x07pytorch")
    (piper / "voices.yaml").write_text(json.dumps({"voices": [{"id": "asad", "gender": "male"}]}))
    kokoro = root / "kokoro"
    (kokoro / "voices").mkdir(parents=True)
    (kokoro / "config.json").write_text(json.dumps({"istftnet": {}, "plbert": {}, "vocab": {}}))
    empty = (2).to_bytes(8, "little") + b"{}"
    for name in ("kokoro-v1_0.safetensors", "voices/af_heart.safetensors", "voices/zz_top.safetensors"):
        (kokoro / name).write_bytes(empty)


async def test_models_that_are_put_there_are_offered_after_a_reload(speaker: Server, admin: httpx2.AsyncClient):
    put_models(speaker.weights_dir / "voices")
    assert (await admin.get(f"/v1/models/{VOICE_MODEL}")).json()["demo"] is True
    assert {voice["id"] for voice in (await admin.get(VOICES)).json()["voices"]} == set(NINE)
    told = speaker.hearth("reload")
    [added] = [line for line in told.splitlines() if line.startswith("  voices added: ")]
    assert set(added.removeprefix("  voices added: ").split(", ")) == {"olga", "asad", "kokoro-af-heart"}
    assert "  voices changed: emma\n" in told
    assert (await admin.get(f"/v1/models/{VOICE_MODEL}")).json()["demo"] is False
    voices = {voice["id"]: voice for voice in (await admin.get(VOICES)).json()["voices"]}
    assert set(voices) == {*NINE, "olga", "asad", "kokoro-af-heart"}
    assert (voices["olga"]["model"], voices["olga"]["licence"], voices["olga"]["demo"]) == ("office", "ours", False)
    assert (voices["emma"]["model"], voices["emma"]["gender"]) == ("office", "male")
    assert (voices["asad"]["language"], voices["asad"]["type"], voices["asad"]["model"]) == (
        "so",
        "ethiopian",
        "piper-so",
    )
    heart = voices["kokoro-af-heart"]
    assert (heart["name"], heart["gender"], heart["language"], heart["model"]) == ("Heart", "female", "en", "kokoro")
    assert heart["available"] is True
    data = await spoken(admin, voice="olga", response_format="wav")
    assert pitch_hz(*decoded(data, "wav")) == pytest.approx(TONES_HZ["emma"], rel=0.06)
    told = json.loads(speaker.hearth("voices", "--weights-dir", str(speaker.weights_dir), "--json"))
    assert {voice["id"] for voice in told["voices"]} == set(voices)
    assert any(warning["voice"] == "zz_top" and "gender" in warning["message"] for warning in told["warnings"])


async def test_models_that_are_taken_away_are_gone_after_a_reload(speaker: Server, admin: httpx2.AsyncClient):
    shutil.rmtree(speaker.weights_dir / "voices", ignore_errors=True)
    changed = (await admin.post("/v1/admin/reload")).json()["voices"]
    assert changed["added"] == []
    assert (set(changed["removed"]), changed["changed"]) == ({"olga", "asad", "kokoro-af-heart"}, ["emma"])
    assert {voice["id"] for voice in (await admin.get(VOICES)).json()["voices"]} == set(NINE)
    assert_error(await admin.post(SPEECH, json=HELLO_EMMA | {"voice": "olga"}), 400, "invalid_value", "voice")


def worker_of(server: Server) -> psutil.Process:
    (worker,) = [
        process
        for process in psutil.Process(server.pid).children(recursive=True)
        if "engine.backends.tts.service:open_service" in process.cmdline()
    ]
    return worker


async def until_ready(admin: httpx2.AsyncClient, speaker: Server) -> None:
    """Until it speaks again: it may still be called ready when its worker has just died."""
    async with asyncio.timeout(240):
        while (response := await admin.post(SPEECH, json=HELLO_EMMA)).status_code == 503:
            await async_poll_until(speaker.is_ready, 240, describe=speaker.log)
    assert seconds(response.content, "mp3") > 0.3


async def read_while_the_worker_dies(
    speaker: Server, admin: httpx2.AsyncClient, pieces: list[bytes], **fields: Any
) -> None:
    """Fill `pieces`; after the first the worker is killed."""
    body = HELLO_EMMA | {"input": LONGEST, "speed": 0.25} | fields
    name = {"X-Request-Id": f"cut-{fields.get('stream_format', 'audio')}"}
    async with admin.stream("POST", SPEECH, json=body, headers=name) as response:
        assert response.status_code == 200
        async for piece in response.aiter_raw():
            if not pieces:
                worker_of(speaker).kill()
            pieces.append(piece)


async def test_a_file_whose_worker_dies_breaks_off_so_that_the_client_knows(speaker: Server, admin: httpx2.AsyncClient):
    pieces: list[bytes] = []
    with pytest.raises(httpx2.RemoteProtocolError):
        await read_while_the_worker_dies(speaker, admin, pieces)
    assert pieces
    line = await line_of(speaker, "cut-audio")
    assert (line["status"], line["error_code"]) == (200, "engine_unavailable")
    assert line["audio_seconds"] > 0
    assert "An answer was cut off (cut-audio)" in speaker.log()
    assert "ASGI" not in speaker.log()
    await until_ready(admin, speaker)


async def test_a_stream_of_events_whose_worker_dies_ends_with_an_error(speaker: Server, admin: httpx2.AsyncClient):
    pieces: list[bytes] = []
    await read_while_the_worker_dies(speaker, admin, pieces, stream_format="sse")
    first, *_, last = speech_events(b"".join(pieces))
    assert first["type"] == "speech.audio.delta"
    assert (last["type"], last["error"]["code"]) == ("error", "engine_unavailable")
    await until_ready(admin, speaker)


def test_the_command_line_speaks_without_a_server(speaker: Server, tmp_path: Path):
    file = tmp_path / "hello.wav"
    options = ("--weights-dir", str(speaker.weights_dir), "-o", str(file), "--speed", "2", "--seed", "1")
    speaker.hearth("voices", "say", "james", "Good morning.", *options)
    rate, samples = decoded(file.read_bytes(), "wav")
    assert len(samples) / rate > 0.2
    assert pitch_hz(rate, samples) == pytest.approx(TONES_HZ["james"], rel=0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["hello.wav"]
