"""`POST /v1/embeddings` and `/v1/rerank`: vectors of texts, and texts ordered by how well they answer a query.

Texts of similar meaning have vectors that are near each other. Reranking has the API of Jina and Cohere.
"""

import base64
import math
import secrets
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BeforeValidator, Field

from engine import EmbeddingRequest, Pooled, RerankRequest, Usage
from server.api.caller import Asker, Caller, EmbeddingCaller, checked, json_response
from server.api.schema import ModelBody, PositiveInt, texts_or_token_ids
from server.http.bodies import StrictRoute
from server.http.disconnect import until_disconnect

router = APIRouter(prefix="/v1", tags=["embeddings"], route_class=StrictRoute)
_MAX_INPUTS = 2048
_MAX_TOKENS_SENT = 300_000  # each is checked here
_MAX_DOCUMENTS = 2048
_Inputs = Annotated[Any, BeforeValidator(partial(texts_or_token_ids, most=_MAX_INPUTS, most_ids=_MAX_TOKENS_SENT))]


class EmbeddingBody(ModelBody):
    input: _Inputs
    """A text, an array of token ids of this model, or an array of up to 2,048 of either; 300,000 tokens in all."""
    encoding_format: Literal["float", "base64"] | None = None
    """float (default): an array of numbers. base64: the same numbers as bytes, little-endian, four for each."""
    dimensions: PositiveInt | None = None
    """The length of each vector, if the model was trained for shorter ones. Default: its own length."""
    truncate: bool | None = None
    """Cut an input that is too long. Default: it is refused, with its place in `input`."""
    input_type: Literal["query", "document"] | None = None
    """Put the model's own words for a query or a document before each text. Default: neither."""


@router.post("/embeddings", response_class=Response)
async def create_embeddings(body: EmbeddingBody, caller: EmbeddingCaller) -> Response:
    """Make a vector of each input, in their order."""
    return json_response(await until_disconnect(_embed(body, caller), caller.request))


async def answer_line(item: Any, asker: Asker) -> dict[str, Any]:
    return await _embed(checked(EmbeddingBody, item), asker)


async def _embed(body: EmbeddingBody, asker: Asker) -> dict[str, Any]:
    """Return the whole answer. Cancelling aborts it. Raises `ApiError` and `EngineError`s."""
    asked = EmbeddingRequest(
        request_id=secrets.token_hex(12),
        model=asker.access.model_id(asker.key, body.model),
        inputs=body.input,
        dimensions=body.dimensions,
        truncate=bool(body.truncate),
        input_type=body.input_type,
        urgency=asker.urgency,
    )
    asker.record.model = asked.model
    vectors = [msgspec.Raw()] * len(asked.inputs)
    async with await asker.engine.embed(asked) as stream:
        async for made in stream:  # written one by one as they come: thousands at once would block the loop
            vectors[made.index] = _vector(made, as_bytes=body.encoding_format == "base64")
    asker.record.used(Usage(stream.prompt_tokens, 0))
    usage = {"prompt_tokens": stream.prompt_tokens, "total_tokens": stream.prompt_tokens}
    return {"object": "list", "data": vectors, "model": asked.model, "usage": usage}


def _vector(made: Pooled, *, as_bytes: bool) -> msgspec.Raw:
    numbers: Any = made.values.tolist()
    if as_bytes:
        numbers = base64.b64encode(made.values.tobytes()).decode()  # on all machines of vLLM's wheels little-endian
    return msgspec.Raw(msgspec.json.encode({"object": "embedding", "index": made.index, "embedding": numbers}))


def _texts(value: Any) -> Any:
    """Texts, or objects with a `text`; told apart by hand, so that an error names no branch of a union."""
    if not isinstance(value, list) or not 1 <= len(value) <= _MAX_DOCUMENTS:
        raise ValueError(f"must be an array of 1 to {_MAX_DOCUMENTS} texts")
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
    """How many results. Default: all."""
    return_documents: bool | None = None
    """Send each result's text back with it."""
    truncate: bool | None = None
    """true (default): a text that is too long is cut. false: it is refused, with its place in `documents`."""


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
    """Return a score for each document, the same for equal texts, and the tokens of all. Cancelling aborts."""
    scores = [0.0] * len(asked.documents)
    async with await caller.engine.rerank(asked) as stream:
        async for made in stream:
            scores[made.index] = made.values[0]
    # An equal text gets another last digit in another step of the engine, which would decide the order.
    first: dict[str, int] = {}
    same = [scores[first.setdefault(text, at)] for at, text in enumerate(asked.documents)]
    return same, stream.prompt_tokens


def _share(score: float) -> float:
    """Return a score as a share from 0 to 1, by the logistic function. The order is that of the scores themselves."""
    return 1 / (1 + math.exp(-score)) if score > -700 else 0.0
