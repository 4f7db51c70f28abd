"""Plain texts for a chat model to go on with: tokenised without a chat template, sampled by vLLM, out come ChatSteps.

Owns no engine: it works on the one of engine.py and counts and checks like serving.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.inputs.preprocess import parse_model_prompt

from engine.backends.vllm.errors import check_answer_alone, check_context
from engine.backends.vllm.outputs import Collector, finish_reason, token_logprobs
from engine.backends.vllm.serving import Serving
from engine.errors import RequestError
from engine.stream import TokenStream
from engine.types import ChatDelta, ChatStep, TextRequest, Usage


class TextAnswers:
    """The prompts of one request, tokenised and checked, and what their answers have come to."""

    def __init__(self, serving: Serving, request: TextRequest, inputs: list[Any], max_tokens: int | None) -> None:
        lengths = [len(item["prompt_token_ids"]) for item in inputs]
        self._serving = serving
        self._request = request
        self._inputs = inputs
        self._room = [
            serving.chat.model_config.max_model_len - length if max_tokens is None else max_tokens for length in lengths
        ]
        self.prompt_tokens = sum(lengths)
        self.longest_tokens = sum(self._room) * request.n
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}
        self._running = len(inputs)

    @classmethod
    async def of(cls, serving: Serving, request: TextRequest, max_tokens: int | None) -> TextAnswers:
        """Tokenise. `max_tokens` is the request's, or the model's limit. Raises `RequestError`s and vLLM's own."""
        context_length = serving.chat.model_config.max_model_len
        if request.max_tokens is not None:
            check_answer_alone(request.max_tokens, context_length, "prompt")
        inputs = await _rendered(serving.chat, request)
        for item in inputs:
            check_context(len(item["prompt_token_ids"]), max_tokens, context_length, "prompt")
        return cls(serving, request, inputs, max_tokens)

    async def submit(self, stream: TokenStream, translated: Callable[[Exception], Exception]) -> None:
        """Give all prompts to the engine; their steps go into `stream`, which ends with the last of them."""
        started: list[str] = []
        try:
            for position, (inputs, room) in enumerate(zip(self._inputs, self._room, strict=True)):
                core = self._serving.core_of_text(self._request, _translate(self._request), inputs, room, position)
                started.append(core.request_id)
                step, finished = partial(self._step, position), partial(self._finished, stream)
                await self._serving.start(core, Collector(stream, step, translated, finished), stream)
        except BaseException:
            self._serving.abort(started)
            raise
        if stream.finished and len(started) > 1:  # with an error, while others were given to the engine
            self._serving.abort(started)
            self._serving.abort_in_core(started)
        stream.abort = lambda: self._serving.abort(started)

    def _finished(self, stream: TokenStream) -> None:
        self._running -= 1
        if not self._running:
            stream.finish()

    def _step(self, position: int, output: Any) -> ChatStep:
        self._cached[position] = output.num_cached_tokens or 0
        deltas = tuple(
            _delta(self._serving.chat, self._request, piece, index=position * self._request.n + piece.index)
            for piece in output.outputs
        )
        self._completion_tokens += sum(len(piece.token_ids) for piece in output.outputs)
        usage = Usage(self.prompt_tokens, self._completion_tokens, cached_tokens=sum(self._cached.values()))
        return ChatStep(deltas, usage)


async def _rendered(serving: Any, request: TextRequest) -> list[Any]:
    """Tokenise; vLLM does it on threads of its own."""
    renderer, model_config = serving.renderer, serving.model_config
    for prompt in request.prompts:
        if not isinstance(prompt, str):
            _check_token_ids(renderer, prompt)
    prompts = [prompt if isinstance(prompt, str) else list(prompt) for prompt in request.prompts]
    rendered: list[Any] = await renderer.render_cmpl_async(
        [parse_model_prompt(model_config, prompt) for prompt in prompts],
        _translate(request).build_tok_params(model_config),
        prompt_extras={"cache_salt": request.cache_salt} if request.cache_salt is not None else None,
    )
    return rendered


def _check_token_ids(renderer: Any, token_ids: tuple[int, ...]) -> None:
    try:
        renderer.validate_token_ids(token_ids)
    except VLLMValidationError as error:
        raise RequestError("`prompt` holds a token id that this model does not have.", param="prompt") from error


def _translate(request: TextRequest) -> CompletionRequest:
    """Build vLLM's request without validating it again: the server has checked every field already."""
    fields: dict[str, Any] = {
        "stream": True,  # outputs hold what is new, not everything so far
        "temperature": request.temperature,
        "top_p": request.top_p,
        "n": request.n,
        "stop": list(request.stop),
        "seed": request.seed,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": request.logit_bias,
        "logprobs": request.top_logprobs,
        "ignore_eos": request.ignore_eos,
        "max_tokens": None,  # check_context says both numbers, vLLM's check of the sum would not
    }
    if request.n > 1 and request.temperature == 0:
        # As in request.py: vLLM refuses several greedy answers, and one token to choose from leaves no chance.
        fields["temperature"], fields["top_k"] = 1.0, 1
    return CompletionRequest.model_construct(**fields)


def _delta(serving: Any, request: TextRequest, piece: Any, *, index: int) -> ChatDelta:
    delta = ChatDelta(index, content=piece.text)
    if request.top_logprobs is not None and piece.logprobs is not None:
        delta.logprobs = token_logprobs(serving, piece, request.top_logprobs)
    if piece.finish_reason is not None:
        delta.finish_reason = finish_reason(piece.finish_reason)
    return delta
