"""Speech over HTTP from the real server: it is really spoken, by the voice that was asked for, in every format."""

from __future__ import annotations

import asyncio
import base64
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest
from chat_parts import assert_error
from key_clients import client_of
from leaving_parts import line_of
from serving import Key, RunningServer, Server
from speech_parts import (
    FORMATS,
    HELLO_EMMA,
    LONGEST,
    NINE,
    PITCHES_HZ,
    SPEECH,
    TEXTS,
    VOICE_MODEL,
    decoded,
    pitch_hz,
    seconds,
    speech_events,
    spoken,
)

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

CONTENT_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/opus",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm;rate=24000;channels=1",
}
TOKENS = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}


@pytest.mark.parametrize("voice", NINE)
async def test_every_voice_speaks_in_every_format_and_at_its_own_pitch(http: httpx2.AsyncClient, voice: str):
    text = TEXTS[NINE[voice][1]]
    lengths = {}
    for kind in FORMATS:
        rate, samples = decoded(await spoken(http, voice=voice, input=text, response_format=kind), kind)
        lengths[kind] = len(samples) / rate
        assert 0.1 < abs(samples).max() <= 1.01, f"{kind} is silent, or too loud"
        assert pitch_hz(rate, samples) == pytest.approx(PITCHES_HZ[voice], rel=0.1), kind
    assert 0.3 < lengths["wav"] < 10
    assert lengths["flac"] == lengths["wav"] == pytest.approx(lengths["pcm"], abs=0.01)
    assert lengths["opus"] == pytest.approx(lengths["wav"], abs=0.05)
    for kind in ("mp3", "aac"):  # these add silence at both ends
        assert lengths[kind] == pytest.approx(lengths["wav"], abs=0.25)


async def test_women_are_higher_than_the_men_of_their_language(http: httpx2.AsyncClient):
    heard = {}
    for voice, (_, language) in NINE.items():
        data = await spoken(http, voice=voice, input=TEXTS[language], response_format="wav")
        heard[voice] = pitch_hz(*decoded(data, "wav"))
    for language in ("am", "so", "en"):
        women = [heard[voice] for voice, said in NINE.items() if said == ("female", language)]
        men = [heard[voice] for voice, said in NINE.items() if said == ("male", language)]
        assert min(women) > 1.2 * max(men)


@pytest.mark.parametrize("kind", FORMATS)
async def test_the_headers_say_what_it_is(http: httpx2.AsyncClient, kind: str):
    response = await http.post(SPEECH, json=HELLO_EMMA | {"response_format": kind})
    assert response.headers["content-type"] == CONTENT_TYPES[kind]
    assert response.headers["x-request-id"]
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers


async def test_what_is_left_out_or_null_has_its_default(http: httpx2.AsyncClient):
    nothing = dict.fromkeys(["response_format", "speed", "stream_format", "seed", "instructions"])
    response = await http.post(SPEECH, json=HELLO_EMMA | nothing)
    assert response.headers["content-type"] == "audio/mpeg"
    assert seconds(response.content, "mp3") > 0.3


async def test_the_same_seed_gives_the_same_sound_and_none_another(http: httpx2.AsyncClient):
    first, again, other = [await spoken(http, seed=seed, response_format="wav") for seed in (7, 7, 8)]
    assert first == again
    assert first != other
    assert len({await spoken(http, seed=None, response_format="wav") for _ in range(2)}) == 2
    assert await spoken(http, seed=2**63 - 1)


async def test_speed_is_kept(http: httpx2.AsyncClient):
    text = TEXTS["en"] * 3
    lengths = {
        speed: seconds(await spoken(http, input=text, speed=speed, response_format="wav"), "wav")
        for speed in (0.25, 0.5, 1, 2.0, 4)
    }
    for speed, length in lengths.items():
        assert length == pytest.approx(lengths[1] / speed, rel=0.25), speed


async def test_the_usual_names_and_an_object_are_voices_too(http: httpx2.AsyncClient):
    first, newer = ("alloy", "echo", "fable", "onyx", "nova", "shimmer"), ("ash", "ballad", "coral", "sage", "verse")
    for name in (*first, *newer, "marin", "cedar"):
        assert seconds(await spoken(http, voice=name), "mp3") > 0.3
    assert await spoken(http, voice={"id": "emma"}) == await spoken(http, voice="emma")


async def test_texts_of_all_kinds_are_spoken(http: httpx2.AsyncClient):
    for text in ("2026", "A", "Hello \N{SPARKLES} there.", 'Mr. O\'Neil\nsaid:\t"no"!', "x" * 500, "one. " * 100):
        assert seconds(await spoken(http, input=text), "mp3") > 0.1, text
    assert seconds(await spoken(http, voice="selam", input="2026 ዓ.ም. ነው።"), "mp3") > 0.1


@pytest.mark.parametrize("kind", ["mp3", "wav"])
async def test_the_longest_text_begins_long_before_it_ends(http: httpx2.AsyncClient, kind: str):
    shares: list[float] = []  # of the time that all of it takes, before the first piece
    body = HELLO_EMMA | {"input": LONGEST, "response_format": kind}
    for _ in range(3):  # the best counts: others use the cores too
        began, data, came_at = time.monotonic(), b"", list[float]()
        async with http.stream("POST", SPEECH, json=body) as response:
            assert response.status_code == 200
            async for piece in response.aiter_raw():
                came_at.append(time.monotonic())
                data += piece
        shares.append((came_at[0] - began) / (came_at[-1] - began))
    assert min(shares) < 0.25, shares
    rate, samples = decoded(data, kind)
    assert len(samples) / rate > 60
    assert pitch_hz(rate, samples) == pytest.approx(PITCHES_HZ["emma"], rel=0.1)


# Events


async def test_events_carry_the_same_file_and_say_at_the_end_how_much_it_was(http: httpx2.AsyncClient):
    fields = {"input": "Good morning. " * 30, "response_format": "wav"}
    response = await http.post(SPEECH, json=HELLO_EMMA | fields | {"stream_format": "sse"})
    assert response.headers["content-type"].startswith("text/event-stream")
    *deltas, done = speech_events(response.content)
    assert len(deltas) > 1
    assert all(list(delta) == ["type", "audio"] and delta["type"] == "speech.audio.delta" for delta in deltas)
    data = b"".join(base64.b64decode(delta["audio"], validate=True) for delta in deltas)
    assert data == await spoken(http, **fields)
    assert list(done) == ["type", "usage"]
    assert done["type"] == "speech.audio.done"
    assert done["usage"].pop("seconds") == pytest.approx(seconds(data, "wav"), abs=0.01)
    assert done["usage"] == {"characters": 420, **TOKENS}


# Real clients


async def test_the_openai_package_speaks(client: openai.AsyncOpenAI, tmp_path: Path):
    answer = await client.audio.speech.create(model=VOICE_MODEL, voice="alloy", input="Good morning.")
    assert seconds(answer.content, "mp3") > 0.3
    assert answer.response.headers["x-request-id"]
    file = tmp_path / "hello.wav"
    async with client.audio.speech.with_streaming_response.create(
        model=VOICE_MODEL,
        voice={"id": "selam"},
        input=TEXTS["am"],
        response_format="wav",
        speed=1.5,
        instructions="Cheerful.",
    ) as streamed:
        await streamed.stream_to_file(file)
    assert seconds(file.read_bytes(), "wav") > 0.3


async def test_the_openai_package_reads_the_events(client: openai.AsyncOpenAI):
    stream = await client.post(
        "/audio/speech",
        body=HELLO_EMMA | {"stream_format": "sse"},
        cast_to=openai.BaseModel,
        stream=True,
        stream_cls=openai.AsyncStream[openai.BaseModel],
    )
    events = [event.to_dict() async for event in stream]
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"}
    assert events[-1]["type"] == "speech.audio.done"


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_the_openai_package_is_told_which_field_is_wrong(client: openai.AsyncOpenAI, stream_format: Any):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.audio.speech.create(model=VOICE_MODEL, voice="nobody", input="Hello.", stream_format=stream_format)
    assert (caught.value.param, caught.value.code) == ("voice", "invalid_value")


async def test_what_open_webui_sends_is_answered(server: Server, admin_key: Key):
    """As its version 0.12.4 does it: no key for the lists, and the Content-Type decides what it does with the rest."""
    payload = {"input": "Good morning.", "voice": "alloy", "model": VOICE_MODEL}
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {admin_key.text}",
        "X-OpenWebUI-User-Name": "Zo%C3%AB",
        "X-OpenWebUI-User-Id": "1",
    }
    async with aiohttp.ClientSession() as session:
        for path in ("voices", "models"):
            async with session.get(f"{server.base_url}/audio/{path}") as response:
                assert response.status == 401  # then it falls back to alloy and the like
        async with session.post(url=f"{server.base_url}/audio/speech", json=payload, headers=headers) as response:
            response.raise_for_status()
            assert response.headers["Content-Type"] == "audio/mpeg"
            assert seconds(await response.read(), "mp3") > 0.3
        async with session.post(
            url=f"{server.base_url}/audio/speech", json=payload | {"voice": ""}, headers=headers
        ) as response:
            assert response.status == 400
            assert "voice" in (await response.json())["error"]["message"]


# What it costs


async def test_only_seconds_that_were_spoken_are_counted(server: Server, http: httpx2.AsyncClient):
    made = await http.post("/v1/admin/keys", json={"name": "speaker", "tier": "standard", "scopes": ["audio"]})
    key = Key(made.json()["key"])
    server.made_keys.append(key)
    headers = {"Authorization": f"Bearer {key.text}"}

    async def usage() -> dict[str, Any]:
        (row,) = (await http.get("/v1/usage", params={"by": "kind,model"}, headers=headers)).json()["data"]
        return row

    body = HELLO_EMMA | {"response_format": "wav"}
    response = await http.post(SPEECH, json=body, headers=headers)
    heard = seconds(response.content, "wav")
    row = await usage()
    assert (row["kind"], row["model"], row["requests"], row["errors"]) == ("audio", VOICE_MODEL, 1, 0)
    assert row["audio_seconds"] == pytest.approx(heard, abs=0.01)
    assert (row["prompt_tokens"], row["images"]) == (0, 0)
    line = await line_of(server, response.headers["x-request-id"])
    assert line["audio_seconds"] == pytest.approx(heard, abs=0.01)
    assert (line["model"], line["route"], line["stream"]) == (VOICE_MODEL, SPEECH, False)
    assert "morning" not in str(line)
    assert_error(await http.post(SPEECH, json=body | {"input": "?"}, headers=headers), 400, "invalid_value", "input")
    row = await usage()
    assert (row["requests"], row["errors"], row["audio_seconds"]) == (2, 1, pytest.approx(heard, abs=0.01))


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_a_client_that_leaves_is_not_spoken_for(server: Server, http: httpx2.AsyncClient, stream_format: str):
    name = f"left-speech-{stream_format}"
    body = HELLO_EMMA | {"input": LONGEST, "speed": 0.25, "stream_format": stream_format}
    async with http.stream("POST", SPEECH, json=body, headers={"X-Request-Id": name}) as response:
        assert response.status_code == 200
        await anext(response.aiter_raw())
    line = await line_of(server, name)
    assert line["status"] == 499
    assert line["audio_seconds"] < 600  # all of it would be some 20 minutes
    assert seconds(await spoken(http), "mp3") > 0.3


async def test_a_key_has_only_so_many_requests_at_the_same_time(server: Server, http: httpx2.AsyncClient):
    limits = {"parallel_requests": 1, "requests_per_minute": 30}
    made = await http.post("/v1/admin/keys", json={"name": "one", "tier": "standard", "limits": limits})
    server.made_keys.append(Key(made.json()["key"]))
    headers = {"Authorization": f"Bearer {made.json()['key']}"}
    long = HELLO_EMMA | {"input": LONGEST, "speed": 0.25}
    async with http.stream("POST", SPEECH, json=long, headers=headers) as response:
        assert response.headers["x-ratelimit-limit-requests"] == "30"
        second, deadline = await http.post(SPEECH, json=HELLO_EMMA, headers=headers), time.monotonic() + 10
        # A cluster's other replica counts it within a second.
        while second.status_code == 200 and isinstance(server, RunningServer) and time.monotonic() < deadline:
            second = await http.post(SPEECH, json=HELLO_EMMA, headers=headers)
        assert_error(second, 429, "rate_limit_exceeded")


async def test_two_words_do_not_wait_for_another_keys_long_texts(http: httpx2.AsyncClient, server: Server):
    long = [HELLO_EMMA | {"input": f"{number}. {'Good morning to all of you. ' * 140}"} for number in range(12)]
    async with client_of(server, http, "standard") as other:
        reading = [asyncio.create_task(http.post(SPEECH, json=body)) for body in long]
        deadline = time.monotonic() + 60
        while f'hearth_queue_running{{model="{VOICE_MODEL}"}} 0.0' in (await http.get("/metrics")).text:
            assert time.monotonic() < deadline
        await spoken(other, input="Hello there.")
        assert sum(task.done() for task in reading) < len(reading) / 2
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
