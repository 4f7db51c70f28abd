"""Speech requests that are refused: with the field to blame, before the answer begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from chat_parts import CHAT, HELLO, MODEL, assert_error
from speech_parts import (
    HELLO_EMMA,
    SPEECH,
    VOICE_MODEL,
)

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "input"),
    ({"input": "x" * 4097}, "input"),
    ({"input": ["Hello."]}, "input"),
    ({"input": None}, "input"),
    ({"input": " \n\t"}, "input"),
    ({"input": "\N{GRINNING FACE}\N{SPARKLES}"}, "input"),
    ({"input": "ሰላም።", "voice": "james"}, "input"),
    ({"model": 7}, "model"),
    ({"voice": "nobody"}, "voice"),
    ({"voice": ""}, "voice"),
    ({"voice": "EMMA"}, "voice"),
    ({"voice": "../emma"}, "voice"),
    ({"voice": "x" * 65}, "voice"),
    ({"voice": 7}, "voice"),
    ({"voice": None}, "voice"),
    ({"voice": {"id": 7}}, "voice.id"),
    ({"voice": {"id": "nobody"}}, "voice"),
    ({"response_format": "ogg"}, "response_format"),
    ({"response_format": 3}, "response_format"),
    ({"speed": 5}, "speed"),
    ({"speed": 0.2}, "speed"),
    ({"speed": "1"}, "speed"),
    ({"speed": True}, "speed"),
    ({"seed": -1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stream_format": "json"}, "stream_format"),
    ({"extra_args": {}}, "extra_args"),
]


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_a_wrong_field_is_refused_by_name_before_the_answer_begins(
    http: httpx2.AsyncClient, fields: dict[str, Any], param: str, stream_format: str
):
    body = HELLO_EMMA | {"stream_format": stream_format} | fields
    assert_error(await http.post(SPEECH, json=body), 400, "invalid_value", param)


@pytest.mark.parametrize("param", ["model", "input", "voice"])
async def test_a_missing_field_is_named(http: httpx2.AsyncClient, param: str):
    fields = {name: value for name, value in HELLO_EMMA.items() if name != param}
    assert_error(await http.post(SPEECH, json=fields), 400, "missing_field", param)


async def test_a_voice_of_another_model_is_missing_two_fields_of_an_object(http: httpx2.AsyncClient):
    assert_error(await http.post(SPEECH, json=HELLO_EMMA | {"voice": {}}), 400, "missing_field", "voice.id")


async def test_a_text_without_letters_is_told_which_language_would_do(http: httpx2.AsyncClient):
    for voice, language in (("emma", "English"), ("selam", "Amharic"), ("tolosa", "Oromo")):
        response = await http.post(SPEECH, json=HELLO_EMMA | {"voice": voice, "input": "\N{SPARKLES}?!"})
        assert_error(response, 400, "invalid_value", "input")
        assert language in response.json()["error"]["message"]


async def test_what_a_model_cannot_do_is_refused_with_its_status(http: httpx2.AsyncClient):
    for fields in ({}, {"stream_format": "sse"}):
        speech = await http.post(SPEECH, json=HELLO_EMMA | fields | {"model": MODEL})
        assert_error(speech, 400, "unsupported_capability", "model")
        nobody = await http.post(SPEECH, json=HELLO_EMMA | fields | {"model": "demo-en"})
        assert_error(nobody, 404, "model_not_found", "model")
    chat = await http.post(CHAT, json={"model": VOICE_MODEL, "messages": HELLO})
    assert_error(chat, 400, "unsupported_capability", "model")
