"""Translates what vLLM returns: outputs into steps of a `TokenStream`, exceptions into our errors, counts into metrics.

vLLM puts each output into our `Collector` as soon as it is decoded, unless the next one is there already: these are
joined. For answers of text only, the two objects that vLLM makes per token (forty fields) are left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Count
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.exceptions import GenerationError as VllmGenerationError
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from engine.backends.vllm import compat
from engine.backends.vllm.grammars import invalid_schema
from engine.backends.vllm.request import PromptField, prompt_too_long
from engine.backends.vllm.tool_calls import CallStream
from engine.errors import EngineError, GenerationError, RequestError, engine_died
from engine.stream import TokenStream
from engine.types import ChatDelta, ChatStep, Prompt, PromptToken, TextRequest, TokenLogprob, Usage

_TOKENS_OF_A_WHOLE = 16  # that parsers get at once of an answer which is not streamed
_LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM's server writes the same
_PROMPT_PARAMETERS = {"input_tokens", "input_text", "prompt"}
_OUR_FIELDS = (
    *("temperature", "top_p", "logprobs", "top_logprobs", "logit_bias", "max_tokens", "messages", "tools"),
    *("tool_choice", "reasoning_effort", "response_format", "seed", "stop", "n"),
)
# vLLM's parameter -> the client's field. Others are not named: they may not be fields of ours.
_FIELDS = {name: name for name in _OUR_FIELDS} | {
    "chat_template": "messages",
    "tool_calls": "messages",
    "max_completion_tokens": "max_tokens",
    "structured_outputs": "response_format",
}


@dataclass(frozen=True, slots=True)
class TranslatedErrors:
    """`with`: turns vLLM's exceptions into `EngineError`s. Others pass through: they are our bugs.

    Their texts may hold parts of a prompt or paths, and are not passed on. `grammar_field` is the field with the
    request's JSON schemas: vLLM does not say which one it refuses.
    """

    context_length: int
    grammar_field: str | None
    prompt_field: PromptField = "messages"

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and (ours := self.translated(error)) is not error:
            raise ours

    def translated(self, error: Exception) -> Exception:
        """Return our error, or `error` itself if it is not vLLM's."""
        ours: EngineError
        match error:
            case EngineDeadError():
                ours = engine_died()
            case VLLMClientError():
                ours = self._refusal(error)
            case VllmGenerationError() | EngineGenerateError():
                ours = _given_up()
            case _:
                return error
        ours.__cause__ = error
        return ours

    def _refusal(self, error: VLLMClientError) -> RequestError:
        parameter = error.parameter if isinstance(error, VLLMValidationError) else None
        if parameter in _PROMPT_PARAMETERS:
            tokens = f"more than that: at least {self.context_length + 1} tokens"
            return prompt_too_long(tokens, self.context_length, self.prompt_field)
        if parameter is None and self.grammar_field is not None:
            return invalid_schema(self.grammar_field)
        name = _FIELDS.get(parameter or "")
        if name is None:
            return RequestError("The model cannot work with this request. Check its fields against the API page.")
        return RequestError(
            f"The model cannot work with this value of `{name}`. Check it against the API page.", param=name
        )


def _given_up() -> GenerationError:
    return GenerationError("The model gave up on this answer. Send the request again.")


@dataclass(slots=True, eq=False)
class Collector:
    """Replaces vLLM's `RequestOutputCollector` for one request to its core, or for all `n` of one prompt."""

    stream: TokenStream
    convert: Callable[[Any], ChatStep]
    """Returns a step for vLLM's `RequestOutput`."""
    translate: Callable[[Exception], Exception]
    """Returns our error for vLLM's."""
    on_finish: Callable[[], None]
    """Called after the last output."""

    def put(self, output: Any) -> None:
        """Take an output, or the error that ended the request. Raises nothing: vLLM's loop serves others too."""
        if isinstance(output, Exception):
            error = self.translate(output)
            self.stream.finish(error if isinstance(error, EngineError) else _given_up())
            return
        try:
            step = self.convert(output)
        except Exception as error:  # noqa: BLE001  # a parser's: ends this request only
            self.stream.fail(self.translate(error))
            return
        self.stream.put(step)
        if output.finished:
            self.on_finish()

    def put_last(self, delta: ChatDelta, usage: Usage, reason: str, stop_reason: int | str | None) -> None:
        try:
            _finish(delta, reason, stop_reason)
        except GenerationError as error:
            self.stream.finish(error)
            return
        self.stream.put(ChatStep((delta,), usage))
        self.on_finish()


@dataclass(frozen=True, slots=True)
class States:
    """Classes that take the place of vLLM's `RequestState`; steps whose successors are there already join these.

    So a server that is behind its engine has less to do, until it is not. vLLM's own server does so, too.
    """

    text: Any
    """For one answer of plain text, which puts its steps into our `Collector` itself."""
    joined: Any
    whole: Any
    """For an answer that is parsed and not streamed: its steps are many tokens long."""


def request_states(steps_behind: Callable[[], int]) -> States:
    """Return the classes of one engine. `steps_behind`: how many more of its steps are there already."""
    from vllm.v1.engine.output_processor import RequestState

    streams = RequestOutputKind.DELTA

    class TextState(RequestState):  # type: ignore[misc]
        def make_request_output(
            self,
            new_token_ids: list[int],  # noqa: ARG002  # vLLM's signature
            pooling_output: Any,  # noqa: ARG002
            finish_reason: VllmFinishReason | None,
            stop_reason: int | str | None,
            *_: Any,
            **__: Any,
        ) -> None:
            """Put the step into our `Collector`, and return nothing for vLLM to queue."""
            streamed = self.output_kind is streams
            if finish_reason is None and (not streamed or steps_behind()):
                return
            tokens = self.detokenizer
            delta = ChatDelta(0, tokens.get_next_output_text(finish_reason is not None, streamed))
            usage = Usage(self.prompt_len, tokens.num_output_tokens(), self.num_cached_tokens)
            if finish_reason is None:
                self.queue.stream.put(ChatStep((delta,), usage))
            else:
                self.queue.put_last(delta, usage, str(finish_reason), stop_reason)

        def track_weight_version(self, weight_version: str) -> None:
            """Weights do not change while a model is loaded."""

    class JoinedState(RequestState):  # type: ignore[misc]
        fewest_tokens = 1
        held: Sequence[int] = ()

        def make_request_output(
            self,
            new_token_ids: list[int],
            pooling_output: Any,
            finish_reason: VllmFinishReason | None,
            *others: Any,
            **named: Any,
        ) -> Any:
            if self.output_kind is streams:
                new_token_ids = [*self.held, *new_token_ids]
                self.held = ()
                if finish_reason is None and (len(new_token_ids) < self.fewest_tokens or steps_behind()):
                    self.held = new_token_ids
                    return None
            return super().make_request_output(new_token_ids, pooling_output, finish_reason, *others, **named)

    class WholeState(JoinedState):
        fewest_tokens = _TOKENS_OF_A_WHOLE

    return States(TextState, JoinedState, WholeState)


class ChatOutputs:
    """Turns vLLM's outputs of a chat request (vLLM's) into steps. `parsers`: one per choice; None: all is text.

    `grammar_field`, for errors, is the field with the grammar; None: there is none, or the tools make it.
    """

    def __init__(
        self,
        chat: Any,
        request: Any,
        parsers: list[CallStream] | None = None,
        *,
        count_reasoning: bool = False,
        grammar_field: str | None = None,
    ) -> None:
        self._chat = chat
        self._request = request
        self._count_reasoning = count_reasoning
        self._grammar_field = grammar_field
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
        request = self._request
        if piece.finish_reason == "error" and self._grammar_field is not None:
            raise invalid_schema(self._grammar_field)
        delta = _delta(self._chat, piece, piece.index, request.top_logprobs if request.logprobs else None)
        choice.completion_tokens += len(piece.token_ids)
        choice.finished = piece.finish_reason is not None
        if choice.parsed is not None:
            self._parse(output, piece, choice, choice.parsed, delta)
            if delta.finish_reason == "stop" and choice.parsed.calls and isinstance(request.tool_choice, str):
                delta.finish_reason = "tool_calls"
        return delta

    def _parse(self, output: Any, piece: Any, choice: _Choice, parsed: CallStream, delta: ChatDelta) -> None:
        delta.content, delta.reasoning, calls = parsed.feed(
            piece.text, list(piece.token_ids), output.prompt_token_ids, piece.finish_reason
        )
        parallel = self._request.parallel_tool_calls
        delta.tool_calls = tuple(call for call in calls if parallel or call.index == 0)
        if self._count_reasoning:
            choice.token_ids += piece.token_ids
            if delta.reasoning:
                # While it reasons, those are all so far.
                choice.reasoning_tokens = choice.completion_tokens - _behind_reasoning(parsed.parser, piece.token_ids)
            if choice.finished and choice.reasoning_tokens:
                # If the prompt begins the reasoning, the parser finds none: then it is all before the answer.
                counted = parsed.parser.count_reasoning_tokens(tuple(choice.token_ids))
                choice.reasoning_tokens = counted or choice.reasoning_tokens


def _behind_reasoning(parser: Any, token_ids: Sequence[int]) -> int:
    """Return how many of a step's tokens are no reasoning, from the mark on that ends it."""
    if len(token_ids) == 1 or not parser.is_reasoning_end(token_ids):
        return 0
    counts = range(1, len(token_ids))
    return next((count for count in counts if not parser.is_reasoning_end(token_ids[:-count])), len(token_ids))


@dataclass(slots=True)
class _Choice:
    parsed: CallStream | None
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False


class TextOutputs:
    """Turns vLLM's outputs of all prompts of a text request into the steps of one stream, and ends it with the last."""

    def __init__(self, chat: Any, request: TextRequest, prompt_tokens: int, stream: TokenStream) -> None:
        self._chat = chat
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._stream = stream
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}
        self._running = len(request.prompts)
        self._begun: set[int] = set()  # choices that have their prompt

    def step(self, position: int, output: Any) -> ChatStep:
        """Return what is new of the prompt at `position`. Raises `GenerationError`."""
        self._cached[position] = output.num_cached_tokens or 0
        first, top_logprobs = position * self._request.n, self._request.top_logprobs
        deltas = tuple(_delta(self._chat, piece, first + piece.index, top_logprobs) for piece in output.outputs)
        if self._request.max_tokens == 0:  # vLLM makes one anyway
            for delta in deltas:
                delta.content, delta.logprobs, delta.finish_reason, delta.stop_text = "", None, "length", None
        else:
            self._completion_tokens += sum(len(piece.token_ids) for piece in output.outputs)
        if self._request.echo or self._request.prompt_logprobs is not None:
            self._add_prompts(deltas, position, output)
        usage = Usage(self._prompt_tokens, self._completion_tokens, cached_tokens=sum(self._cached.values()))
        return ChatStep(deltas, usage)

    def _add_prompts(self, deltas: tuple[ChatDelta, ...], position: int, output: Any) -> None:
        for delta in deltas:
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                delta.prompt = self._prompt(self._request.prompts[position], output)

    def _prompt(self, sent: str | tuple[int, ...], output: Any) -> Prompt:
        tokenizer = self._chat.renderer.tokenizer
        text = sent if isinstance(sent, str) else tokenizer.decode(list(sent))
        most = self._request.prompt_logprobs
        if most is None or not output.prompt_logprobs:
            return Prompt(text)
        tokens = [
            _prompt_token(token, found, tokenizer, most)
            for token, found in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        ]
        return Prompt(text, tuple(tokens))

    def finished(self) -> None:
        self._running -= 1
        if not self._running:
            self._stream.finish()


def _delta(chat: Any, piece: Any, index: int, top_logprobs: int | None) -> ChatDelta:
    """Return what `piece`, one of vLLM's outputs, adds to an answer. `top_logprobs` None: no probabilities."""
    delta = ChatDelta(index, piece.text)
    if top_logprobs is not None and piece.logprobs is not None:
        made = chat._create_chat_logprobs(  # noqa: SLF001  # vLLM offers no other
            token_ids=piece.token_ids,
            top_logprobs=piece.logprobs,
            tokenizer=chat.renderer.tokenizer,
            num_output_top_logprobs=top_logprobs,
        )
        delta.logprobs = tuple(_logprob(each, tuple(map(_logprob, each.top_logprobs))) for each in made.content or ())
    if piece.finish_reason is not None:
        _finish(delta, piece.finish_reason, piece.stop_reason)
    return delta


def _prompt_token(token: int, found: Any, tokenizer: Any, most: int) -> PromptToken:
    """`found` is vLLM's: the likeliest tokens at its place and itself, by id; None for the first token."""
    if found is None:
        return PromptToken(token, tokenizer.decode([token]))
    entries = sorted(found.items(), key=lambda entry: entry[1].rank or 0)
    top = tuple(
        (each, logprob.decoded_token or "", max(logprob.logprob, _LEAST_LOGPROB), logprob.rank or 0)
        for each, logprob in entries
        if each == token or (logprob.rank or 0) <= most
    )
    own = next(entry for entry in top if entry[0] == token)
    return PromptToken(token, own[1], own[2], top)


def _finish(delta: ChatDelta, reason: str, stop_reason: int | str | None) -> None:
    """Set the OpenAI finish reason of the last delta. Raises `GenerationError` for `abort` and `error`."""
    if reason not in {"stop", "length", "repetition"}:
        raise _given_up()
    delta.finish_reason = "length" if reason == "length" else "stop"
    delta.stop_text = stop_reason if isinstance(stop_reason, str) else None  # a stop token has a number there


def _logprob(entry: Any, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(entry.token, entry.logprob, None if entry.bytes is None else tuple(entry.bytes), top)


def stat_logger_into(registry: CollectorRegistry | None) -> type[Any]:
    """Return vLLM's logger of its own metrics, which writes into `registry` and ends with it.

    vLLM itself registers them for the whole process, and thereby drops those of other engines.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.perf import PerfMetricsProm
    from vllm.v1.spec_decode.metrics import SpecDecodingProm

    def ours(theirs: type[Any], **names: Any) -> type[Any]:
        return type(theirs.__name__, (theirs,), names)

    # Static: Python 3.14 binds a `partial` to the object like a method
    counter, gauge, histogram = (staticmethod(partial(each, registry=registry)) for each in (Counter, Gauge, Histogram))
    logger = ours(
        PrometheusStatLogger,
        _gauge_cls=gauge,
        _counter_cls=counter,
        _histogram_cls=histogram,
        _spec_decoding_cls=ours(SpecDecodingProm, _counter_cls=counter),
        _perf_metrics_cls=ours(PerfMetricsProm, _counter_cls=counter),
    )
    if compat.fits("latencies"):
        logger.record = _record_latencies_at_once(logger.record)
    return logger


def _record_latencies_at_once(record: Callable[..., None]) -> Callable[..., None]:
    """Sort the times between tokens into buckets once per step: token by token took a tenth of all API time."""

    def recorded(
        logger: Any, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if iteration_stats is not None:
            seconds, iteration_stats.inter_token_latencies_iter = iteration_stats.inter_token_latencies_iter, []
            histogram = logger.histogram_inter_token_latency[engine_idx]
            places = map(partial(bisect_left, histogram._upper_bounds), seconds)  # noqa: SLF001
            for place, tokens in Count(places).items():
                histogram._buckets[place].inc(tokens)  # noqa: SLF001
            histogram._sum.inc(sum(seconds))  # noqa: SLF001
        record(logger, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    return recorded
