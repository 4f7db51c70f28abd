"""`POST /v1/rerank`: texts in the order in which they answer a query, in the form that Jina and Cohere gave it."""

import math
import secrets
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BeforeValidator, Field

from engine import RerankRequest, Usage
from server.api.caller import Caller, EmbeddingCaller, json_response
from server.api.schema import ModelBody, PositiveInt
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute

MAX_DOCUMENTS = 2048


def _texts(value: Any) -> Any:
    """Texts, or objects with a `text`; told apart by hand, so that an error names no branch of a union."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_DOCUMENTS:
        raise ValueError(f"must be an array of 1 to {MAX_DOCUMENTS} texts")
    texts = [one.get("text") if isinstance(one, dict) else one for one in value]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must hold texts of at least 1 character, or objects with such a `text`")
    return tuple(texts)


class RerankBody(ModelBody):
    query: Annotated[str, Field(min_length=1)]
    """What is asked. It may take half of what the model reads."""
    documents: Annotated[Any, BeforeValidator(_texts)]
    """1 to 2,048 texts, or objects with a `text`; 300,000 tokens in all, with the query counted for each."""
    top_n: PositiveInt | None = None
    """So many results. Default: all."""
    return_documents: bool | None = None
    """Send each result's text back with it."""
    truncate: bool | None = None
    """true (default): a text that is too long is cut. false: it is refused, with its place in `documents`."""


router = APIRouter(prefix="/v1", tags=["embeddings"], route_class=StrictRoute)


@router.post("/rerank", response_class=Response)
async def rerank(body: RerankBody, caller: EmbeddingCaller) -> Response:
    """Score each document by how well it answers the query; the best comes first, of equal ones the first sent."""
    asked = RerankRequest(
        request_id=secrets.token_hex(12),
        model=caller.access.model_id(caller.key, body.model),
        query=body.query,
        documents=body.documents,
        truncate=body.truncate is not False,
    )
    caller.record.model = asked.model
    scores, tokens = await until_disconnect(_scores(asked, caller), caller.request)
    caller.record.used(Usage(tokens, 0))
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n]
    results: list[dict[str, Any]] = [{"index": at, "relevance_score": _share(scores[at])} for at in best]
    if body.return_documents:
        results = [{**result, "document": {"text": asked.documents[result["index"]]}} for result in results]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"id": f"rerank-{asked.request_id}", "model": asked.model, "results": results, "usage": usage}
    return json_response(answer)


async def _scores(asked: RerankRequest, caller: Caller) -> tuple[list[float], int]:
    """Return a score of each document, the same of equal ones, and the tokens of all. Cancelling aborts."""
    scores = [0.0] * len(asked.documents)
    async with await caller.engine.rerank(asked) as stream:
        async for made in stream:
            scores[made.index] = made.values[0]
    # In other steps of the engine an equal text gets another last digit, which would decide on the order.
    first: dict[str, int] = {}
    same = [scores[first.setdefault(text, at)] for at, text in enumerate(asked.documents)]
    return same, stream.prompt_tokens


def _share(score: float) -> float:
    """Return a score as a share from 0 to 1, by the logistic function. The order is that of the scores themselves."""
    return 1 / (1 + math.exp(-score)) if score > -700 else 0.0
