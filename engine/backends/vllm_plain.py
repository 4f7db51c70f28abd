"""The short way to an answer that is nothing but text, of a conversation that is nothing but text: most are.

What vLLM makes of such a request is the same as on the long way (vllm_serving.py), with a third of the work: sampling
parameters are made once for all requests that want the same, and nothing is built that only tools, pictures,
probabilities or several choices need. Whatever is not plain takes the long way.
"""

from __future__ import annotations

import asyncio
import copy
import time
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from engine.backends.plain_steps import PlainSteps
from engine.backends.vllm_plain_prompt import PlainPrompt
from engine.backends.vllm_plain_steps import register, shorten
from engine.backends.vllm_request import translate
from engine.chat_fold import fold
from engine.errors import EngineError
from engine.types import ChatRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from engine.types import ChatResult, ChatStep
    from engine.visit import Visit

# Of sampling parameters; a client that never asks for the same twice gains nothing and must not fill the memory.
_REMEMBERED = 256
# Tried on both ways when a model is loaded.
_TRIALS = (
    ("user", "Hello, how are you?"),
    ("system", " Answer briefly.\n\nOnly in German. "),
    ("user", "Gr\u00fc\u00dfe \u2014 \u4f60\u597d \U0001f30d\t<|im_end|> <s> </s> {{ messages }}"),
    ("assistant", "Yes."),
    ("user", ""),
)


class PlainChat:
    """Of one started `AsyncLLM`. Not for requests that `prompt` returns None for."""

    def __init__(self, engine: Any, serving: Any, prompt: PlainPrompt) -> None:
        self._engine = engine
        self._serving = serving
        self._prompt = prompt
        self._context_length: int = engine.model_config.max_model_len
        self._known: dict[tuple[Any, ...], Any] = {}

    @classmethod
    async def of(cls, engine: Any, serving: Any) -> PlainChat | None:
        """Return the short way of this model, or None where it does not lead to the same."""
        if engine.output_processor.stream_interval != 1 or _adjusts_everything(serving.parser_cls):
            return None
        trials = [_trial(*_TRIALS[:1]), _trial(*_TRIALS[1:3]), _trial(*_TRIALS[2:]), _trial(*_TRIALS)]
        requests = [
            translate(trial, stream=False, context_length=engine.model_config.max_model_len, max_output_tokens=None)
            for trial in trials
        ]
        prompt = PlainPrompt.of(serving, requests[0])
        if prompt is None or not await prompt.agrees_with(serving, requests):
            return None
        shorten(engine.output_processor)
        return cls(engine, serving, prompt)

    def prompt(self, request: ChatRequest, max_tokens: int | None) -> list[int] | None:
        """Return the tokens of the prompt if `request` can take this way. `max_tokens` None: as many as fit."""
        if (
            request.n != 1
            or request.tools
            or request.response_format is not None
            or request.logprobs
            or request.reasoning_effort is not None
            or request.chat_template_kwargs
            or request.continue_answer
        ):
            return None
        token_ids = self._prompt.token_ids(request.messages)
        if not token_ids or len(token_ids) + (1 if max_tokens is None else max_tokens) > self._context_length:
            return None  # the long way says what is wrong
        return token_ids

    async def stream(
        self,
        request: ChatRequest,
        token_ids: list[int],
        max_tokens: int | None,
        visit: Visit | None,
        *,
        streamed: bool = True,
    ) -> AsyncGenerator[ChatStep]:
        """Yield what each engine step brought, or, not `streamed`, the whole answer as one. Closing it aborts.

        `visit` learns at the end how many tokens there were, also of steps that are never yielded. Raises vLLM's
        exceptions, and `GenerationError`.
        """
        engine, steps = self._engine, PlainSteps(request.on_step)
        if engine.errored:
            raise EngineDeadError
        core_request = self._core_request(request, token_ids, max_tokens, streamed=streamed)
        try:
            register(engine.output_processor, core_request, steps, streamed=streamed)
            await engine.engine_core.add_request_async(core_request)
            while True:
                step = await steps.get()
                ended = step.deltas[0].finish_reason is not None
                yield step
                if ended:
                    return
        except EngineDeadError:
            raise
        except (asyncio.CancelledError, GeneratorExit, EngineError):
            await engine.abort(core_request.request_id, internal=True)  # does nothing if vLLM itself has ended it
            raise
        except Exception as error:
            await engine.abort(core_request.request_id, internal=True)
            raise EngineGenerateError from error
        finally:
            if visit is not None:
                visit.count(steps.answer_tokens)

    async def complete(self, request: ChatRequest, token_ids: list[int], max_tokens: int | None) -> ChatResult:
        """Return the whole answer. Cancelling aborts."""
        return await fold(self.stream(request, token_ids, max_tokens, None, streamed=False))

    def _core_request(
        self, request: ChatRequest, token_ids: list[int], max_tokens: int | None, *, streamed: bool
    ) -> Any:
        """Copy what vLLM once made of a request that differs in nothing else."""
        made = copy.copy(self._like(request, streamed=streamed))
        made.request_id = made.external_req_id = f"chatcmpl-{request.request_id}"
        made.prompt_token_ids = token_ids
        made.arrival_time = time.time()
        made.cache_salt = request.cache_salt
        made.priority = int(request.urgency)  # the lower number goes first
        made.sampling_params = copy.copy(made.sampling_params)
        made.sampling_params.max_tokens = get_max_tokens(
            self._context_length,
            max_tokens,
            len(token_ids),
            self._serving.default_sampling_params,
            self._serving.override_max_tokens,
        )
        return made

    def _like(self, request: ChatRequest, *, streamed: bool) -> Any:
        if request.seed is not None or request.logit_bias is not None:
            return self._made_by_vllm(request, streamed=streamed)
        key = (
            request.temperature,
            request.top_p,
            request.top_k,
            request.stop,
            request.presence_penalty,
            request.frequency_penalty,
            request.ignore_eos,
            streamed,
        )
        if key not in self._known:
            if len(self._known) == _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = self._made_by_vllm(request, streamed=streamed)
        return self._known[key]

    def _made_by_vllm(self, request: ChatRequest, *, streamed: bool) -> Any:
        """Return vLLM's request to its core as its serving classes and `AsyncLLM` make it; the prompt has one token."""
        theirs = translate(request, stream=streamed, context_length=self._context_length, max_output_tokens=1)
        parameters = theirs.to_sampling_params(1, self._serving.default_sampling_params)
        return self._engine.input_processor.process_inputs(
            request.request_id, tokens_input([0]), parameters, ("generate",)
        )


def _adjusts_everything(parser_class: Any) -> bool:
    """Whether a parser has a say in requests without tools: those for reasoning do."""
    return parser_class is not None and (
        parser_class.always_adjust_request or parser_class.reasoning_parser_cls is not None
    )


def _trial(*messages: tuple[str, str]) -> ChatRequest:
    return ChatRequest(
        request_id="trial", model="", messages=[{"role": role, "content": content} for role, content in messages]
    )
