"""`POST /v1/completions`: plain texts that a model continues, whole and streamed: its body, its answer, its route."""

from collections import Counter
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Self

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from engine import ChatChoice, ChatDelta, ChatStep, Prompt, TextRequest, TokenLogprob
from server.api.caller import Asker, ChatCaller, checked_line
from server.api.chat_answer import CompletionAnswer
from server.api.chat_request import SampledBody
from server.api.schema import INT64_MAX, MAX_TOKENS, TopLogprobs, refused, texts_or_token_ids
from server.http.routing import StrictRoute
from server.validation import FieldError

MAX_PROMPTS = 16
_MAX_ANSWERS = 16
_DEFAULT_MAX_TOKENS = 16

_Prompts = Annotated[
    Any, BeforeValidator(partial(texts_or_token_ids, most=MAX_PROMPTS, most_ids=MAX_PROMPTS * MAX_TOKENS))
]
_no_suffix = refused(
    "is not supported: write the text before and after the gap into `prompt`, with the model's own marks", bool
)


class CompletionBody(SampledBody):
    prompt: _Prompts
    """A text, an array of token ids, or an array of up to 16 of either. No chat template is applied."""
    max_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    """Upper bound on generated tokens, for each answer. Default 16. 0 only with `echo`."""
    n: Annotated[int, Field(ge=1, le=8)] | None = None
    """How many answers to each prompt. Default 1; at most 16 answers in all."""
    best_of: Annotated[int, Field(ge=1, le=8)] | None = None
    """Must be the same as `n`."""
    logprobs: TopLogprobs | None = None
    """So many alternatives to each token, with their probabilities."""
    echo: bool | None = None
    """Begin each answer with its prompt; with `logprobs`, the probabilities of the prompt's tokens come as well."""
    prompt_logprobs: TopLogprobs | None = None
    """So many alternatives to each token of the prompt, in `prompt_logprobs` of each answer."""
    suffix: Annotated[str | None, AfterValidator(_no_suffix)] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "must be at least 1, or 0 with `echo: true`")
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError("prompt_logprobs", "cannot be streamed: leave `stream` out")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise FieldError("best_of", "must be the same as `n`: no more answers are generated than returned")
        if len(self.prompt) * (self.n or 1) > _MAX_ANSWERS:
            raise FieldError("n", f"times the number of prompts must be at most {_MAX_ANSWERS}")
        return self


class TextAnswer(CompletionAnswer):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, asked: TextRequest, *, include_usage: bool, shows_prompt: bool) -> None:
        super().__init__(asked, include_usage=include_usage)
        self._asked, self._shows_prompt = asked, shows_prompt
        self._offsets = Counter[int]()  # where the next token of each choice begins

    def step(self, step: ChatStep) -> bytes:
        return b"".join(
            self._chunk(self._choice(delta))
            for delta in step.deltas
            if delta.content or delta.logprobs or delta.finish_reason or delta.prompt
        )

    def _choice(self, choice: ChatChoice | ChatDelta) -> dict[str, Any]:
        prompt = choice.prompt
        text = prompt.text + choice.content if prompt and self._asked.echo else choice.content
        answered = {"text": text, "index": choice.index, "logprobs": None, "finish_reason": choice.finish_reason}
        entries: list[_Entry] = [(entry.token, entry.logprob, _top(entry)) for entry in choice.logprobs or ()]
        if prompt and self._asked.echo and self._asked.top_logprobs is not None:
            entries = [*_of_prompt(prompt, self._asked.top_logprobs), *entries]
        if entries or choice.logprobs is not None:
            offsets = list(accumulate((len(token) for token, _, _ in entries), initial=self._offsets[choice.index]))
            self._offsets[choice.index] = offsets.pop()
            tokens, logprobs, top = map(list, zip(*entries, strict=True)) if entries else ([], [], [])
            answered["logprobs"] = {
                "tokens": tokens,
                "token_logprobs": logprobs,
                "top_logprobs": top,
                "text_offset": offsets,
            }
        if prompt and self._shows_prompt:
            answered["prompt_logprobs"] = [
                {
                    str(id_): {"logprob": logprob, "rank": rank, "decoded_token": token}
                    for id_, token, logprob, rank in each.top
                }
                or None
                for each in prompt.tokens
            ]
        return answered


# A token, its natural-log probability, and those of the likeliest in its place; None for a prompt's first.
_Entry = tuple[str, float | None, dict[str, float] | None]


def _top(entry: TokenLogprob) -> dict[str, float] | None:
    return {**{top.token: top.logprob for top in entry.top}, entry.token: entry.logprob}


def _of_prompt(prompt: Prompt, most: int) -> list[_Entry]:
    return [
        (
            each.token,
            each.logprob,
            {token: logprob for id_, token, logprob, rank in each.top if rank <= most or id_ == each.id} or None,
        )
        for each in prompt.tokens
    ]


router = APIRouter(prefix="/v1", tags=["chat"], route_class=StrictRoute)


@router.post("/completions", response_class=Response)
async def create_completion(body: CompletionBody, caller: ChatCaller) -> Response:
    """Go on with a text, without a chat template; whole or, with `stream: true`, as server-sent events."""
    text, answer = _asked(body, caller)
    return await caller.answer(text, answer, stream=body.stream)


async def answer_line(item: Any, asker: Asker) -> dict[str, Any]:
    text, answer = _asked(checked_line(CompletionBody, item), asker)
    return answer.whole(await asker.engine.whole(text))


def _asked(body: CompletionBody, caller: Asker) -> tuple[TextRequest, TextAnswer]:
    most = caller.access.model(caller.key, body.model).max_output_tokens
    wanted = [each for each in (body.prompt_logprobs, body.logprobs if body.echo else None) if each is not None]
    text = TextRequest(
        **body.to_engine(caller),
        prompts=body.prompt,
        max_tokens=min(_DEFAULT_MAX_TOKENS, most or _DEFAULT_MAX_TOKENS)
        if body.max_tokens is None
        else body.max_tokens,
        top_logprobs=body.logprobs,
        prompt_logprobs=max(wanted, default=None),
        echo=bool(body.echo),
    )
    shows_prompt = body.prompt_logprobs is not None
    return text, TextAnswer(text, include_usage=body.include_usage, shows_prompt=shows_prompt)
