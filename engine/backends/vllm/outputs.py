"""From vLLM's outputs to the steps of a `TokenStream`: parsing, probabilities, usage, and why an answer ended.

vLLM puts what a request brought into an object of ours, `Collector`, at the moment at which it has decoded it. For
answers that are nothing but text, vLLM's two objects of forty fields per token are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason as VllmFinishReason

from engine.backends.vllm.tool_calls import CallStream
from engine.errors import EngineError, GenerationError, RequestError
from engine.stream import TokenStream
from engine.types import ChatDelta, ChatStep, FinishReason, TokenLogprob, Usage


def finish_reason(reason: str | None) -> FinishReason:
    """Translate the engine's reason into the convention's; `abort` and `error` are failures, not answers."""
    if reason in {"stop", "length"}:
        return cast("FinishReason", reason)
    if reason == "repetition":
        return "stop"
    raise _given_up()


def _given_up() -> GenerationError:
    return GenerationError("The model gave up on this answer. Send the request again.")


class Collector:
    """Stands where vLLM has its `RequestOutputCollector`: of one request to its core, or of all `n` of one prompt.

    `convert` returns a step for vLLM's `RequestOutput`, `translate` our error for vLLM's. `on_finish` is called after
    the last output; None: the stream is finished.
    """

    __slots__ = ("_convert", "_on_finish", "_stream", "_translate")

    def __init__(
        self,
        stream: TokenStream,
        convert: Callable[[Any], ChatStep],
        translate: Callable[[Exception], Exception],
        on_finish: Callable[[], None] | None = None,
    ) -> None:
        self._stream = stream
        self._convert = convert
        self._translate = translate
        self._on_finish = on_finish or stream.finish

    def put(self, output: Any) -> None:
        """Take an output, a step, or what ended the request. Raises nothing: vLLM's loop serves others, too."""
        if type(output) is ChatStep:
            self._stream.put(output)
            if output.deltas[0].finish_reason is not None:
                self._on_finish()
        elif isinstance(output, Exception):
            error = self._translate(output)
            self._stream.finish(error if isinstance(error, EngineError) else _given_up())
        else:
            self._take(output)

    def _take(self, output: Any) -> None:
        try:
            step = self._convert(output)
        except Exception as error:  # noqa: BLE001  # a parser's: ends this request only
            self._stream.fail(self._translate(error))
            return
        self._stream.put(step)
        if output.finished:
            self._on_finish()


class ChatOutputs:
    """Turns vLLM's outputs of one chat request into steps. `request` is vLLM's; for plain text it may be ours.

    `parsers`: one for each choice, None where an answer is text and nothing else.
    """

    def __init__(self, serving: Any, request: Any, parsers: list[CallStream] | None, *, count_reasoning: bool) -> None:
        self._serving = serving
        self._request = request
        self._count_reasoning = count_reasoning
        self._choices = [_Choice(parsers[index] if parsers else None) for index in range(request.n)]

    def step(self, output: Any) -> ChatStep:
        """Return what is new. Raises `GenerationError` and what parsers raise."""
        deltas = tuple(
            self._delta(output, piece, self._choices[piece.index])
            for piece in output.outputs
            if not self._choices[piece.index].finished
        )
        reasoning = sum(choice.reasoning_tokens for choice in self._choices) if self._count_reasoning else None
        usage = Usage(
            prompt_tokens=len(output.prompt_token_ids or ()),
            completion_tokens=sum([choice.completion_tokens for choice in self._choices]),
            cached_tokens=output.num_cached_tokens,
            reasoning_tokens=reasoning,
        )
        return ChatStep(deltas, usage)

    def _delta(self, output: Any, piece: Any, choice: _Choice) -> ChatDelta:
        request, delta = self._request, ChatDelta(piece.index)
        choice.completion_tokens += len(piece.token_ids)
        if request.logprobs and piece.logprobs is not None:
            delta.logprobs = token_logprobs(self._serving, piece, request.top_logprobs)
        if choice.parsed is None:
            delta.content = piece.text
        else:
            self._parse(output, piece, choice, choice.parsed, delta)
        if piece.finish_reason is not None:
            choice.finished = True
            delta.finish_reason = self._reason(piece.finish_reason)
            delta.stop_text = stop_text(piece)
            named = not isinstance(request.tool_choice, str)
            if delta.finish_reason == "stop" and choice.parsed and choice.parsed.called_tools and not named:
                delta.finish_reason = "tool_calls"
        return delta

    def _parse(self, output: Any, piece: Any, choice: _Choice, parsed: CallStream, delta: ChatDelta) -> None:
        """Run vLLM's parsers over the new text."""
        delta.content, delta.reasoning, calls = parsed.feed(
            piece.text, list(piece.token_ids), output.prompt_token_ids, piece.finish_reason
        )
        parallel = self._request.parallel_tool_calls
        delta.tool_calls = tuple(call for call in calls if parallel or call.index == 0)
        if self._count_reasoning:
            choice.token_ids += piece.token_ids
            self._count(choice, parsed, delta, ended=piece.finish_reason is not None)

    def _count(self, choice: _Choice, parsed: CallStream, delta: ChatDelta, *, ended: bool) -> None:
        """Keep the reasoning tokens.

        While it reasons, those are all so far. The parser, which reads the whole answer for it, counts them when the
        answer proper begins, and at the end.
        """
        if delta.reasoning:
            choice.reasons, choice.reasoning_tokens = True, choice.completion_tokens
        answers = bool(delta.content or delta.tool_calls)
        if choice.reasoning_tokens and (ended or (choice.reasons and answers)):
            choice.reasoning_tokens = parsed.parser.count_reasoning_tokens(tuple(choice.token_ids))
        choice.reasons = choice.reasons and not answers

    def _reason(self, reason: str | None) -> FinishReason:
        structured = getattr(self._request, "structured_outputs", None) is not None
        if reason == "error" and structured and not self._request.tools:
            sentence = "`response_format` holds a JSON schema that cannot be followed."
            raise RequestError(sentence, param="response_format")
        return finish_reason(reason)


class _Choice:
    """What has been seen of one choice."""

    __slots__ = ("completion_tokens", "finished", "parsed", "reasoning_tokens", "reasons", "token_ids")

    def __init__(self, parsed: CallStream | None) -> None:
        self.parsed = parsed
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.reasons = False  # its newest text is reasoning
        self.token_ids: list[int] = []
        self.finished = False


def token_logprobs(serving: Any, piece: Any, top_logprobs: int) -> tuple[TokenLogprob, ...]:
    """Return the probabilities of the tokens in `piece`, one of vLLM's outputs, and of so many alternatives."""
    made = serving._create_chat_logprobs(  # noqa: SLF001  # vLLM offers no other
        token_ids=piece.token_ids,
        top_logprobs=piece.logprobs,
        tokenizer=serving.renderer.tokenizer,
        num_output_top_logprobs=top_logprobs,
    )
    return tuple(
        _logprob(entry, tuple(_logprob(other) for other in entry.top_logprobs)) for entry in made.content or ()
    )


def _logprob(entry: Any, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(
        token=entry.token,
        logprob=entry.logprob,
        bytes=None if entry.bytes is None else tuple(entry.bytes),
        top=top,
    )


def stop_text(piece: Any) -> str | None:
    """Return the stop sequence that ended it; a stop token has a number there instead."""
    return piece.stop_reason if isinstance(piece.stop_reason, str) else None


def text_state() -> Any:
    """Return vLLM's class for the state of a request, for one answer of plain text: it returns our steps."""
    from vllm.v1.engine.output_processor import RequestState

    class TextState(RequestState):  # type: ignore[misc]
        """Returns our step in place of a `RequestOutput`."""

        def make_request_output(
            self,
            new_token_ids: list[int],  # noqa: ARG002  # vLLM's signature
            pooling_output: Any,  # noqa: ARG002
            finish_reason: VllmFinishReason | None,
            stop_reason: int | str | None,
            *_: Any,
            **__: Any,
        ) -> ChatStep | Exception | None:
            """Return what vLLM puts into our `Collector` next."""
            streamed = self.output_kind == RequestOutputKind.DELTA
            if finish_reason is None and not streamed:
                return None
            text = self.detokenizer.get_next_output_text(finish_reason is not None, streamed)
            usage = Usage(self.prompt_len, self.detokenizer.num_output_tokens(), self.num_cached_tokens)
            if finish_reason is None:
                return ChatStep((ChatDelta(0, text),), usage)
            return _last_step(str(finish_reason), stop_reason, text, usage)

        def track_weight_version(self, weight_version: str) -> None:
            """Weights do not change while a model is loaded."""

    return TextState


def _last_step(reason: str, stop_reason: int | str | None, text: str, usage: Usage) -> ChatStep | Exception:
    try:
        ended = finish_reason(reason)
    except GenerationError as error:
        return error
    stopped_by = stop_reason if isinstance(stop_reason, str) else None
    return ChatStep((ChatDelta(0, text, finish_reason=ended, stop_text=stopped_by),), usage)
