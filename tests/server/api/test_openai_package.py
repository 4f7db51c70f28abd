"""The official openai package works against us as it does against the service it was made for."""

import time

import openai
import pytest
from chat_parts import HELLO, HELLO_ANSWER, MODEL
from serving import Server

pytestmark = pytest.mark.engine

TASKS = ("plus", "pro", "embedding", "rerank", "transcription", "image", "voice")
ALL_MODELS = [f"service-{name}" for name in TASKS]
REQUEST = {"model": MODEL, "messages": HELLO, "temperature": 0}


def assert_error(error: openai.APIStatusError, kind: type[openai.APIStatusError], code: str, param: str | None) -> None:
    assert type(error) is kind
    assert (error.code, error.param, error.type) == (code, param, "invalid_request_error")
    assert error.request_id
    assert error.message


def test_a_plain_answer(sync_client: openai.OpenAI):
    before = int(time.time())
    answer = sync_client.chat.completions.create(**REQUEST)
    assert answer.choices[0].message.content == HELLO_ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id.startswith("chatcmpl-")
    assert before <= answer.created <= int(time.time())
    assert answer._request_id
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream(sync_client: openai.OpenAI):
    with sync_client.chat.completions.create(**REQUEST, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == HELLO_ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    assert stream.response.headers["x-request-id"]


async def test_a_stream_async_with_usage(client: openai.AsyncOpenAI):
    stream = await client.chat.completions.create(**REQUEST, stream=True, stream_options={"include_usage": True})
    async with stream:
        *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == HELLO_ANSWER
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks)


async def test_the_packages_own_folding_of_a_stream(client: openai.AsyncOpenAI):
    async with client.chat.completions.stream(**REQUEST) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert kinds[-1] == "content.done"
    assert final.choices[0].message.content == HELLO_ANSWER
    assert final.choices[0].finish_reason == "stop"


async def test_the_raw_response_shows_our_headers(client: openai.AsyncOpenAI):
    raw = await client.chat.completions.with_raw_response.create(**REQUEST, extra_headers={"X-Request-Id": "mine-7"})
    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.parse()._request_id == "mine-7"


def test_the_models(sync_client: openai.OpenAI):
    models = sync_client.models.list()
    assert [model.id for model in models] == ALL_MODELS
    assert models._request_id
    one = sync_client.models.retrieve(MODEL)
    assert (one.id, one.object, one.owned_by, one._request_id is None) == (MODEL, "model", "hearth", False)


async def test_the_models_async(client: openai.AsyncOpenAI):
    assert [model.id async for model in client.models.list()] == ALL_MODELS
    assert (await client.models.retrieve("service-pro")).id == "service-pro"


@pytest.mark.parametrize("key", ["sk-wrong", "hk_" + "a" * 12 + "_" + "b" * 49])
def test_a_wrong_key(server: Server, key: str):
    with (
        openai.OpenAI(base_url=server.base_url, api_key=key, max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        stranger.chat.completions.create(**REQUEST)
    assert_error(caught.value, openai.AuthenticationError, "invalid_api_key", None)
    assert key not in str(caught.value)


async def test_a_wrong_key_async(server: Server):
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            await stranger.models.list()
    assert_error(caught.value, openai.AuthenticationError, "invalid_api_key", None)


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model(sync_client: openai.OpenAI, *, stream: bool):
    with pytest.raises(openai.NotFoundError) as caught:
        sync_client.chat.completions.create(**REQUEST | {"model": "nobody"}, stream=stream)
    assert_error(caught.value, openai.NotFoundError, "model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as caught:
        sync_client.models.retrieve("nobody")
    assert_error(caught.value, openai.NotFoundError, "model_not_found", "model")


async def test_a_bad_field_async(client: openai.AsyncOpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**REQUEST | {"temperature": 7})
    assert_error(caught.value, openai.BadRequestError, "invalid_value", "temperature")


def test_a_base_address_without_v1_says_what_is_missing(server: Server):
    assert server.admin_key is not None
    with (
        openai.OpenAI(base_url=server.root_url, api_key=server.admin_key.text, max_retries=0) as lost,
        pytest.raises(openai.NotFoundError, match="/v1"),
    ):
        lost.chat.completions.create(**REQUEST)
