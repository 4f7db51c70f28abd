"""Which voices there are: over HTTP and on the command line, for each key what it may use."""

import json
from typing import Any

import httpx2
import pytest
from chat_parts import assert_error
from serving import Server
from speech_parts import COUNTS, NINE, SPEECH_MODELS, VOICE_MODEL, VOICES

pytestmark = pytest.mark.engine

FIELDS = ["id", "name", "gender", "language", "type", "description", "model", "family", "quality", "licence"]
FIELDS += ["demo", "available"]


async def listed(http: httpx2.AsyncClient, **params: str) -> list[dict[str, Any]]:
    response = await http.get(VOICES, params=params)
    assert response.status_code == 200, response.text
    assert list(response.json()) == ["object", "voices"]
    assert response.json()["object"] == "list"
    voices: list[dict[str, Any]] = response.json()["voices"]
    return voices


async def ids(http: httpx2.AsyncClient, **params: str) -> set[str]:
    return {voice["id"] for voice in await listed(http, **params)}


async def test_the_nine_voices_of_the_interface_are_there_with_its_fields_and_types(http: httpx2.AsyncClient):
    voices = await listed(http)
    assert {voice["id"]: (voice["gender"], voice["language"]) for voice in voices} == NINE
    assert len(voices) == 9
    for voice in voices:
        assert list(voice) == FIELDS
        texts = [voice[field] for field in FIELDS[:-2]]
        assert all(isinstance(text, str) and text for text in texts)
        assert voice["id"] == voice["id"].lower()
        assert voice["name"] == voice["id"].capitalize()
        assert voice["type"] == ("english_standard" if voice["language"] == "en" else "ethiopian")
        assert (voice["demo"], voice["available"]) == (False, True)
        assert (voice["family"], voice["quality"], voice["licence"]) == ("espeak", "formant", "GPL-3.0-or-later")
    for language, counts in COUNTS.items():
        genders = [voice["gender"] for voice in voices if voice["language"] == language]
        assert (genders.count("female"), genders.count("male")) == counts


async def test_the_ethiopian_languages_come_first_and_then_english(http: httpx2.AsyncClient):
    assert list(dict.fromkeys(voice["language"] for voice in await listed(http))) == ["am", "so", "ti", "om", "en"]


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({"language": "so"}, {"hodan", "warsame"}),
        ({"gender": "female"}, {"selam", "hana", "hodan", "emma"}),
        ({"language": "am", "gender": "male"}, {"dawit"}),
        ({"model": "espeak-en"}, {"emma", "james"}),
        ({"model": VOICE_MODEL}, set(NINE)),
        ({"model": VOICE_MODEL, "language": "ti", "gender": "male"}, {"berhane"}),
        ({"language": "ti", "gender": "female"}, set()),
        ({"language": "sw"}, set()),
        ({"language": "AM"}, {"selam", "hana", "dawit"}),
        ({"language": "tir-ET"}, {"berhane"}),
    ],
)
async def test_filters_leave_what_fits_all_of_them(http: httpx2.AsyncClient, params: dict[str, str], found: set[str]):
    assert await ids(http, **params) == found


@pytest.mark.parametrize(
    ("param", "value", "told"),
    [
        ("gender", "f", "must be one of 'female' or 'male'"),
        ("gender", "", "must be one of 'female' or 'male'"),
        ("language", "amharic", "There is `am`, `so`, `ti`, `om`, `en`."),
        ("language", "", "There is `am`,"),
        ("language", "x" * 5000, "There is `am`,"),
        ("model", "espeak-e", "Did you mean `espeak-en`? There is `espeak-am`,"),
        ("model", "service-plus", "`service-voice`"),
        ("model", "../espeak-en", "There is `espeak-am`,"),
    ],
)
async def test_a_filter_that_can_fit_nothing_is_refused_with_what_there_is(
    http: httpx2.AsyncClient, param: str, value: str, told: str
):
    response = await http.get(VOICES, params={param: value})
    assert_error(response, 400, "invalid_value", param)
    assert told in response.json()["error"]["message"]
    assert len(response.text) < 1000


async def test_an_unknown_filter_is_refused_and_of_a_repeated_one_the_last_counts(http: httpx2.AsyncClient):
    assert_error(await http.get(VOICES, params={"lang": "am"}), 400, "invalid_value", "lang")
    repeated = await http.get(f"{VOICES}?language=am&language=ti")
    assert [voice["id"] for voice in repeated.json()["voices"]] == ["berhane"]
    assert_error(await http.get(f"{VOICES}?language=%00%ff"), 400, "invalid_value", "language")


async def test_the_models_that_speak_are_listed_twice_for_two_kinds_of_clients(http: httpx2.AsyncClient):
    answer = (await http.get(SPEECH_MODELS)).json()
    assert list(answer) == ["object", "data", "models"]
    assert answer["object"] == "list"
    assert answer["models"] == [{"id": VOICE_MODEL}]
    assert answer["data"] == [(await http.get(f"/v1/models/{VOICE_MODEL}")).json()]
    assert answer["data"][0]["capabilities"] == ["speech"]


async def test_a_key_sees_the_voices_of_the_models_it_may_use(server: Server):
    standard = server.make_key("voices", tier="standard")
    chat_only = server.make_key("no voices", models=["service-plus"])
    no_audio = server.make_key("no audio", scopes=["chat", "models"])
    async with httpx2.AsyncClient(base_url=server.root_url, timeout=60) as anybody:

        async def voices(key: Any, path: str = VOICES) -> httpx2.Response:
            return await anybody.get(path, headers={"Authorization": f"Bearer {key.text}"})

        assert {voice["id"] for voice in (await voices(standard)).json()["voices"]} == set(NINE)
        assert (await voices(chat_only)).json() == {"object": "list", "voices": []}
        assert (await voices(chat_only, SPEECH_MODELS)).json() == {"object": "list", "models": [], "data": []}
        for path in (VOICES, SPEECH_MODELS):
            assert_error(await voices(no_audio, path), 403, "insufficient_permissions")
            assert_error(await anybody.get(path), 401, "invalid_api_key")


# Without a server


def command_line(server: Server, *arguments: str) -> str:
    return server.hearth("voices", "--weights-dir", str(server.weights_dir), *arguments)


async def test_the_command_line_lists_the_same_voices(server: Server, http: httpx2.AsyncClient):
    told = json.loads(command_line(server, "--json"))
    assert told == {"voices": await listed(http), "warnings": []}
    told = json.loads(command_line(server, "--json", "--language", "am", "--gender", "female", "--model", "espeak-am"))
    assert {voice["id"] for voice in told["voices"]} == {"selam", "hana"}


def test_the_command_line_draws_a_table(server: Server):
    table = command_line(server, "--model", "espeak-so")
    rows = [line.split() for line in table.splitlines() if "espeak-so" in line]
    assert sorted(rows) == [
        ["hodan", "Hodan", "female", "so", "espeak", "formant", "GPL-3.0-or-later", "espeak-so", "yes"],
        ["warsame", "Warsame", "male", "so", "espeak", "formant", "GPL-3.0-or-later", "espeak-so", "yes"],
    ]
    assert "There is no such voice" in command_line(server, "--language", "sw")
