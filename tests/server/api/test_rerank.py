"""`POST /v1/rerank` on the demo: transformers' own order, in the form that Jina's and Cohere's clients read."""

from typing import Any

import httpx2
import pytest
from demo_models.embedding.lessons import texts
from pooling_parts import RERANK, own_scores

pytestmark = pytest.mark.engine

PATH = "/v1/rerank"
DOCUMENTS = [one.text for one in texts()]


async def rerank(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post(PATH, json={"model": RERANK, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_order_is_that_of_transformers(http: httpx2.AsyncClient):
    for one in texts()[:8]:
        answer = await rerank(http, query=one.held_out, documents=DOCUMENTS)
        scores = own_scores(one.held_out, DOCUMENTS)
        right = sorted(range(len(DOCUMENTS)), key=lambda at: (-scores[at].item(), at))
        results = answer["results"]
        order = [result["index"] for result in results]
        # Two whose scores are the same to the last bits may change places
        assert [scores[at].item() for at in order] == pytest.approx([scores[at].item() for at in right], abs=1e-4)
        shares = [result["relevance_score"] for result in results]
        assert shares == pytest.approx(scores.sigmoid()[order].tolist(), abs=1e-4)
        assert shares == sorted(shares, reverse=True)


async def test_a_question_has_its_text_first(http: httpx2.AsyncClient):
    right = 0
    for at, one in enumerate(texts()):
        (best,) = (await rerank(http, query=one.held_out, documents=DOCUMENTS, top_n=1))["results"]
        right += best["index"] == at
    assert right / len(texts()) >= 0.9


async def test_documents_come_back_if_asked_for_and_may_be_objects(http: httpx2.AsyncClient):
    given = [{"text": "The van is washed in May."}, "The kitchen is on the second floor."]
    answer = await rerank(http, query="On which floor is the kitchen?", documents=given, return_documents=True)
    assert answer["results"][0]["document"] == {"text": "The kitchen is on the second floor."}
    assert [result["index"] for result in answer["results"]] == [1, 0]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 10
    assert "document" not in (await rerank(http, query="a", documents=["b"]))["results"][0]


async def test_equal_documents_keep_their_order(http: httpx2.AsyncClient):
    answer = await rerank(http, query="kitchen", documents=["the van", "the kitchen", "the kitchen", "the kitchen"])
    assert [result["index"] for result in answer["results"]] == [1, 2, 3, 0]


async def test_a_long_document_is_cut_or_named(http: httpx2.AsyncClient):
    given = {"query": "kitchen", "documents": ["short", "kitchen " * 900]}
    assert len((await rerank(http, **given))["results"]) == 2
    answer = await http.post(PATH, json={"model": RERANK, **given, "truncate": False})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "documents[1]")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "kitchen " * 400, "documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": "b"}, "documents"),
        ({"query": "a", "documents": ["b", ""]}, "documents"),
        ({"query": "a", "documents": [{"content": "b"}]}, "documents"),
        ({"query": "a", "documents": ["b"] * 2049}, "documents"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ],
)
async def test_what_is_wrong_is_named(http: httpx2.AsyncClient, body: dict[str, Any], param: str):
    answer = await http.post(PATH, json={"model": RERANK, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_another_model_does_not_rerank(http: httpx2.AsyncClient):
    answer = await http.post(PATH, json={"model": "service-embedding", "query": "a", "documents": ["b"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_capability")
