"""Answers requests on a started vLLM engine: they are rendered, admitted, and given to its core.

Templates, tokenising, sampling parameters and parsers are those of vLLM's serving classes; their HTTP answers are not
used. compat.py lists their private fields.
"""

import asyncio
import copy
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.inputs.engine import tokens_input
from vllm.renderers.chat_utils import ChatTemplateResolutionError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.parallel_sampling import ParentRequest

from engine.admission import SEQUENCE, Admission, ChatTicket, KvGroup, Room
from engine.backends.vllm import compat
from engine.backends.vllm.grammars import FairTurns, Grammars
from engine.backends.vllm.outputs import ChatOutputs, Collector, TextOutputs, TranslatedErrors, request_states
from engine.backends.vllm.processes import StarterThread
from engine.backends.vllm.request import (
    TextPrompts,
    check_context,
    check_probabilities,
    check_tokens,
    render,
    render_texts,
    seed_of_answer,
    translate,
    translate_text,
)
from engine.backends.vllm.tool_calls import CallStream, mend, parsers_to_try, takes_joined_steps
from engine.config import ChatModelSpec
from engine.config.models import ChatEngineSpec
from engine.errors import LoadError, RequestError, UnavailableError
from engine.media import Pictures, image_places
from engine.stream import TokenStream
from engine.types import ChatRequest, TextRequest, Tokenized, Usage

_Request = TypeVar("_Request", ChatRequest, TextRequest)
_NOT_WITH_GUESSES = ("logit_bias", "min_p")

_log = logging.getLogger("hearth.vllm")


def build_serving(
    engine: Any,
    spec: ChatModelSpec,
    grammar_starter: StarterThread,
    pictures: Pictures,
    kv_groups: tuple[KvGroup, ...] = (),
) -> "Serving":
    """Blocking. Build the serving of a started `AsyncLLM`. Raises `LoadError` if a parser does not fit.

    `kv_groups` are those of its KV cache; without them it counts as one group.
    """
    template = str(getattr(engine.renderer.tokenizer, "chat_template", None))
    tried = parsers_to_try(engine.model_config.hf_config.model_type, template, spec)
    errors = []
    for tool_parser, reasoning_parser in tried:
        try:
            chat = _vllm_serving(engine, spec, tool_parser, reasoning_parser)
            break
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            errors.append(error)
    else:
        raise LoadError(
            f"{spec.id}: `tool_parser` {tried[0][0]!r} or `reasoning_parser` {tried[0][1]!r} of its `engine` section "
            "in models.yaml does not fit this model. Name the ones of its family, or leave the lines out: they are "
            "then chosen by what fits."
        ) from errors[0]
    if errors:
        _log.warning(
            "%s: its family's parsers (%s) do not fit its vocabulary; it is served with: %s. `tool_parser` and "
            "`reasoning_parser` of its `engine` in models.yaml name others.",
            *(spec.id, _listed(*tried[0]), _listed(tool_parser, reasoning_parser)),
        )
    compat.apply("tool parsers", lambda: mend(chat.parser_cls))
    # Off: vLLM would parse each grammar once more on the event loop. `grammars` has checked it and chosen the backend.
    if compat.fits("grammar check"):
        engine.input_processor.structured_outputs_config = None
    return Serving(
        engine,
        chat,
        spec.engine,
        Grammars(engine.vllm_config, grammar_starter),
        pictures,
        kv_groups=kv_groups,
        core_waits_for_thoughts=tried[0][1] is not None,  # as in the engine's arguments: `reasoning_parser_in`
    )


def _listed(*parsers: str | None) -> str:
    return ", ".join(filter(None, parsers)) or "none"


def _vllm_serving(engine: Any, spec: ChatModelSpec, tool_parser: str | None, reasoning_parser: str | None) -> Any:
    """Return vLLM's serving; what it raises if a parser does not fit depends on the parser."""
    parsing: dict[str, Any] = {
        "enable_auto_tools": tool_parser is not None,
        "exclude_tools_when_tool_choice_none": True,  # else the model calls them anyway, as raw text
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser or "",
        "tool_strict_level": "parameter",  # arguments always satisfy the schema
        "request_logger": None,
        "chat_template": None,
        "chat_template_content_format": "auto",
    }
    names = [BaseModelPath(name=spec.id, model_path=engine.model_config.model)]
    models = OpenAIServingModels(engine_client=engine, base_model_paths=names, lora_modules=None)
    renderer = OnlineRenderer(model_config=engine.model_config, renderer=engine.renderer, **parsing)
    renderer.warmup()
    return OpenAIServingChat(
        engine_client=engine, models=models, response_role="assistant", online_renderer=renderer, **parsing
    )


class Serving:
    """Answers requests on one started engine. `vllm` is vLLM's own serving of it. Used in one event loop."""

    def __init__(  # noqa: PLR0913  # what `build_serving` has made
        self,
        engine: Any,
        vllm: Any,
        limits: ChatEngineSpec,
        grammars: Grammars,
        pictures: Pictures,
        *,
        kv_groups: tuple[KvGroup, ...],
        core_waits_for_thoughts: bool,
    ) -> None:
        self._engine = engine
        self.vllm = vllm
        self.admission = Admission(_room_of(engine, limits, kv_groups))
        self.grammars = grammars
        # vLLM has one thread for templates and tokenizers, and one for pictures; one more request is ready for each.
        self._renders, self._pictured = FairTurns(2, 1), FairTurns(2, 1)
        self.context_length: int = engine.model_config.max_model_len
        self._limits = limits
        for field in _NOT_WITH_GUESSES if limits.speculative else ():
            vllm.default_sampling_params.pop(field, None)  # of generation_config.json
        self._pictures = pictures
        self.reasons = vllm.parser_cls is not None and vllm.parser_cls.reasoning_parser_cls is not None
        self._core_waits_for_thoughts = core_waits_for_thoughts
        self._text: TextPrompts | None = None
        self.adapters: Mapping[str, Any] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._states = None
        if compat.fits("text steps"):
            self._states = request_states(engine.engine_core.outputs_queue.qsize)

    async def prepare(self) -> None:
        self._text = await TextPrompts.of(self.vllm)

    async def chat(self, request: ChatRequest, stream: TokenStream) -> None:
        """Wait until it is dispatched and give it to the core; steps go into `stream`. Raises `EngineError`s."""
        is_whole = request.whole
        if self.needs_parser(request) or request.logprobs or image_places(request):
            # Whole answers are parsed step by step too: so they agree with streams, and the logprobs of a long answer
            # do not block the event loop for seconds.
            request = replace(request, whole=False)
        self._check_guesses(request)
        request, adapter = self._sampled(request), self._adapter(request)
        errors = TranslatedErrors(self.context_length, _grammar_field(request))
        with ChatTicket(self.admission, request, request.n, stream) as ticket, errors:
            vllm_request, inputs = await self._render(request)
            tokens = len(inputs["prompt_token_ids"])
            longest = self._longest(tokens, request)
            stream.clamped = _is_clamped(longest, request)
            priority = await ticket.enter(tokens, longest * request.n)
            name = f"chatcmpl-{request.request_id}"
            core = self._core_request(name, priority, vllm_request, inputs, longest, adapter)
            outputs, only_text = self._outputs(request, vllm_request, core)
            collector = Collector(stream, outputs.step, errors.translated, stream.finish)
            await self._start([(core, collector)], stream, self._state_class(request, only_text, is_whole))

    async def text(self, request: TextRequest, stream: TokenStream) -> None:
        """Continue plain texts, like `chat`."""
        self._check_guesses(request)
        request, adapter = self._sampled(request), self._adapter(request)
        errors = TranslatedErrors(self.context_length, _grammar_field(request), "prompt")
        sequences = len(request.prompts) * request.n
        with ChatTicket(self.admission, request, sequences, stream) as ticket, errors:
            asked = self._held_to(request)
            async with self._renders.turn(_turn_of(request)):
                inputs = await render_texts(self.vllm, request)
            lengths = [len(each["prompt_token_ids"]) for each in inputs]
            for length in lengths:
                check_context(length, asked, self.context_length, "prompt")
            check_probabilities(sum(lengths), request)
            longest = [self._longest(length, request) for length in lengths]
            stream.clamped = _is_clamped(min(longest), request)
            vllm_request = translate_text(request)
            if request.structured_outputs is not None:
                await self.grammars.bind_outputs(vllm_request, request.structured_outputs, request.owner)
            priority = await ticket.enter(sum(lengths), sum(longest) * request.n)
            outputs = TextOutputs(self.vllm, request, sum(lengths), stream)
            requests = []
            for position, (prompt, tokens) in enumerate(zip(inputs, longest, strict=True)):
                name = f"cmpl-{request.request_id}-{position}"
                own_priority = priority + position * request.n * SEQUENCE
                core = self._core_request(name, own_priority, vllm_request, prompt, tokens, adapter)
                step = partial(outputs.step, position)
                requests.append((core, Collector(stream, step, errors.translated, outputs.finished)))
            await self._start(requests, stream, self._states and self._states.joined)

    @staticmethod
    def is_without_template(error: RequestError) -> bool:
        """Whether a conversation was refused because the model has no chat template at all."""
        return isinstance(error.__cause__, ChatTemplateResolutionError)

    async def token_ids(self, request: ChatRequest) -> list[int]:
        """Return the tokens of the prompt; one that leaves no room for an answer is refused, as in `chat`."""
        with TranslatedErrors(self.context_length, _grammar_field(request)):
            async with self._pictures.decoded(request, most=self._limits.max_images) as seen:
                vllm_request = translate(self._sampled(seen), stream=False)
                vllm_request.response_format = None  # not a part of the prompt, and vLLM would compile it
                ids: list[int] = (await self._inputs(request, vllm_request, None))["prompt_token_ids"]
                return ids

    async def tokenize(self, prompt: ChatRequest | str, *, special_tokens: bool) -> Tokenized:
        """Return the tokens of a conversation or a text, which may be longer than the context."""
        tokenizer = self.vllm.renderer.tokenizer
        if isinstance(prompt, str):
            ids = await asyncio.to_thread(tokenizer.encode, prompt, add_special_tokens=special_tokens)
        else:
            ids = await self.token_ids(prompt)
        return Tokenized(tuple(ids), tuple(tokenizer.convert_ids_to_tokens(ids)), self.context_length)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with special ones. Raises `RequestError` for unknown ids."""
        check_tokens(self.vllm, ids, "tokens")
        text: str = await asyncio.to_thread(self.vllm.renderer.tokenizer.decode, list(ids))
        return text

    def needs_parser(self, request: ChatRequest) -> bool:
        """Whether the answer may hold more than text: tool calls or reasoning."""
        return self.vllm.parser_cls is not None and (bool(request.tools) or self.reasons)

    async def _render(self, request: ChatRequest) -> tuple[Any, Any]:
        """Return vLLM's request, and its inputs to the core. Pixels are freed before it waits for its turn.

        Its grammar is first compiled outside the engine, in the turn of the request's owner.
        """
        asked = self._held_to(request)
        token_ids = self.text_tokens(request)
        if token_ids:
            vllm_request = translate(request, stream=not request.whole)
            inputs = tokens_input(token_ids, cache_salt=request.cache_salt)
            check_context(len(token_ids), asked, self.context_length)
            return vllm_request, inputs
        async with self._pictures.decoded(request, most=self._limits.max_images) as seen:
            vllm_request = translate(seen, stream=not request.whole)
            await self.grammars.bind_format(vllm_request, request.owner)
            if request.structured_outputs is not None:
                await self.grammars.bind_outputs(vllm_request, request.structured_outputs, request.owner)
            inputs = await self._inputs(request, vllm_request, asked)
            vllm_request.messages.clear()
            await self.grammars.bind_tools(vllm_request, request.owner)
            return vllm_request, inputs

    def text_tokens(self, request: ChatRequest) -> list[int] | None:
        """Return the prompt of a short conversation of plain text; None: vLLM has to render it."""
        more = (
            *(request.tools, request.response_format, request.structured_outputs, request.reasoning_effort),
            request.chat_template_kwargs,
        )
        if self._text is None or request.continue_answer or not request.generation_prompt or any(more):
            return None
        return self._text.token_ids(request.messages)

    def _check_guesses(self, request: ChatRequest | TextRequest) -> None:
        """Refuse what vLLM (0.32) cannot do while it guesses tokens: its own error does not name the field."""
        for field in _NOT_WITH_GUESSES if self._limits.speculative else ():
            if getattr(request, field):
                raise RequestError(
                    f"`{field}` cannot be used with this model: it guesses tokens (`speculative` in models.yaml). "
                    "Leave it out, or pick another model.",
                    param=field,
                )

    def _sampled(self, request: _Request) -> _Request:
        """Return the request with a temperature, by default the model's. vLLM fills in all other defaults."""
        if request.temperature is not None:
            return request
        return replace(request, temperature=self.vllm.default_sampling_params.get("temperature", 1.0))

    def _held_to(self, request: ChatRequest | TextRequest) -> int | None:
        """Return how many tokens must fit after the prompt; None if the answer is clamped to what fits."""
        return None if self._limits.clamp_max_tokens else request.max_tokens

    async def _inputs(self, request: ChatRequest, vllm_request: Any, asked: int | None) -> Any:
        turns = self._pictured if image_places(request) else self._renders
        async with turns.turn(_turn_of(request)):  # vLLM gives up on a template that waits for 5 s
            inputs = await render(self.vllm.online_renderer, vllm_request)
        check_context(len(inputs["prompt_token_ids"]), asked, self.context_length)
        return inputs

    def _longest(self, prompt_tokens: int, request: ChatRequest | TextRequest) -> int:
        asked = request.max_tokens if request.max_tokens is None else max(request.max_tokens, 1)
        known = [each for each in (asked, self._limits.max_output_tokens) if each is not None]
        defaults, override = self.vllm.default_sampling_params, self.vllm.override_max_tokens
        return get_max_tokens(self.context_length, min(known, default=None), prompt_tokens, defaults, override)

    def _outputs(self, request: ChatRequest, vllm_request: Any, core: Any) -> tuple[ChatOutputs, bool]:
        """Return what makes steps of vLLM's outputs, and whether these are one answer of nothing but text."""
        field = None if request.tools else _grammar_field(request)
        if not self.needs_parser(request):
            only_text = request.n == 1 and not request.logprobs and vllm_request.structured_outputs is None
            return ChatOutputs(self.vllm, vllm_request, grammar_field=field), only_text
        serving, tokenizer = self.vllm, self.vllm.renderer.tokenizer
        kwargs = serving._effective_chat_template_kwargs(vllm_request)  # noqa: SLF001  # vLLM offers no other
        parsers = [serving._make_parser(vllm_request, tokenizer, kwargs) for _ in range(request.n)]  # noqa: SLF001
        reasoning = serving._engine_reasoning_kwargs(  # noqa: SLF001
            vllm_request, parsers[0], kwargs, core.prompt_token_ids
        )
        core.reasoning_ended = reasoning["reasoning_ended"]
        core.reasoning_parser_kwargs = reasoning["reasoning_parser_kwargs"]
        streams = [CallStream(parser, vllm_request, tokenizer) for parser in parsers]
        return ChatOutputs(serving, vllm_request, streams, count_reasoning=self.reasons, grammar_field=field), False

    def _state_class(self, request: ChatRequest, only_text: bool, is_whole: bool) -> Any:  # noqa: FBT001
        """Return what replaces vLLM's state of a request; None: nothing, as a parser needs each step alone."""
        if self._states is None:
            return None
        if only_text:
            return self._states.text
        kinds = ["reasoning_parser_cls", *(["tool_parser_cls"] if request.tools else [])]
        parsers = [parser for kind in kinds if (parser := getattr(self.vllm.parser_cls, kind, None)) is not None]
        if not all(takes_joined_steps(parser) for parser in parsers):
            return None
        return self._states.whole if is_whole else self._states.joined

    def _adapter(self, request: ChatRequest | TextRequest) -> Any:
        """Return vLLM's request for the requested adapter, if any; a demo has no adapters."""
        if request.adapter is None or not self.adapters:
            return None
        adapter = self.adapters.get(request.adapter)
        if adapter is None:
            raise UnavailableError(
                "This adapter could not be loaded on its base. Ask your administrator: the server's log says why.",
                retry_after_seconds=None,
            )
        return adapter

    def _core_request(  # noqa: PLR0913, PLR0917  # all that vLLM takes of a request
        self, name: str, priority: int, vllm_request: Any, inputs: Any, max_tokens: int, adapter: Any
    ) -> Any:
        parameters = vllm_request.to_sampling_params(max_tokens, self.vllm.default_sampling_params)
        core = self._engine.input_processor.process_inputs(
            name, inputs, parameters, ("generate",), priority=priority, lora_request=adapter
        )
        core.external_req_id = core.request_id  # ours are already random
        if self._core_waits_for_thoughts:
            core.reasoning_ended = True  # by default a grammar holds from the first token on
        return core

    async def _start(self, requests: list[tuple[Any, Collector]], stream: TokenStream, state_class: Any) -> None:
        """Give the core what `AsyncLLM.add_request` would. `state_class`: see `_state_class`."""
        engine = self._engine
        if engine.errored:
            raise EngineDeadError
        request_ids = [core.request_id for core, _ in requests]  # not the cores, which hold pictures
        stream.abort = lambda: self._in_background(engine.abort(request_ids, internal=True))
        try:
            children = [child for core, collector in requests for child in self._registered(core, collector)]
            states = [engine.output_processor.request_states[child.request_id] for child in children]
            if state_class is not None:
                for state in states:
                    state.__class__ = state_class
            if requests[0][0].sampling_params.output_kind is RequestOutputKind.FINAL_ONLY:
                prompt_tokens = sum(len(core.prompt_token_ids) for core, _ in requests)
                stream.so_far = partial(_so_far, prompt_tokens, [state.detokenizer for state in states])
            for child in children:
                await engine.engine_core.add_request_async(child)
            if stream.finished and len(children) > 1:  # the first has failed while others were sent
                self._in_background(engine.abort(request_ids, internal=True))
                # vLLM's output processor may have dropped them before they were sent.
                self._in_background(engine.engine_core.abort_requests_async([child.request_id for child in children]))
        except BaseException:
            self._in_background(engine.abort(request_ids, internal=True))
            raise

    def _registered(self, core: Any, collector: Collector) -> list[Any]:
        """Have vLLM's output processor expect the outputs of a request; return one request for each answer."""
        children, parent = [core], None
        if core.sampling_params.n > 1:
            parent = ParentRequest(core)
            children = [copy.copy(core) for _ in range(core.sampling_params.n)]
        for index, child in enumerate(children):
            if parent is not None:
                child.request_id, child.sampling_params = parent.get_child_info(index)
                if core.sampling_params.seed is not None:  # then it has parameters of its own
                    child.sampling_params.seed = seed_of_answer(core.sampling_params.seed, index)
                child.priority += index * SEQUENCE
            self._engine.output_processor.add_request(child, None, parent, index, collector)
        return children

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Abort requests; ended ones are not affected."""
        task = asyncio.ensure_future(work)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return task


def _so_far(prompt_tokens: int, made: list[Any]) -> Usage:
    """Return what is used by answers that vLLM's detokenizers are making."""
    return Usage(prompt_tokens, sum(each.num_output_tokens() for each in made))


def _turn_of(request: ChatRequest | TextRequest) -> str:
    """Name the owner of a turn: a key's batches do not hold up its other requests."""
    return f"{request.owner} {request.urgency}"


def _is_clamped(longest: int, request: ChatRequest | TextRequest) -> bool:
    return request.max_tokens is not None and longest < request.max_tokens


def _room_of(engine: Any, limits: ChatEngineSpec, groups: tuple[KvGroup, ...]) -> Room:
    cache = engine.vllm_config.cache_config
    blocks = cache.num_gpu_blocks - 1 if cache.num_gpu_blocks else None  # one is never given out
    return Room(
        sequences=limits.max_num_seqs,
        waiting=limits.max_queued_requests,
        kept_for_interactive=limits.places_for_interactive,
        kept_for_newcomers=limits.places_for_newcomers,
        kv_room=blocks,
        kv_groups=groups or (KvGroup(cache.block_size),),
        fair=limits.fair_queue,
    )


def _grammar_field(request: ChatRequest | TextRequest) -> str | None:
    if request.structured_outputs is not None:
        return "structured_outputs"
    if isinstance(request, TextRequest):
        return None
    return "response_format" if request.response_format else "tools" if request.tools else None
