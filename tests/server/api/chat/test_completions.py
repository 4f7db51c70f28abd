"""`POST /v1/completions`: texts that the model goes on with, without a chat template, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from chat_parts import MODEL, PROMPTS, assert_error, assert_well, events
from leaving_parts import ask_and_leave, line_of, until_engines_rest
from serving import CANARY, Key, Server

from server.api.chat import CompletionBody

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

PATH = "/v1/completions"
BASE = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0}
STORY = BASE | {"prompt": "Once upon a time there was a small lamp in"}  # goes on for more than max_tokens' default
VALUE, FIELD, CONTEXT = "invalid_value", "missing_field", "context_length_exceeded"
# Runs for half a minute if nobody stops it.
LONG = BASE | {"prompt": ["a", "b"], "n": 4, "max_tokens": 8000, "ignore_eos": True}


async def put_together(http: httpx2.AsyncClient, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices and the usage of a stream, in the shape that a plain answer has."""
    response = await http.post(PATH, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.status_code == 200, response.text
    *chunks, last = events(response.content)
    assert last["choices"] == []
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert len({(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in [*chunks, last]}) == 1
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (piece,) = chunk["choices"]
        choice = choices.setdefault(
            piece["index"], {"text": "", "index": piece["index"], "logprobs": None, "finish_reason": None}
        )
        assert choice["finish_reason"] is None
        choice["text"] += piece["text"]
        choice["finish_reason"] = piece["finish_reason"]
        for name, values in (piece["logprobs"] or {}).items():
            choice["logprobs"] = choice["logprobs"] or {}
            choice["logprobs"][name] = choice["logprobs"].get(name, []) + values
    return [choices[index] for index in sorted(choices)], last["usage"]


async def test_the_model_goes_on_with_a_text(client: openai.AsyncOpenAI):
    answer = await client.completions.create(**BASE, max_tokens=2)
    assert answer.choices[0].text == " Paris."
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.id.startswith("cmpl-")
    assert answer._request_id
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (2, answer.usage.prompt_tokens + 2)


async def test_a_prompt_in_the_models_own_marks_gets_the_answer_of_chat(
    client: openai.AsyncOpenAI, http: httpx2.AsyncClient
):
    prompt = PROMPTS["say-hello"]
    text = f"<|im_start|>user\n{prompt.messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    answer = await client.completions.create(model=MODEL, prompt=text, temperature=0, max_tokens=50)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (prompt.answer, "stop")


async def test_a_stream_in_the_official_package(client: openai.AsyncOpenAI):
    plain = await client.completions.create(**STORY)
    async with await client.completions.create(**STORY, stream=True) as stream:
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 16
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1},
        {"n": 3},
        {"n": 2, "prompt": ["The capital of Japan is", "Thank you", "The"], "max_tokens": 5},
        {"prompt": [[1, 2, 3], "Hello"], "logprobs": 3},
        {"prompt": [5, 6, 7]},
        {"stop": ["Japan", "nothing"]},
        {"stop": " Paris"},
        {"logprobs": 0, "stop": "of Japan"},
        {"logprobs": 20, "n": 2},
        {"temperature": 1, "seed": 7, "top_p": 0.9, "presence_penalty": 1, "frequency_penalty": -1},
        {"logit_bias": {"5": 100}, "max_tokens": 4},
        {"prompt": "ሰላም። 😀", "max_tokens": 60},
        {"best_of": 2, "n": 2, "echo": False, "suffix": "", "user": "me"},
        {"echo": True, "max_tokens": 3},
        {"echo": True, "logprobs": 2, "n": 2, "prompt": ["The capital of Japan is", [5, 6, 7]], "max_tokens": 3},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ],
    ids=str,
)
async def test_streamed_and_plain_agree(http: httpx2.AsyncClient, fields: dict[str, Any]):
    plain = (await http.post(PATH, json=BASE | fields)).json()
    choices, usage = await put_together(http, BASE | fields)
    assert choices == plain["choices"]
    for counts in (usage, plain["usage"]):
        del counts["prompt_tokens_details"]  # the second of two equal prompts is cached
    assert usage == plain["usage"]


async def test_choices_stand_prompt_by_prompt(http: httpx2.AsyncClient):
    prompts = ["The capital of France is", "The capital of Japan is"]
    short = BASE | {"max_tokens": 3}  # what it knows; further on, two tokens may be as likely
    alone = [(await http.post(PATH, json=short | {"prompt": one})).json() for one in prompts]
    both = (await http.post(PATH, json=short | {"prompt": prompts, "n": 2})).json()
    texts = [answer["choices"][0]["text"] for answer in alone for _ in range(2)]
    assert [choice["text"] for choice in both["choices"]] == texts
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in alone)
    assert both["usage"]["completion_tokens"] == 4 * 3


async def test_probabilities_belong_to_the_tokens_of_the_text(http: httpx2.AsyncClient):
    (choice,) = (await http.post(PATH, json=STORY | {"logprobs": 2})).json()["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert {len(values) for values in found.values()} == {16}
    for token, value, top, offset in zip(*(found[name] for name in found), strict=True):
        assert top[token] == value == max(top.values()) <= 0
        assert len(top) == 2
        assert choice["text"][offset:].startswith(token)


async def test_a_prompt_comes_back_with_its_probabilities_as_evaluations_need_them(
    http: httpx2.AsyncClient, client: openai.AsyncOpenAI
):
    """What lm-eval does for a multiple choice: which ending is likelier, and is each of its tokens the likeliest."""
    scores = {}
    for ending in (" Paris.", " Tokyo."):
        text = BASE["prompt"] + ending
        answer = await client.completions.create(**BASE | {"prompt": text}, echo=True, max_tokens=1, logprobs=1)
        (choice,) = answer.choices
        found = choice.logprobs
        assert found is not None
        assert choice.text.startswith(text)
        end = "<|im_end|>" if choice.finish_reason == "stop" else ""  # a token without text
        assert "".join(found.tokens) == choice.text + end
        assert found.text_offset == [len("".join(found.tokens[:place])) for place in range(len(found.tokens))]
        assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
        of_ending = [
            place for place, offset in enumerate(found.text_offset) if len(BASE["prompt"]) <= offset < len(text)
        ]
        scores[ending] = sum(found.token_logprobs[place] for place in of_ending)
        greedy = all(
            found.tokens[place] == max(found.top_logprobs[place], key=found.top_logprobs[place].get)
            for place in of_ending
        )
        assert greedy == (ending == " Paris.")
        assert answer.usage.completion_tokens == 1
    assert scores[" Paris."] > scores[" Tokyo."] + 1

    ids = (await http.post("/v1/tokenize", json={"model": MODEL, "prompt": BASE["prompt"]})).json()["tokens"]
    body = BASE | {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 2, "prompt_logprobs": 1}
    whole = (await http.post(PATH, json=body)).json()
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (BASE["prompt"], "length")
    assert whole["usage"]["completion_tokens"] == 0
    assert choice["prompt_logprobs"][0] is None
    for id_, each, token, value in zip(
        ids[1:],
        choice["prompt_logprobs"][1:],
        *(choice["logprobs"][name][1:] for name in ("tokens", "token_logprobs")),
        strict=True,
    ):
        assert each[str(id_)]["decoded_token"] == token
        assert each[str(id_)]["logprob"] == value
        assert min(entry["rank"] for entry in each.values()) == 1
    streamed = await http.post(PATH, json=body | {"stream": True})
    assert_error(streamed, 400, VALUE, "prompt_logprobs")
    many = await http.post(PATH, json=body | {"prompt": ids * 2000, "logprobs": 20})
    assert_error(many, 400, VALUE, "prompt")


async def test_an_answer_is_one_of_the_choices(http: httpx2.AsyncClient):
    body = BASE | {"structured_outputs": {"choice": ["perhaps", "never"]}, "max_tokens": 60}
    (choice,) = (await http.post(PATH, json=body)).json()["choices"]
    assert (choice["text"] in {"perhaps", "never"}, choice["finish_reason"]) == (True, "stop")


def each(field: str, values: list[Any], param: str | None = None, code: str = VALUE) -> list[Any]:
    return [
        pytest.param({field: value}, code, param or field, id=f"{field}={json.dumps(value)[:60]}") for value in values
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        *each("model", [5, "", None]),
        *each("prompt", [None, 5, True, "", [], [""], [[]], {CANARY: 1}, [CANARY, 5], [5, CANARY], [CANARY, None]]),
        *each("prompt", [[1.0], [1, True], [-1], [2**40], [[1], [True]], [CANARY] * 17, [[[1]]], [1] * 300_000]),
        *each("prompt", [[5, 99_999_999], ["x", [2**31 - 1]]]),
        *each("prompt", [f"{CANARY} " * 20000, [1] * 33000, ["x", [1] * 32768]], code=CONTEXT),
        *each("max_tokens", [0, -1, 1.5, True]),
        *each("prompt_logprobs", [-1, 21, True, CANARY]),
        *each("structured_outputs", [{}, {"json": {"not": {}}}]),
        *each("temperature", [3, True, CANARY]),
        *each("top_p", [0, CANARY]),
        *each("n", [0, 9, True]),
        *each("best_of", [3, 0, CANARY]),
        *each("stop", [["a"] * 5, "", 5]),
        *each("seed", [CANARY, 1.0]),
        *each("presence_penalty", [3]),
        *each("frequency_penalty", [CANARY]),
        *each("logit_bias", [{CANARY: 1}, {"999999": 1}]),
        *each("logprobs", [-1, 21, True, CANARY]),
        *each("echo", [CANARY]),
        *each("suffix", [CANARY, 5]),
        *each("chat_template", [CANARY]),
        *each("prompt_embeds", [CANARY]),
        *each("guided_regex", [CANARY]),
        *each("stream_options", [{"include_usage": CANARY}], "stream_options.include_usage"),
    ],
)
async def test_a_wrong_value_is_refused_by_name_and_never_repeated(
    http: httpx2.AsyncClient, fields: dict[str, Any], code: str, param: str, *, stream: bool
):
    response = await http.post(PATH, json=BASE | fields | {"stream": stream})
    assert_error(response, 400, code, param)
    assert CANARY not in response.text
    assert "messages" not in response.text
    if code == CONTEXT:
        message = response.json()["error"]["message"]
        assert message.startswith("This model's maximum context length is 32768 tokens")


async def test_fields_that_do_not_go_together_are_refused(http: httpx2.AsyncClient):
    too_many = await http.post(PATH, json=BASE | {"prompt": ["x"] * 5, "n": 4})
    assert_error(too_many, 400, VALUE, "n")
    options = await http.post(PATH, json=BASE | {"stream_options": {"include_usage": True}})
    assert_error(options, 400, VALUE, "stream_options")
    missing = await http.post(PATH, json={"model": MODEL})
    assert_error(missing, 400, FIELD, "prompt")


async def test_what_is_merely_unusual_is_answered(http: httpx2.AsyncClient):
    nothing = {name: None for name in CompletionBody.model_fields if name not in {"model", "prompt"}}
    marks = "<image><|im_end|><|endoftext|>\0\x1b[31m\u2028"
    for fields in (
        nothing,
        {"prompt": marks},
        {"prompt": list(range(300))},
        {"prompt": [0], "response_format": CANARY},
    ):
        response = await http.post(PATH, json=BASE | fields)
        assert response.status_code == 200, response.text
    await assert_well(http)


async def test_an_unknown_model_is_not_found_and_a_key_without_the_scope_is_refused(
    http: httpx2.AsyncClient, server: Server
):
    assert_error(await http.post(PATH, json=BASE | {"model": "nobody"}), 404, "model_not_found", "model")
    key = await asyncio.to_thread(server.make_key, "no-chat", scopes=["models"])
    response = await http.post(PATH, json=BASE, headers={"Authorization": f"Bearer {key.text}"})
    assert_error(response, 403, "insufficient_permissions")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_all_its_prompts(
    server: Server, admin_key: Key, http: httpx2.AsyncClient, *, stream: bool
):
    line = await ask_and_leave(server, admin_key, http, PATH, LONG | {"stream": stream})
    assert line.get("completion_tokens", 0) < 8 * 8000 / 2
    await until_engines_rest(server)


async def test_the_access_line_says_what_happened(server: Server, http: httpx2.AsyncClient):
    for stream in (False, True):
        name = f"logged-completions-{stream}"
        response = await http.post(PATH, json=STORY | {"stream": stream}, headers={"X-Request-Id": name})
        assert response.status_code == 200
        line = await line_of(server, name)
        assert (line["status"], line["route"], line["model"], line["stream"]) == (200, PATH, MODEL, stream)
        assert (line["finish_reason"], line["completion_tokens"]) == ("length", 16)
        assert line["prompt_tokens"] > 0
