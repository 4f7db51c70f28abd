"""The engine as one HTTP request in a front may use it: as metering.py's, which does the work in the lead."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from engine import ChatRequest, TextRequest
from server.errors import ApiError
from server.front.messages import Asker, Call, Counted, Failed, Headers, Method, PassedOn, Result, Step
from server.front.step_window import TOLD_EVERY_STEPS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from engine import ChatResult, ChatStep
    from server.access_log import RequestRecord
    from server.front.lead import Lead, Line
    from server.store import ApiKey

# What the lead adds itself: they are functions.
_OF_THE_LEAD = {"before_turn", "on_turn", "on_step"}
_FIELDS = {
    kind: tuple(field.name for field in fields(kind) if field.name not in _OF_THE_LEAD)
    for kind in (ChatRequest, TextRequest)
}
_Kind = TypeVar("_Kind", Step, Result, Counted)


class RemoteEngine:
    """Made anew for each HTTP request. Raises `ApiError` for whatever goes wrong in the lead."""

    def __init__(self, lead: Lead, key: ApiKey, record: RequestRecord, *, kind: str) -> None:
        self._lead = lead
        self._asker = Asker(key.public_id, key.tier, key.limits)
        self._record = record
        self._kind = kind

    async def chat(self, request: ChatRequest) -> ChatResult:
        """Like `MeteredEngine.chat`."""
        return (await self._one("chat", request, Result)).result

    async def text(self, request: TextRequest) -> ChatResult:
        """Like `MeteredEngine.text`."""
        return (await self._one("text", request, Result)).result

    async def count_tokens(self, request: ChatRequest) -> int:
        """Like `MeteredEngine.count_tokens`."""
        return (await self._one("count_tokens", request, Counted)).tokens

    def chat_stream(self, request: ChatRequest) -> AsyncGenerator[ChatStep, None]:
        """Like `MeteredEngine.chat_stream`."""
        return self._steps("chat_stream", request)

    def text_stream(self, request: TextRequest) -> AsyncGenerator[ChatStep, None]:
        """Like `MeteredEngine.text_stream`."""
        return self._steps("text_stream", request)

    async def _steps(self, method: Method, request: ChatRequest | TextRequest) -> AsyncGenerator[ChatStep, None]:
        async with self._called(method, request) as line:
            passed_on = 0
            while (message := await self._next(line, Step)) is not None:
                yield message.step
                passed_on += 1
                if passed_on == TOLD_EVERY_STEPS:
                    self._lead.say(PassedOn(line.number, passed_on))
                    passed_on = 0

    async def _one(self, method: Method, request: ChatRequest | TextRequest, kind: type[_Kind]) -> _Kind:
        async with self._called(method, request) as line:
            message = await self._next(line, kind)
            assert message is not None  # noqa: S101  # these calls have a result, or fail
            return message

    def _called(self, method: Method, request: ChatRequest | TextRequest) -> Line:
        line = self._lead.line()
        self._lead.say(Call(line.number, method, self._kind, self._asker, _plain(request)))
        return line

    async def _next(self, line: Line, kind: type[_Kind]) -> _Kind | None:
        """Return what comes next, None at the end. Raises `ApiError`."""
        while True:
            message = await line.next()
            if isinstance(message, kind):
                return message
            if isinstance(message, Headers):
                self._record.headers.update(message.headers)
            elif isinstance(message, Failed):
                raise ApiError(
                    message.status,
                    message.code,
                    message.message,
                    type=message.type,
                    param=message.param,
                    headers=message.headers,
                )
            else:
                return None


def _plain(request: ChatRequest | TextRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in _FIELDS[type(request)]}
