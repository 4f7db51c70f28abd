"""Why an answer ended, in the convention's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from engine.errors import GenerationError

if TYPE_CHECKING:
    from engine.types import FinishReason


def finish_reason(reason: str | None) -> FinishReason:
    """Translate the engine's reason into the convention's; `abort` and `error` are failures, not answers."""
    if reason in {"stop", "length"}:
        return cast("FinishReason", reason)
    if reason == "repetition":
        return "stop"
    raise GenerationError("The model gave up on this answer. Send the request again.")
