"""One chat request on a started vLLM engine: rendered, given to its core, its outputs put into a `TokenStream`.

Templates, tokenising, sampling parameters and parsers are those of vLLM's serving classes; what they would make of an
HTTP answer is left out. Their private fields are listed in compat.py.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.inputs.engine import tokens_input
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.parallel_sampling import ParentRequest

from engine.backends.vllm import compat
from engine.backends.vllm.errors import check_context, translated_template_errors
from engine.backends.vllm.grammars import Grammars
from engine.backends.vllm.outputs import ChatOutputs, Collector, text_state
from engine.backends.vllm.request import translate
from engine.backends.vllm.tool_calls import CallStream, mend
from engine.stream import TokenStream
from engine.types import ChatRequest, TextRequest

# Of sampling parameters; a client that never asks for the same twice gains nothing and must not fill the memory.
_REMEMBERED = 256
# Rendered in both ways when a model is loaded.
_TRIALS = (
    ("user", "Hello, how are you?"),
    ("system", " Answer briefly.\n\nOnly in German. "),
    ("user", "Gr\u00fc\u00dfe \u2014 \u4f60\u597d \U0001f30d\t<|im_end|> <s> </s> {{ messages }}"),
    ("assistant", "Yes."),
    ("user", ""),
)


def build_serving(
    engine: Any, *, name: str, tool_parser: str | None, reasoning_parser: str | None, grammars: Grammars
) -> Serving:
    """Build the serving of a started `AsyncLLM`. A parser that does not fit the tokenizer raises."""
    parsing = {
        "enable_auto_tools": tool_parser is not None,
        "exclude_tools_when_tool_choice_none": True,  # else the model calls them all the same, as raw text
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser or "",
        "tool_strict_level": "parameter",  # arguments always satisfy the schema
        "request_logger": None,
        "chat_template": None,
        "chat_template_content_format": "auto",
    }
    renderer = OnlineRenderer(
        model_config=engine.model_config, renderer=engine.renderer, **_known(OnlineRenderer, parsing)
    )
    renderer.warmup()
    models = OpenAIServingModels(
        engine_client=engine,
        base_model_paths=[BaseModelPath(name=name, model_path=engine.model_config.model)],
        lora_modules=None,
    )
    chat = OpenAIServingChat(
        engine_client=engine,
        models=models,
        response_role="assistant",
        online_renderer=renderer,
        **_known(OpenAIServingChat, parsing),
    )
    compat.apply("tool parsers", lambda: mend(chat.parser_cls))
    # Off: vLLM would parse each grammar once more on the event loop. `grammars` has checked it and chosen the backend.
    if compat.fits("grammar check"):
        engine.input_processor.structured_outputs_config = None
    return Serving(engine, chat, grammars)


def _known(target: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """Leave out what this version of vLLM does not have yet: its constructors only ever gained arguments."""
    accepted = inspect.signature(target.__init__).parameters  # type: ignore[misc]
    return {name: value for name, value in arguments.items() if name in accepted}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered chat request. Plain text has `token_ids` only; `inputs` and `vllm_request` are vLLM's objects."""

    request: ChatRequest
    token_ids: list[int]
    max_tokens: int | None
    inputs: Any = None
    vllm_request: Any = None


class Serving:
    """Of one started engine. Used in one event loop."""

    def __init__(self, engine: Any, chat: Any, grammars: Grammars) -> None:
        self._engine = engine
        self.chat = chat
        self.grammars = grammars
        self._context_length: int = engine.model_config.max_model_len
        self._text: Any = None
        self._known: dict[tuple[Any, ...], Any] = {}  # vLLM's requests to its core, by what was asked for
        self._aborts: set[asyncio.Task[None]] = set()
        self._text_state = text_state() if compat.fits("text steps") else None

    async def prepare(self) -> None:
        """Check whether short conversations can be rendered by `TextPrompts`."""
        parser = self.chat.parser_cls
        if parser is not None and (parser.always_adjust_request or parser.reasoning_parser_cls is not None):
            return  # it has a say in requests without tools, too
        self._text = await self._text_prompts() if compat.fits("text prompts") else None

    async def _text_prompts(self) -> Any:
        from engine.backends.vllm.request import TextPrompts

        trials = [_trial(*_TRIALS[:1]), _trial(*_TRIALS[1:3]), _trial(*_TRIALS[2:]), _trial(*_TRIALS)]
        requests = [
            translate(trial, stream=False, context_length=self._context_length, max_output_tokens=None)
            for trial in trials
        ]
        text = TextPrompts.of(self.chat, requests[0])
        return text if text is not None and await text.agrees_with(self.chat, requests) else None

    def needs_parser(self, request: ChatRequest) -> bool:
        """Whether the answer may hold more than text: tool calls or reasoning."""
        return self.chat.parser_cls is not None and (bool(request.tools) or self._reasons)

    @property
    def _reasons(self) -> bool:
        return bool(self.chat.parser_cls is not None and self.chat.parser_cls.reasoning_parser_cls is not None)

    def render_text(self, request: ChatRequest, max_tokens: int | None) -> Prompt | None:
        """Return the prompt of a request for one answer of plain text; None: `render` has to.

        `max_tokens` of the answer; None: as many as fit.
        """
        if (
            self._text is None
            or request.n != 1
            or request.tools
            or request.response_format is not None
            or request.logprobs
            or request.reasoning_effort is not None
            or request.chat_template_kwargs
            or request.continue_answer
        ):
            return None
        token_ids = self._text.token_ids(request.messages)
        if not token_ids or len(token_ids) + (1 if max_tokens is None else max_tokens) > self._context_length:
            return None  # `render` says what is wrong
        return Prompt(request, token_ids, max_tokens)

    async def render(self, request: ChatRequest, vllm_request: Any) -> Prompt:
        """Render, tokenise and check the context. `vllm_request` is the request as `translate` makes it.

        What the answer has to satisfy is compiled outside the engine first: the request's owner pays for it.
        """
        await self.grammars.bind_format(vllm_request, request.owner)
        inputs = await self._rendered(vllm_request)
        vllm_request.messages.clear()  # pixels must live neither while it waits nor while it runs
        await self.grammars.bind_tools(vllm_request, request.owner)
        return Prompt(request, inputs["prompt_token_ids"], vllm_request.max_completion_tokens, inputs, vllm_request)

    async def count_prompt(self, vllm_request: Any) -> int:
        """Render and tokenise for the number alone."""
        vllm_request.response_format = None  # no part of the prompt, and vLLM would compile it
        # Past the cache of pictures: its other half, in the engine, would never hear of these.
        inputs = await self._rendered(vllm_request, skip_mm_cache=True)
        return len(inputs["prompt_token_ids"])

    async def _rendered(self, vllm_request: Any, **options: Any) -> Any:
        with translated_template_errors():
            _, (inputs,) = await self.chat.online_renderer.render_chat(vllm_request, **options)
        check_context(len(inputs["prompt_token_ids"]), vllm_request.max_completion_tokens, self._context_length)
        return inputs

    async def submit(self, prompt: Prompt, stream: TokenStream, translated: Callable[[Exception], Exception]) -> None:
        """Give a rendered request to the engine; its steps go into `stream`. `translated` converts vLLM's errors."""
        if prompt.vllm_request is None:
            core = self._like(prompt.request)
            core.prompt_token_ids = prompt.token_ids
            core.arrival_time = time.time()
            core.cache_salt = prompt.request.cache_salt
            core.priority = int(prompt.request.urgency)  # the lower number goes first
            core.sampling_params.max_tokens = self._longest(prompt)
            convert = ChatOutputs(self.chat, prompt.request, None, count_reasoning=False).step
        else:
            core, convert = self._core_request(prompt)
        await self.start(core, Collector(stream, convert, translated), stream, text=prompt.vllm_request is None)

    def core_of_text(self, request: TextRequest, vllm_request: Any, inputs: Any, max_tokens: int, position: int) -> Any:
        """Return vLLM's request to its core for one prompt of several. `vllm_request` is its completion request."""
        parameters = vllm_request.to_sampling_params(max_tokens, self.chat.default_sampling_params)
        core = self._engine.input_processor.process_inputs(
            f"cmpl-{request.request_id}-{position}", inputs, parameters, ("generate",), priority=int(request.urgency)
        )
        core.external_req_id = core.request_id
        return core

    async def start(self, core: Any, collector: Collector, stream: TokenStream, *, text: bool = False) -> None:
        """Give vLLM's core what `AsyncLLM.add_request` would; outputs go into `collector`.

        `text`: one answer of plain text.
        """
        engine, parameters = self._engine, core.sampling_params
        if engine.errored:
            raise EngineDeadError
        if parameters.n == 1:
            children, parent = [core], None
        else:
            parent, children = ParentRequest(core), []
            for index in range(parameters.n):
                child = copy.copy(core)
                child.request_id, child.sampling_params = parent.get_child_info(index)
                children.append(child)
        request_id = core.request_id
        stream.abort = lambda: self.abort([request_id])  # without `core`, which holds pictures
        try:
            for index, child in enumerate(children):
                engine.output_processor.add_request(child, None, parent, index, collector)
            if text and self._text_state is not None:
                engine.output_processor.request_states[core.request_id].__class__ = self._text_state
            for child in children:
                await engine.engine_core.add_request_async(child)
            if stream.finished and len(children) > 1:  # the first has failed while others were sent
                self.abort_in_core([child.request_id for child in children])
        except BaseException:
            self.abort([core.request_id])
            raise

    def abort(self, request_ids: list[str]) -> asyncio.Future[None]:
        """Have vLLM forget requests; does nothing for those that have ended."""
        return self._in_background(self._engine.abort(request_ids, internal=True))

    def abort_in_core(self, request_ids: list[str]) -> asyncio.Future[None]:
        """End requests that vLLM's output processor has forgotten and that were sent to its core all the same."""
        return self._in_background(self._engine.engine_core.abort_requests_async(request_ids))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return task

    def _core_request(self, prompt: Prompt) -> tuple[Any, Any]:
        """Return vLLM's request to its core, and what makes steps of its outputs."""
        chat, vllm_request, request = self.chat, prompt.vllm_request, prompt.request
        core = self._processed(request, vllm_request, prompt.inputs, self._longest(prompt))
        if not self.needs_parser(request):
            return core, ChatOutputs(chat, vllm_request, None, count_reasoning=False).step
        kwargs = chat._effective_chat_template_kwargs(vllm_request)  # noqa: SLF001  # vLLM offers no other
        tokenizer = chat.renderer.tokenizer
        parsers = [
            CallStream(chat._make_parser(vllm_request, tokenizer, kwargs), vllm_request, tokenizer)  # noqa: SLF001
            for _ in range(request.n)
        ]
        reasoning = chat._engine_reasoning_kwargs(vllm_request, parsers[0].parser, kwargs, prompt.token_ids)  # noqa: SLF001
        core.reasoning_ended = reasoning["reasoning_ended"]
        core.reasoning_parser_kwargs = reasoning["reasoning_parser_kwargs"]
        return core, ChatOutputs(chat, vllm_request, parsers, count_reasoning=self._reasons).step

    def _like(self, request: ChatRequest) -> Any:
        """Return a copy of what vLLM made once of a plain request that differs in nothing but its prompt."""
        key = (
            request.temperature,
            request.top_p,
            request.top_k,
            request.stop,
            request.presence_penalty,
            request.frequency_penalty,
            request.ignore_eos,
            request.whole,
        )
        made = self._known.get(key)
        if made is None or request.seed is not None or request.logit_bias is not None:
            vllm_request = translate(
                request, stream=not request.whole, context_length=self._context_length, max_output_tokens=1
            )
            made = self._processed(request, vllm_request, tokens_input([0]), 1)
            if request.seed is None and request.logit_bias is None:
                if len(self._known) == _REMEMBERED:
                    del self._known[next(iter(self._known))]
                self._known[key] = made
        core = copy.copy(made)
        core.request_id = core.external_req_id = f"chatcmpl-{request.request_id}"
        core.sampling_params = copy.copy(made.sampling_params)
        return core

    def _processed(self, request: ChatRequest, vllm_request: Any, inputs: Any, max_tokens: int) -> Any:
        parameters = vllm_request.to_sampling_params(max_tokens, self.chat.default_sampling_params)
        core = self._engine.input_processor.process_inputs(
            f"chatcmpl-{request.request_id}", inputs, parameters, ("generate",), priority=int(request.urgency)
        )
        core.external_req_id = core.request_id  # ours are random already
        return core

    def _longest(self, prompt: Prompt) -> int:
        longest: int = get_max_tokens(
            self._context_length,
            prompt.max_tokens,
            len(prompt.token_ids),
            self.chat.default_sampling_params,
            self.chat.override_max_tokens,
        )
        return longest


def _trial(*messages: tuple[str, str]) -> ChatRequest:
    return ChatRequest(
        request_id="trial", model="", messages=[{"role": role, "content": content} for role, content in messages]
    )
