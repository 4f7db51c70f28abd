"""What can go wrong in the engine.

`RequestError` and `UnknownModelError` are the caller's fault; `StartError`, `LoadError` with `ConfigError`
(engine/config), and `WeightsError` the operator's; after all others the same request may work later. Messages are ours:
no prompt, no text of a lower library, whose error is kept as `__cause__`. Those of the operator's errors may name
files; the others may be shown to clients.
"""

from typing import Any


class EngineError(Exception):
    """Any failure that the engine reports."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error with its fields, without its cause: Python would call `__init__` with the message only."""
        return _restored, (type(self), vars(self))


def _restored(kind: type[EngineError], fields: dict[str, Any]) -> EngineError:
    error = kind.__new__(kind, fields["message"])
    vars(error).update(fields)
    return error


class RequestError(EngineError):
    """The request can never work as it is. `param` is the path of the field, like `messages[2].content`."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """Prompt and answer together are longer than the model's context."""


class GrammarTooComplexError(RequestError):
    """A JSON schema takes too long, or too much memory, to compile."""


class UnsupportedCapabilityError(RequestError):
    """The model exists but cannot do what was asked."""


class UnknownModelError(EngineError):
    """No model of that name is configured."""


class OverloadedError(EngineError):
    """The queue is full. `retry_after_seconds` is an estimate; `limit` names what was reached, for the log."""

    def __init__(self, message: str, *, retry_after_seconds: int, limit: str | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.limit = limit


class UnavailableError(EngineError):
    """The model cannot take requests now. `retry_after_seconds` is an estimate, None if waiting is of no use."""

    def __init__(self, message: str, *, retry_after_seconds: int | None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ModelLoadingError(UnavailableError):
    """The model has not been ready yet, or is being loaded again on purpose."""


class EngineDiedError(UnavailableError):
    """The engine process died, before or during this request. It is being restarted."""


class NotStartedError(EngineDiedError):
    """The engine died before this request began: the request can be sent again unchanged."""


class GenerationError(EngineError):
    """The engine could not finish this answer; the next request may succeed."""


class StartError(EngineError):
    """An engine did not start, and may at the next try. The message is the cause in one line, for the operator."""


class LoadError(EngineError):
    """A model cannot be loaded. The message is for the operator and may name files."""


class WeightsError(EngineError):
    """Weights cannot be fetched, checked, copied or removed. The message says what to do, and may name files."""


def engine_died(kind: type[EngineDiedError] = EngineDiedError) -> EngineDiedError:
    """Return the error for a request whose engine process is gone."""
    return kind(
        "The engine of this model stopped unexpectedly and is being restarted. Try again in a few seconds.",
        retry_after_seconds=5,
    )
