"""The one file that binds to vLLM's chat serving classes: rendering, sampling and parsing are theirs, the results ours.

`TypedChat` replaces the two generators that build HTTP answers by ones that yield `ChatStep` and `ChatResult`;
everything before them (templates, tokenising, tool and reasoning parsers, logprobs) is vLLM's.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.renderers.online_renderer import OnlineRenderer

from engine.backends import vllm_compat
from engine.backends.vllm_calls import CallStream, mend
from engine.backends.vllm_errors import check_context, translated_template_errors
from engine.backends.vllm_finish import finish_reason
from engine.errors import RequestError
from engine.types import ChatChoice, ChatDelta, ChatResult, ChatStep, TokenLogprob, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from engine.backends.vllm_grammars import Grammars
    from engine.types import BeforeTurn, FinishReason


def build_chat(
    engine: Any, *, name: str, tool_parser: str | None, reasoning_parser: str | None, grammars: Grammars
) -> TypedChat:
    """Make the serving object of a started `AsyncLLM`. A parser that does not fit the tokenizer raises here."""
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
    vllm_compat.apply("rendering", lambda: _render_here(engine))
    models = OpenAIServingModels(
        engine_client=engine,
        base_model_paths=[BaseModelPath(name=name, model_path=engine.model_config.model)],
        lora_modules=None,
    )
    chat = TypedChat(
        engine_client=engine,
        models=models,
        response_role="assistant",
        online_renderer=renderer,
        **_known(OpenAIServingChat, parsing),
    )
    vllm_compat.apply("tool parsers", lambda: mend(chat.parser_cls))
    chat.grammars = grammars
    # Off: vLLM would parse each grammar once more on the event loop. `grammars` has checked it and chosen the backend.
    if vllm_compat.fits("grammar check"):
        engine.input_processor.structured_outputs_config = None
    return chat


def _render_here(engine: Any) -> None:
    from engine.backends.vllm_rendering import render_short_ones_here

    render_short_ones_here(engine.renderer)


def _known(target: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """Leave out what this version of vLLM does not have yet: its constructors only ever gained arguments."""
    accepted = inspect.signature(target.__init__).parameters  # type: ignore[misc]
    return {name: value for name, value in arguments.items() if name in accepted}


class TypedChat(OpenAIServingChat):  # type: ignore[misc]
    """vLLM's chat serving with typed output. `stream=True` in the request gives an async generator of steps."""

    grammars: Grammars

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sized: dict[str, BeforeTurn] = {}

    async def begin(self, request: Any, sized: BeforeTurn) -> Any:
        """Return vLLM's generator of steps, or the whole answer.

        `sized` is awaited between rendering and starting, with the prompt's tokens and the most that all answers may
        have.
        """
        self._sized[request.request_id] = sized  # vLLM offers nothing else that comes through to where it is needed
        try:
            return await self.create_chat_completion(request)
        finally:
            del self._sized[request.request_id]

    def needs_parser(self, request: Any) -> bool:
        """Whether the answer may hold more than text: tool calls or reasoning."""
        return self.parser_cls is not None and (bool(request.tools) or self._include_reasoning_tokens_details)

    async def render_chat_request(self, request: Any) -> Any:
        """Render and tokenise, then hold prompt and answer to the context: vLLM would cut the answer instead.

        What the answer has to satisfy is compiled outside the engine first: the request's `user` pays for it.
        """
        await self.grammars.bind_format(request, request.user or "")
        with translated_template_errors():
            conversation, inputs = await super().render_chat_request(request)
        for item in inputs:
            check_context(
                self._extract_prompt_len(item),
                request.max_completion_tokens,
                self.model_config.max_model_len,
            )
        await self.grammars.bind_tools(request, request.user or "")
        await self._wait_for_its_turn(request, sum(map(self._extract_prompt_len, inputs)))
        return conversation, inputs

    async def _wait_for_its_turn(self, request: Any, prompt_tokens: int) -> None:
        longest = request.max_completion_tokens
        if longest is None:
            longest = self.model_config.max_model_len - prompt_tokens
        await self._sized[request.request_id](prompt_tokens, longest * request.n)

    async def count_prompt(self, request: Any) -> int:
        """Render and tokenise for the number alone.

        Past the cache of pictures: its other half, in the engine, would never hear of these.
        """
        request.response_format = None  # no part of the prompt, and vLLM would compile it here
        with translated_template_errors():
            _, inputs = await self.online_renderer.render_chat(request, skip_mm_cache=True)
        tokens: int = sum(self._extract_prompt_len(item) for item in inputs)
        check_context(tokens, request.max_completion_tokens, self.model_config.max_model_len)
        return tokens

    async def chat_completion_stream_generator(  # noqa: PLR0913, PLR0917  # vLLM's signature
        self,
        request: Any,
        result_generator: Any,
        request_id: str,  # noqa: ARG002
        model_name: str,  # noqa: ARG002
        conversation: Any,  # noqa: ARG002
        tokenizer: Any,
        request_metadata: Any,  # noqa: ARG002
        chat_template_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> AsyncGenerator[ChatStep, None]:
        """Yield one `ChatStep` per engine step. Closing it aborts the generation."""
        parsed = self.needs_parser(request)
        choices = [
            _Choice(
                CallStream(self._make_parser(request, tokenizer, chat_template_kwargs), request, tokenizer)
                if parsed
                else None
            )
            for _ in range(request.n)
        ]
        try:
            async for output in result_generator:
                deltas = [
                    self._delta(request, output, piece, choices[piece.index], tokenizer)
                    for piece in output.outputs
                    if not choices[piece.index].finished
                ]
                yield ChatStep(tuple(deltas), self._usage(output, choices))
        finally:
            await result_generator.aclose()

    async def chat_completion_full_generator(  # noqa: PLR0913, PLR0917  # vLLM's signature
        self,
        request: Any,
        result_generator: Any,
        request_id: str,  # noqa: ARG002
        model_name: str,  # noqa: ARG002
        conversation: Any,  # noqa: ARG002
        tokenizer: Any,
        request_metadata: Any,  # noqa: ARG002
        **_: Any,
    ) -> ChatResult:
        """Wait for the whole answer. Only for answers that are plain text (`needs_parser` is false)."""
        final: Any = None
        try:
            async for output in result_generator:
                final = output
        finally:
            await result_generator.aclose()
        choices = [_Choice(None) for _ in range(request.n)]
        answers = []
        for piece in final.outputs:
            choice = choices[piece.index]
            choice.completion_tokens = len(piece.token_ids)
            answers.append(
                ChatChoice(
                    index=piece.index,
                    content=piece.text,
                    reasoning="",
                    tool_calls=(),
                    logprobs=self._logprobs(request, piece, tokenizer),
                    finish_reason=_chat_finish_reason(request, piece.finish_reason),
                    stop_text=_stop_text(piece),
                )
            )
        answers.sort(key=lambda answer: answer.index)
        return ChatResult(tuple(answers), self._usage(final, choices))

    def _delta(self, request: Any, output: Any, piece: Any, choice: _Choice, tokenizer: Any) -> ChatDelta:
        choice.completion_tokens += len(piece.token_ids)
        delta = ChatDelta(piece.index)
        if request.logprobs:
            delta.logprobs = self._logprobs(request, piece, tokenizer)
        if choice.parsed is None:
            delta.content = piece.text
        else:
            self._parse(request, output, piece, choice.parsed, delta)
            if self._include_reasoning_tokens_details:
                choice.token_ids += piece.token_ids
                choice.reasoning_tokens = choice.parsed.parser.count_reasoning_tokens(tuple(choice.token_ids))
        if piece.finish_reason is not None:
            choice.finished = True
            delta.finish_reason = _chat_finish_reason(request, piece.finish_reason)
            delta.stop_text = _stop_text(piece)
            named = not isinstance(request.tool_choice, str)
            if delta.finish_reason == "stop" and choice.parsed and choice.parsed.called_tools and not named:
                delta.finish_reason = "tool_calls"
        return delta

    def _parse(self, request: Any, output: Any, piece: Any, parsed: CallStream, delta: ChatDelta) -> None:
        """Run vLLM's parsers over the new text."""
        delta.content, delta.reasoning, calls = parsed.feed(
            piece.text, list(piece.token_ids), output.prompt_token_ids, piece.finish_reason
        )
        delta.tool_calls = tuple(call for call in calls if request.parallel_tool_calls or call.index == 0)

    def _logprobs(self, request: Any, piece: Any, tokenizer: Any) -> tuple[TokenLogprob, ...] | None:
        if not request.logprobs or piece.logprobs is None:
            return None
        return self.token_logprobs(piece, tokenizer, request.top_logprobs)

    def token_logprobs(self, piece: Any, tokenizer: Any, top_logprobs: int) -> tuple[TokenLogprob, ...]:
        """Return the probabilities of the tokens in `piece`, one of vLLM's outputs, and of so many alternatives."""
        made = self._create_chat_logprobs(
            token_ids=piece.token_ids,
            top_logprobs=piece.logprobs,
            tokenizer=tokenizer,
            num_output_top_logprobs=top_logprobs,
        )
        return tuple(
            _logprob(entry, tuple(_logprob(other) for other in entry.top_logprobs)) for entry in made.content or ()
        )

    def _usage(self, output: Any, choices: list[_Choice]) -> Usage:
        reasoning = self._include_reasoning_tokens_details
        return Usage(
            prompt_tokens=len(output.prompt_token_ids or ()),
            completion_tokens=sum([choice.completion_tokens for choice in choices]),
            cached_tokens=output.num_cached_tokens,
            reasoning_tokens=sum(choice.reasoning_tokens for choice in choices) if reasoning else None,
        )


class _Choice:
    """What has been seen of one choice while it streams."""

    __slots__ = ("completion_tokens", "finished", "parsed", "reasoning_tokens", "token_ids")

    def __init__(self, parsed: CallStream | None) -> None:
        self.parsed = parsed
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.token_ids: list[int] = []
        self.finished = False


def _logprob(entry: Any, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(
        token=entry.token,
        logprob=entry.logprob,
        bytes=None if entry.bytes is None else tuple(entry.bytes),
        top=top,
    )


def _stop_text(piece: Any) -> str | None:
    """A stop token has a number there instead."""
    return piece.stop_reason if isinstance(piece.stop_reason, str) else None


def _chat_finish_reason(request: Any, reason: str | None) -> FinishReason:
    if reason == "error" and request.structured_outputs is not None and not request.tools:
        raise RequestError("`response_format` holds a JSON schema that cannot be followed.", param="response_format")
    return finish_reason(reason)
