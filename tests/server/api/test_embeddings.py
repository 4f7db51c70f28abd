"""`POST /v1/embeddings` on the demo: transformers' own vectors, in every form of the convention, within limits."""

import asyncio
import base64
import struct
from typing import Any

import httpx2
import openai
import pytest
from chat_parts import assert_error
from demo_models.embedding.lessons import texts
from pooling_parts import EMBEDDING, own_vectors
from serving import Key, Server

pytestmark = pytest.mark.engine

PATH = "/v1/embeddings"
SENTENCES = ["The kitchen is on the second floor.", "ሰላም ለሁሉም", "  a\nb\t\tc ", "x", "Zażółć gęślą jaźń 😀 " * 8]


async def embed(http: httpx2.AsyncClient, given: Any, **fields: Any) -> list[list[float]]:
    answer = await http.post(PATH, json={"model": EMBEDDING, "input": given, **fields})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [one["embedding"] for one in data]


def cosine(one: Any, other: Any) -> float:
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    lengths = [sum(a * a for a in each) ** 0.5 for each in (one, other)]
    return float(dot / (lengths[0] * lengths[1]))


async def test_vectors_are_those_of_transformers(http: httpx2.AsyncClient):
    given = [*SENTENCES, *(one.text for one in texts())]
    made, right = await embed(http, given), own_vectors(given).tolist()
    assert min(map(cosine, made, right)) >= 0.999
    assert max(abs(sum(a * a for a in vector) - 1) for vector in made) < 1e-4


async def test_a_text_has_the_same_vector_alone_and_among_others(http: httpx2.AsyncClient):
    given = [one.text for one in texts()]
    together = await embed(http, given)
    alone = [(await embed(http, text))[0] for text in given[:10]]
    worst = max(
        abs(a - b) for one, other in zip(alone, together[:10], strict=True) for a, b in zip(one, other, strict=True)
    )
    assert worst < 1e-3


async def test_a_question_finds_its_text(http: httpx2.AsyncClient):
    found = await embed(http, [one.text for one in texts()])
    asked = await embed(http, [one.held_out for one in texts()])
    right = 0
    for at, question in enumerate(asked):
        near = [cosine(question, text) for text in found]
        right += near.index(max(near)) == at
    assert right / len(asked) >= 0.9


def test_the_openai_package_gets_floats_by_way_of_base64(sync_client: openai.OpenAI):
    plain = sync_client.embeddings.create(model=EMBEDDING, input="Where is the kitchen?", encoding_format="float")
    by_default = sync_client.embeddings.create(model=EMBEDDING, input=["Where is the kitchen?"])
    assert by_default.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert (plain.object, plain.model, plain.data[0].object, plain.data[0].index) == ("list", EMBEDDING, "embedding", 0)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > 5


async def test_base64_is_32_bits_little_endian(http: httpx2.AsyncClient):
    answer = await http.post(PATH, json={"model": EMBEDDING, "input": "Hello", "encoding_format": "base64"})
    content = base64.b64decode(answer.json()["data"][0]["embedding"], validate=True)
    assert list(struct.unpack("<128f", content)) == pytest.approx((await embed(http, "Hello"))[0], abs=1e-6)


async def test_vectors_can_be_cut_where_the_model_was_trained_for_it(http: httpx2.AsyncClient):
    (whole,), (cut,) = await embed(http, "Hello"), await embed(http, "Hello", dimensions=32)
    length = sum(number * number for number in whole[:32]) ** 0.5
    assert cut == pytest.approx([number / length for number in whole[:32]], abs=1e-5)
    (same,) = await embed(http, "Hello", dimensions=128)
    assert same == pytest.approx(whole, abs=1e-6)


async def test_token_ids_are_taken_as_they_are(http: httpx2.AsyncClient):
    from transformers import AutoTokenizer

    from engine.demo import weights_dir

    tokenizer = AutoTokenizer.from_pretrained(weights_dir("embedding"))
    ids = tokenizer(["Hello there", "The van"])["input_ids"]
    text, other = await embed(http, ["Hello there", "The van"])
    assert (await embed(http, ids[0]))[0] == pytest.approx(text, abs=1e-5)
    assert (await embed(http, ids))[1] == pytest.approx(other, abs=1e-5)


async def test_too_long_an_input_is_named_or_cut(http: httpx2.AsyncClient):
    given = ["short", "kitchen " * 900]
    answer = await http.post(PATH, json={"model": EMBEDDING, "input": given})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input[1]")
    assert error["message"].startswith("This model's maximum context length is 512 tokens.")
    vectors = await embed(http, given, truncate=True)
    assert cosine(vectors[1], own_vectors([given[1]]).tolist()[0]) > 0.999
    await embed(http, "kitchen " * 100_000, truncate=True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 3]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [[1], [-1]]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [999_999]}, "input"),
        ({"input": [[5], [999_999]]}, "input[1]"),
        ({"input": "a", "dimensions": 31}, "dimensions"),
        ({"input": "a", "dimensions": 129}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "input_type": "passage"}, "input_type"),
        ({"input": ["kitchen " * 400] * 800}, "input"),
    ],
)
async def test_what_is_wrong_is_named(http: httpx2.AsyncClient, body: dict[str, Any], param: str):
    answer = await http.post(PATH, json={"model": EMBEDDING, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize("model", ["service-plus", "service-rerank"])
async def test_another_model_makes_no_vectors(http: httpx2.AsyncClient, model: str):
    answer = await http.post(PATH, json={"model": model, "input": "a"})
    assert_error(answer, 400, "unsupported_capability", "model")


async def test_a_model_for_vectors_does_not_chat_and_lists_what_it_takes(http: httpx2.AsyncClient):
    chat = {"model": EMBEDDING, "messages": [{"role": "user", "content": "Hello!"}]}
    refused = await http.post("/v1/chat/completions", json=chat)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_capability")
    model = (await http.get(f"/v1/models/{EMBEDDING}")).json()
    assert (model["capabilities"], model["dimensions"], model["max_input_tokens"]) == (["embedding"], 128, 512)
    assert (model["context_length"], model["sizes"], model["demo"]) == (None, None, True)


async def test_a_key_needs_the_scope(server: Server):
    key = server.make_key("no-embeddings", scopes=["chat", "models"])
    assert await post_with(server, key, "a") == 403
    assert await post_with(server, server.make_key("embeddings", scopes=["embeddings"]), "a") == 200


async def test_thousands_of_inputs_come_back_in_their_order_beside_small_requests(http: httpx2.AsyncClient):
    given = [f"number {number} of a long list of texts" + " that goes on and on" * 18 for number in range(2048)]
    large = asyncio.create_task(embed(http, given))  # takes seconds
    small = [(await embed(http, given[7]))[0] for _ in range(5)]
    assert not large.done()  # none of them has waited for it
    made = await large
    assert len(made) == 2048
    assert small[0] == pytest.approx(made[7], abs=1e-3)
    for at in (0, 100, 2047):
        assert (await embed(http, given[at]))[0] == pytest.approx(made[at], abs=1e-3)


async def test_use_is_counted_as_embeddings(server: Server):
    key = server.make_key("counted", scopes=["embeddings"])
    assert await post_with(server, key, ["Hello there", "The van"]) == 200
    headers = {"Authorization": f"Bearer {key.text}"}
    async with httpx2.AsyncClient(base_url=server.root_url, headers=headers, timeout=60) as client:
        (row,) = (await client.get("/v1/usage", params={"by": "kind,model"})).json()["data"]
    assert (row["kind"], row["model"], row["requests"], row["completion_tokens"]) == ("embeddings", EMBEDDING, 1, 0)
    assert row["prompt_tokens"] > 4


async def post_with(server: Server, key: Key, given: Any) -> int:
    headers = {"Authorization": f"Bearer {key.text}"}
    async with httpx2.AsyncClient(base_url=server.root_url, headers=headers, timeout=60) as client:
        return (await client.post(PATH, json={"model": EMBEDDING, "input": given})).status_code
