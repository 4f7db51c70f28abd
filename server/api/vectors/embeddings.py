"""`POST /v1/embeddings`: texts become vectors, whose nearness says how near their meanings are."""

import base64
import secrets
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BeforeValidator

from engine import EmbeddingRequest, Pooled, Usage
from server.api.caller import Asker, EmbeddingCaller, checked, json_response
from server.api.schema import ModelBody, PositiveInt, texts_or_token_ids
from server.http.disconnect import until_disconnect
from server.http.routing import StrictRoute

MAX_INPUTS = 2048
_MAX_TOKENS_SENT = 300_000  # each is looked at here


_Inputs = Annotated[Any, BeforeValidator(partial(texts_or_token_ids, most=MAX_INPUTS, most_ids=_MAX_TOKENS_SENT))]


class EmbeddingBody(ModelBody):
    input: _Inputs
    """A text, an array of token ids of this model, or an array of up to 2,048 of either; 300,000 tokens in all."""
    encoding_format: Literal["float", "base64"] | None = None
    """float (default): an array of numbers. base64: the same numbers as bytes, little-endian, four for each."""
    dimensions: PositiveInt | None = None
    """So many numbers in each vector, where the model was trained to be cut. Default: as many as it makes."""
    truncate: bool | None = None
    """Cut an input that is too long. Default: it is refused, with its place in `input`."""
    input_type: Literal["query", "document"] | None = None
    """Put the model's own words for a query or a document before each text. Default: neither."""


router = APIRouter(prefix="/v1", tags=["embeddings"], route_class=StrictRoute)


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
