"""What vLLM keeps of a request while it runs, and how its outputs reach us, for answers that are nothing but text.

vLLM makes two objects of some forty fields for each token and puts them through a generator; here a token becomes our
own `ChatStep` where vLLM has decoded it, and one that is nothing but one more of a stream passes vLLM's loop by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from engine.backends.vllm_finish import finish_reason as translated
from engine.errors import GenerationError
from engine.types import ChatDelta, ChatStep, Usage

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.metrics.stats import IterationStats

    from engine.backends.plain_steps import PlainSteps


class _Plain(RequestState):  # type: ignore[misc]
    """One choice, no logprobs, no tools."""

    def make_request_output(
        self,
        new_token_ids: list[int],  # noqa: ARG002  # vLLM's signature
        pooling_output: Any,  # noqa: ARG002
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        *_: Any,
        **__: Any,
    ) -> ChatStep | None:
        """Return what vLLM puts into our `PlainSteps` next."""
        text = self.detokenizer.get_next_output_text(finish_reason is not None, True)  # noqa: FBT003
        return self._step(text, finish_reason, stop_reason)

    def track_weight_version(self, weight_version: str) -> None:
        """Weights do not change while a model is loaded."""

    def _step(self, text: str, reason: FinishReason | None, stop_reason: int | str | None) -> ChatStep | None:
        usage = Usage(self.prompt_len, self.detokenizer.num_output_tokens(), self.num_cached_tokens)
        if reason is None:
            return ChatStep((ChatDelta(0, text),), usage)
        try:
            ended = translated(str(reason))
        except GenerationError as error:
            self.queue.put(error)
            return None
        stop_text = stop_reason if isinstance(stop_reason, str) else None
        return ChatStep((ChatDelta(0, text, finish_reason=ended, stop_text=stop_text),), usage)


class _PlainStream(_Plain):
    """The same, told of at each step, and without stop strings: nobody looks back at text that is sent."""

    def take(self, output: EngineCoreOutput, timestamp: float | None, stats: IterationStats | None) -> bool:
        """Do all that vLLM's loop does with a token between the first and the last; False: it is one for that loop.

        Raises what the tokenizer does; what has been done of a token by then cannot be done again.
        """
        if (
            self.is_prefilling
            or output.finish_reason is not None
            or output.events is not None
            or output.num_nans_in_logits
        ):
            return False
        token_ids, detokenizer = output.new_token_ids, self.detokenizer
        known = detokenizer.token_ids
        if stats is not None:
            own = self.stats
            stats.num_generation_tokens += len(token_ids)
            stats.inter_token_latencies_iter.append(timestamp - own.last_token_ts)
            own.num_generation_tokens += len(token_ids)
            own.last_token_ts = timestamp
        text = ""
        for token_id in token_ids:
            known.append(token_id)
            text += detokenizer.decode_next(token_id)
        usage = Usage(self.prompt_len, len(known), self.num_cached_tokens)
        self.queue.put(ChatStep((ChatDelta(0, text),), usage))
        return True


class _PlainWhole(_Plain):
    """The same, told of at the end only."""

    def make_request_output(
        self,
        new_token_ids: list[int],  # noqa: ARG002
        pooling_output: Any,  # noqa: ARG002
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        *_: Any,
        **__: Any,
    ) -> ChatStep | None:
        """Return the whole answer, once there is one."""
        if finish_reason is None:
            return None
        return self._step(self.detokenizer.get_next_output_text(True, False), finish_reason, stop_reason)  # noqa: FBT003


class _Outputs(OutputProcessor):  # type: ignore[misc]
    """vLLM's loop over what a step brought, for all that is more than one more token of a plain stream."""

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        weight_version: str | None = None,
    ) -> Any:
        """Return what vLLM makes of those that are left, and abort those that could not be decoded."""
        states, left, failed = self.request_states, [], []
        for output in engine_core_outputs:
            state = states.get(output.request_id)
            if type(state) is not _PlainStream:
                left.append(output)
                continue
            try:
                if not state.take(output, engine_core_timestamp, iteration_stats):
                    left.append(output)
            except Exception as error:  # noqa: BLE001  # one request ends: raised, it would end vLLM's loop, and so all
                self._finish_request(state)
                state.queue.put(error)
                failed.append(output.request_id)
        done = super().process_outputs(left, engine_core_timestamp, iteration_stats, weight_version)
        done.reqs_to_abort.extend(failed)
        return done


def shorten(output_processor: Any) -> None:
    """Have one more token of a plain stream pass vLLM's loop by."""
    if type(output_processor) is OutputProcessor:
        output_processor.__class__ = _Outputs


def register(output_processor: Any, core_request: Any, steps: PlainSteps, *, streamed: bool) -> None:
    """Let vLLM's output processor know the request, and put what comes of it into `steps`."""
    output_processor.add_request(core_request, None, None, 0, steps)
    state = output_processor.request_states[core_request.request_id]
    detokenizer = state.detokenizer
    if not streamed:
        state.__class__ = _PlainWhole
    elif isinstance(detokenizer, FastIncrementalDetokenizer) and not detokenizer.stop:
        state.__class__ = _PlainStream
    else:
        state.__class__ = _Plain
