"""Plain texts for a chat model to go on with: tokenised without a chat template, sampled by vLLM, out come ChatSteps.

Owns no engine: it works on the one of vllm_chat.py and counts and checks like vllm_serving.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.utils.async_utils import merge_async_iterators

from engine.backends.vllm_errors import check_answer_alone, check_context
from engine.backends.vllm_finish import finish_reason
from engine.errors import RequestError
from engine.types import ChatDelta, ChatStep, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from engine.backends.vllm_serving import TypedChat
    from engine.types import BeforeTurn, TextRequest


async def text_steps(
    serving: TypedChat, request: TextRequest, *, max_tokens: int | None, sized: BeforeTurn
) -> AsyncGenerator[ChatStep]:
    """Yield one `ChatStep` per engine step of any prompt. Closing the generator aborts all of them.

    `max_tokens` is the request's, or the model's limit. `sized` is awaited between counting the prompts and starting,
    with their tokens and the most that all answers may have. Raises `RequestError`s and vLLM's own.
    """
    context_length = serving.model_config.max_model_len
    if request.max_tokens is not None:
        check_answer_alone(request.max_tokens, context_length, "prompt")
    inputs = await _rendered(serving, request)
    for item in inputs:
        check_context(len(item["prompt_token_ids"]), max_tokens, context_length, "prompt")
    lengths = [len(item["prompt_token_ids"]) for item in inputs]
    longest = sum(context_length - length if max_tokens is None else max_tokens for length in lengths)
    await sized(sum(lengths), longest * request.n)
    outputs = _started(serving, request, inputs, max_tokens)
    counts = _Counts(prompt_tokens=sum(lengths))
    try:
        async for position, output in outputs:
            counts.cached[position] = output.num_cached_tokens or 0
            deltas = tuple(
                _delta(serving, request, piece, index=position * request.n + piece.index) for piece in output.outputs
            )
            counts.completion_tokens += sum(len(piece.token_ids) for piece in output.outputs)
            yield ChatStep(deltas, counts.usage())
    finally:
        await outputs.aclose()


class _Counts:
    """Tokens of all prompts together, up to here."""

    __slots__ = ("cached", "completion_tokens", "prompt_tokens")

    def __init__(self, *, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached: dict[int, int] = {}

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens, cached_tokens=sum(self.cached.values()))


async def _rendered(serving: TypedChat, request: TextRequest) -> list[Any]:
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


def _started(
    serving: TypedChat, request: TextRequest, inputs: list[Any], max_tokens: int | None
) -> AsyncGenerator[tuple[int, Any]]:
    """Yield vLLM's outputs with the position of their prompt. Closing it closes every one of vLLM's generators."""
    translated, context_length = _translate(request), serving.model_config.max_model_len
    outputs: AsyncGenerator[tuple[int, Any]] = merge_async_iterators(
        *(
            serving.engine_client.generate(
                item,
                translated.to_sampling_params(
                    context_length - len(item["prompt_token_ids"]) if max_tokens is None else max_tokens,
                    serving.default_sampling_params,
                ),
                f"cmpl-{request.request_id}-{position}",
                priority=int(request.urgency),  # the lower number goes first
            )
            for position, item in enumerate(inputs)
        )
    )
    return outputs


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
        # As in vllm_request.py: vLLM refuses several greedy answers, and one token to choose from leaves no chance.
        fields["temperature"], fields["top_k"] = 1.0, 1
    return CompletionRequest.model_construct(**fields)


def _delta(serving: TypedChat, request: TextRequest, piece: Any, *, index: int) -> ChatDelta:
    delta = ChatDelta(index, content=piece.text)
    if request.top_logprobs is not None and piece.logprobs is not None:
        delta.logprobs = serving.token_logprobs(piece, serving.renderer.tokenizer, request.top_logprobs)
    if piece.finish_reason is not None:
        delta.finish_reason = finish_reason(piece.finish_reason)
    return delta
