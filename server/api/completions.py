"""`POST /v1/completions`: plain texts that a model continues, whole and streamed: its body, its answer, its route."""

from collections import Counter
from itertools import accumulate
from typing import Annotated, Any, Self

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from engine import ChatChoice, ChatDelta, ChatStep, TextRequest, TokenLogprob
from server.api.caller import ChatCaller
from server.api.chat_answer import CompletionAnswer
from server.api.chat_request import SampledBody
from server.api.schema import PositiveInt, TopLogprobs, refused
from server.http.routing import StrictRoute
from server.validation import FieldError

MAX_PROMPTS = 16
_MAX_ANSWERS = 16
_MAX_TOKENS_SENT = 2**18  # each is looked at here; no context is longer
_MAX_TOKEN_ID = 2**31 - 1
_DEFAULT_MAX_TOKENS = 16


def _prompts(value: Any) -> Any:
    """One text, one array of token ids, or an array of either; told apart by hand, like `content` in chat."""
    one = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(value[0]) is int)
    prompts = [value] if one else value
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"must be a string, an array of token ids, or an array of 1 to {MAX_PROMPTS} of either")
    return tuple(_prompt(prompt) for prompt in prompts)


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if not isinstance(prompt, (str, list)) or not prompt:
        raise ValueError("must hold texts of at least 1 character, or arrays of at least 1 token id")
    if isinstance(prompt, str):
        return prompt
    if len(prompt) > _MAX_TOKENS_SENT:
        raise ValueError(f"must hold at most {_MAX_TOKENS_SENT} token ids in one array")
    if not all(type(token) is int and 0 <= token <= _MAX_TOKEN_ID for token in prompt):
        raise ValueError("must hold token ids as whole numbers from 0, and nothing else in the same array")
    return tuple(prompt)


_no_echo = refused("is not supported: put the prompt in front of the answer yourself", bool)
_no_suffix = refused(
    "is not supported: write the text before and after the gap into `prompt`, with the model's own marks", bool
)


class CompletionBody(SampledBody):
    """The body of `POST /v1/completions`."""

    prompt: Annotated[Any, BeforeValidator(_prompts)]
    """A text, an array of token ids, or an array of up to 16 of either. No chat template is applied."""
    max_tokens: PositiveInt | None = None
    """Upper bound on generated tokens, for each answer. Default 16."""
    n: Annotated[int, Field(ge=1, le=8)] | None = None
    """How many answers to each prompt. Default 1; at most 16 answers in all."""
    best_of: Annotated[int, Field(ge=1, le=8)] | None = None
    """Must be the same as `n`."""
    logprobs: TopLogprobs | None = None
    """So many alternatives to each token, with their probabilities."""
    echo: Annotated[bool | None, AfterValidator(_no_echo)] = None
    suffix: Annotated[str | None, AfterValidator(_no_suffix)] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldError("best_of", "must be the same as `n`: answers are not made to be thrown away")
        if len(self.prompt) * (self.n or 1) > _MAX_ANSWERS:
            raise FieldError("n", f"times the number of prompts must be at most {_MAX_ANSWERS}")
        return self


class TextAnswer(CompletionAnswer):
    """A text completion, whole or streamed."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, asked: TextRequest, *, include_usage: bool) -> None:
        super().__init__(asked, include_usage=include_usage)
        self._offsets = Counter[int]()  # where the next token of each choice begins

    def step(self, step: ChatStep) -> bytes:
        return b"".join(
            self._chunk(self._choice(delta))
            for delta in step.deltas
            if delta.content or delta.logprobs or delta.finish_reason
        )

    def _choice(self, choice: ChatChoice | ChatDelta) -> dict[str, Any]:
        logprobs = None
        if choice.logprobs is not None:
            lengths = (len(entry.token) for entry in choice.logprobs)
            offsets = list(accumulate(lengths, initial=self._offsets[choice.index]))
            self._offsets[choice.index] = offsets.pop()
            logprobs = _logprobs(choice.logprobs, offsets)
        return {
            "text": choice.content,
            "index": choice.index,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }


def _logprobs(entries: tuple[TokenLogprob, ...], offsets: list[int]) -> dict[str, Any]:
    """Four lists of the same length; offsets count characters from the beginning of the answer."""
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {**{top.token: top.logprob for top in entry.top}, entry.token: entry.logprob} for entry in entries
        ],
        "text_offset": offsets,
    }


router = APIRouter(prefix="/v1", tags=["chat"], route_class=StrictRoute)


@router.post("/completions", response_class=Response)
async def create_completion(body: CompletionBody, caller: ChatCaller) -> Response:
    """Go on with a text, without a chat template; whole or, with `stream: true`, as server-sent events."""
    most = caller.access.model(caller.key, body.model).max_output_tokens
    text = TextRequest(
        **body.to_engine(caller),
        prompts=body.prompt,
        max_tokens=body.max_tokens or min(_DEFAULT_MAX_TOKENS, most or _DEFAULT_MAX_TOKENS),
        top_logprobs=body.logprobs,
    )
    return await caller.answer(text, TextAnswer(text, include_usage=body.include_usage), stream=body.stream)
