"""`POST /v1/audio/transcriptions` and `translations` on the demo: what the voices say comes back, in every form."""

import asyncio
import random
import re
import time
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from demo_models.transcription.sentences import fixed_sentences
from leaving_parts import WITHIN_SECONDS, gone_line, line_of
from serving import Key, Server, async_poll_until, open_socket
from sound_parts import (
    MODEL,
    RATE,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    heard,
    needs_espeak,
    one_after_another,
    spoken,
    wav,
)

pytestmark = pytest.mark.engine

NOISE = wav(np.random.default_rng(5).normal(0, 0.05, 4 * RATE))


async def in_a_loop(http: httpx2.AsyncClient, text: str, number: int) -> str:
    """Have a text spoken and heard."""
    kind = ("wav", "mp3", "flac", "opus")[number % 4]
    sound = await spoken(http, text, ("emma", "james")[number % 2], kind)
    return str((await heard(http, sound, response_format="json"))["text"])


@needs_espeak
@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.rounds)])
async def test_what_the_voices_say_is_heard_word_for_word(http: httpx2.AsyncClient, count: int):
    texts = fixed_sentences()[-count:]
    found = await asyncio.gather(*(in_a_loop(http, text, number) for number, text in enumerate(texts)))
    assert [*found] == [*texts]


@needs_espeak
async def test_the_openai_package_gets_all_five_formats_and_a_stream(
    http: httpx2.AsyncClient, client: openai.AsyncOpenAI
):
    first, second = fixed_sentences()[1:3]
    sound = wav(one_after_another([await spoken(http, text) for text in (first, second)], 3))

    async def ask(**fields: Any) -> Any:
        return await client.audio.transcriptions.create(model=MODEL, file=("meeting.wav", sound), **fields)

    assert (await ask()).text == f"{first} {second}"
    assert (await ask()).usage.seconds == pytest.approx(len(sound) / 2 / RATE, abs=0.1)
    assert await ask(response_format="text") == f"{first} {second}\n"
    verbose = await ask(response_format="verbose_json", timestamp_granularities=["segment"], language="en-GB")
    assert (verbose.language, verbose.text) == ("en", f"{first} {second}")
    assert [segment.text.strip() for segment in verbose.segments] == [first, second]
    assert verbose.segments[0].avg_logprob > -0.5
    times = [time for segment in verbose.segments for time in (segment.start, segment.end)]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= verbose.duration == pytest.approx(len(sound) / 2 / RATE, abs=0.1)
    assert times[2] - times[1] > 2
    srt = await ask(response_format="srt")
    assert re.fullmatch(rf"1\n00:00:0\d,\d{{3}} --> 00:00:0\d,\d{{3}}\n{first}\n\n2\n.*\n{second}\n", srt)
    vtt = await ask(response_format="vtt")
    assert re.fullmatch(rf"WEBVTT\n\n00:00:0\d\.\d{{3}} --> 00:00:0\d\.\d{{3}}\n{first}\n\n.*\n{second}\n", vtt)
    events = [event async for event in await ask(stream=True)]
    assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == f"{first} {second}"
    assert events[-1].usage.output_tokens >= len(f"{first} {second}".split())
    with pytest.warns(DeprecationWarning, match="deprecated"):  # the package calls all translations so
        translated = await client.audio.translations.create(
            model=MODEL, file=("meeting.wav", sound), prompt="blue lamp"
        )
    assert translated.text == f"{first} {second}"


@needs_espeak
async def test_a_prompt_changes_nothing_of_what_is_clear(http: httpx2.AsyncClient):
    text = fixed_sentences()[4]
    sound = await spoken(http, text)
    for prompt in ("the green boat near a table", "Zażółć 🦊 <|endoftext|>" * 40):
        assert (await heard(http, sound, prompt=prompt))["text"] == text


async def test_silence_has_no_text(http: httpx2.AsyncClient):
    for fields in ({}, {"response_format": "verbose_json", "language": "en"}):
        answer = await heard(http, wav(np.zeros(RATE * 20)), **{"response_format": "json", **fields})
        assert answer["text"] == ""
        assert answer["usage"] == {"type": "duration", "seconds": 20.0}
    assert answer["segments"] == []


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"language": "klingon"}, 400, "invalid_value", "language"),
        ({"language": "ti"}, 400, "invalid_value", "language"),
        ({"response_format": "diarized_json"}, 400, "invalid_value", "response_format"),
        ({"temperature": "1.5"}, 400, "invalid_value", "temperature"),
        ({"timestamp_granularities[]": ["word", "segment"]}, 400, "invalid_value", "timestamp_granularities"),
        ({"timestamp_granularities[]": "letter"}, 400, "invalid_value", "timestamp_granularities"),
        ({"stream": "true", "response_format": "srt"}, 400, "invalid_value", "stream"),
        ({"prompt": "x" * 5000}, 400, "invalid_value", "prompt"),
        ({"model": "nothing"}, 404, "model_not_found", "model"),
        ({"model": "service-plus"}, 400, "unsupported_capability", "model"),
    ],
)
async def test_what_cannot_be_is_refused(
    http: httpx2.AsyncClient, fields: dict[str, Any], status: int, code: str, param: str | None
):
    form = {"model": MODEL, **fields}
    answer = await http.post(TRANSCRIPTIONS, data=form, files={"file": ("sound.wav", NOISE)})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)


async def test_a_form_needs_a_file_that_is_sound_and_a_model(http: httpx2.AsyncClient):
    no_sound = await http.post(TRANSLATIONS, data={"model": MODEL}, files={"file": ("a.mp3", b"no sound" * 999)})
    no_file = await http.post(TRANSCRIPTIONS, data={"model": MODEL}, files={"sound": ("a.wav", NOISE)})
    no_model = await http.post(TRANSCRIPTIONS, data={"language": "en"}, files={"file": ("a.wav", NOISE)})
    no_form = await http.post(TRANSCRIPTIONS, json={"model": MODEL})
    found = [
        (each.status_code, each.json()["error"]["code"], each.json()["error"]["param"])
        for each in (no_sound, no_file, no_model, no_form)
    ]
    assert found == [
        (400, "invalid_value", "file"),
        (400, "missing_field", "file"),
        (400, "missing_field", "model"),
        (415, "unsupported_media_type", None),
    ]


async def test_a_key_needs_the_scope_and_pays_in_seconds(server: Server, http: httpx2.AsyncClient):
    other, key = server.make_key(scopes=["chat"]), server.make_key(tier="standard")
    async with httpx2.AsyncClient(base_url=server.root_url, timeout=60) as plain:

        async def ask(asker: Key, request_id: str) -> int:
            headers = {"Authorization": f"Bearer {asker.text}", "X-Request-Id": request_id}
            files = {"file": ("a.wav", NOISE)}
            answer = await plain.post(TRANSCRIPTIONS, data={"model": MODEL}, files=files, headers=headers)
            return answer.status_code

        assert await ask(other, "hears-not") == 403
        assert await ask(key, "hears") == 200
        line = await line_of(server, "hears")
        assert (line["model"], line["audio_seconds"]) == (MODEL, 4.0)

        used = await plain.get("/v1/usage?by=model", headers={"Authorization": f"Bearer {key.text}"})
        assert [(row["model"], row["audio_seconds"]) for row in used.json()["data"]] == [(MODEL, 4.0)]


async def test_a_client_that_leaves_frees_everything_within_a_second(
    server: Server, admin_key: Key, http: httpx2.AsyncClient
):
    uploads = server.data_dir / "recordings" / "uploads"
    sound = wav(np.random.default_rng(7).normal(0, 0.05, 300 * RATE))
    head = (
        f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {admin_key.text}\r\n"
        "X-Request-Id: left-hearing\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    )
    form = (
        (
            f'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n{MODEL}\r\n'
            '--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        ).encode()
        + sound
        + b"\r\n--b--\r\n"
    )
    opened = open_socket(server)
    await asyncio.to_thread(opened.sendall, f"{head}Content-Length: {len(form)}\r\n\r\n".encode() + form)

    async def running() -> int:
        models = (await http.get("/v1/models")).json()["data"]
        return next(int(model["running"]) for model in models if model["id"] == MODEL)

    deadline = time.monotonic() + 60
    while not await running():
        assert time.monotonic() < deadline
    left_at = time.time()
    opened.close()
    while True:
        asked_at = time.time()  # a slow answer does not count
        if not await running():
            break
        assert asked_at - left_at < WITHIN_SECONDS
    await gone_line(server, "left-hearing", left_at)
    await async_poll_until(lambda: not list(uploads.iterdir()), 60)


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.rounds)])
async def test_a_changed_file_is_never_the_servers_fault(http: httpx2.AsyncClient, count: int):
    chance = random.Random(count)  # noqa: S311
    originals = [wav(np.sin(np.arange(RATE * 2) / 7) * 0.2), NOISE[: RATE * 2]]
    originals += [await spoken(http, "seven", kind=kind) for kind in ("mp3", "flac", "opus")]
    statuses = []
    for number in range(count):
        content = bytearray(originals[number % len(originals)])
        for _ in range(chance.choice((1, 20, 400))):
            content[chance.randrange(len(content) if chance.random() < 0.5 else 100)] = chance.randrange(256)
        files = {"file": ("sound", bytes(content))}
        answer = await http.post(TRANSCRIPTIONS, data={"model": MODEL}, files=files, timeout=120)
        statuses.append(answer.status_code)
    assert set(statuses) <= {200, 400}
