"""What vLLM keeps of a request while it runs, and how its outputs reach us, for answers that are nothing but text.

vLLM makes two objects of some forty fields for each token and puts them through a generator; here a token becomes our
own `ChatStep` where vLLM has decoded it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.engine.output_processor import RequestState

from engine.backends.vllm_finish import finish_reason as translated
from engine.errors import GenerationError
from engine.types import ChatDelta, ChatStep, Usage

if TYPE_CHECKING:
    from vllm.v1.engine import FinishReason

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


def register(output_processor: Any, core_request: Any, steps: PlainSteps, *, streamed: bool) -> None:
    """Let vLLM's output processor know the request, and put what comes of it into `steps`."""
    output_processor.add_request(core_request, None, None, 0, steps)
    state = output_processor.request_states[core_request.request_id]
    state.__class__ = _Plain if streamed else _PlainWhole
