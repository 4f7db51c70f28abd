"""The `response` object: what was asked, as far as it was heard, and what came of it. Items come from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import Usage
    from server.schemas.responses import ResponseBody


class ResponseObject:
    """Makes the object of one response in each of its states. `id_` and `created` stay the same."""

    def __init__(self, body: ResponseBody, *, id_: str, created: int) -> None:
        tool_choice = body.tool_choice or "auto"
        form = body.text.format if body.text else None
        self._asked: dict[str, Any] = {
            "id": id_,
            "object": "response",
            "created_at": created,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": body.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
            "tool_choice": tool_choice if isinstance(tool_choice, str) else tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def in_progress(self) -> dict[str, Any]:
        """Return it as it is at the start."""
        return self._state("in_progress", [], None)

    def ended(self, output: list[dict[str, Any]], usage: Usage, cut_off: str | None) -> dict[str, Any]:
        """Return it whole; `cut_off` says why there is not more, if there should have been."""
        details = None if cut_off is None else {"reason": cut_off}
        return self._state("completed" if cut_off is None else "incomplete", output, usage, incomplete_details=details)

    def failed(self, output: list[dict[str, Any]], usage: Usage | None, error: dict[str, Any]) -> dict[str, Any]:
        """Return it as far as it came; `error` is the object that every error of this server has."""
        return self._state("failed", output, usage, error=error)

    def _state(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: Usage | None,
        *,
        error: dict[str, Any] | None = None,
        incomplete_details: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            **self._asked,
            "status": status,
            "error": error,
            "incomplete_details": incomplete_details,
            "output": output,
            "usage": None if usage is None else _usage(usage),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
