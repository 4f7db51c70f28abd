"""What the lead does for one front: it runs the front's calls of the engine, and the HTTP requests left to it.

Every call ends when its front says so, or ends itself. Limits, fair shares and books are those of the whole server.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from engine import ChatRequest, TextRequest, Urgency
from server.access_log import RequestRecord
from server.crowd import crowded
from server.errors import to_api_error
from server.front.lead_requests import LeadRequest
from server.front.messages import (
    Body,
    Call,
    Cancel,
    Counted,
    End,
    Ended,
    Failed,
    Gone,
    Headers,
    PassedOn,
    Request,
    Result,
    Taken,
    ToFront,
    ToLead,
    unsayable,
)
from server.front.step_window import StepWindow
from server.store import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from server.app import HearthApp
    from server.front.messages import Asker
    from server.metering import MeteredEngine

_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


class _HeadersOfCall(dict[str, str]):
    """The headers of a record, which the front is told of as soon as they are known."""

    def __init__(self, call: int, say: Callable[[ToFront], None]) -> None:
        super().__init__()
        self._call = call
        self._say = say

    def update(self, headers: dict[str, str]) -> None:  # type: ignore[override]  # the one way in which they are set
        """Add headers."""
        super().update(headers)
        if headers:
            self._say(Headers(self._call, headers))


class FrontCalls:
    """Of one front, as long as it is connected. `say` sends it a message."""

    def __init__(self, app: HearthApp, say: Callable[[ToFront], None]) -> None:
        self._app = app
        self._say = say
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[int, LeadRequest] = {}
        self._windows: dict[int, StepWindow] = {}

    def on_message(self, message: ToLead) -> None:
        """Take what is about calls and requests."""
        if isinstance(message, Taken | Body | Gone):
            if (request := self._requests.get(message.call)) is not None:
                request.on_message(message)
        elif isinstance(message, PassedOn):
            if (window := self._windows.get(message.call)) is not None:
                window.passed_on(message.steps)
        elif isinstance(message, Call):
            self._begin(message.call, self._answer(message))
        elif isinstance(message, Request):
            self._requests[message.call] = request = LeadRequest(self._app, message, self._say)
            self._begin(message.call, request.run())
        elif isinstance(message, Ended):
            self._app.state.access_log.append(message.record)
            self._app.state.metrics.finished(message.record)
        elif isinstance(message, Cancel) and (task := self._tasks.get(message.call)) is not None:
            task.cancel()

    def instead(self, message: ToFront) -> ToFront | None:
        """End the call of which something cannot be said."""
        call: int | None = getattr(message, "call", None)
        if call is None:
            return None
        if (task := self._tasks.get(call)) is not None:
            task.cancel()
        return unsayable(call)

    def on_lost(self) -> None:
        """The front is gone: nobody waits for any of this."""
        for task in self._tasks.values():
            task.cancel()

    def _begin(self, call: int, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[call] = task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._forget(call))

    def _forget(self, call: int) -> None:
        self._tasks.pop(call, None)
        self._requests.pop(call, None)
        self._windows.pop(call, None)

    async def _answer(self, call: Call) -> None:
        state = self._app.state
        record = RequestRecord("", "POST", None, headers=_HeadersOfCall(call.call, self._say))
        running, owner = state.crowd, call.asker.public_id
        try:
            if running.has_share(owner, state.settings.max_running_requests):
                raise crowded()  # noqa: TRY301  # one way for all that can go wrong
            with running.one_more(owner), state.drain.request():
                await self._run(call, state.engine_for(_key(call.asker), record, kind=call.kind))
        except Exception as error:  # noqa: BLE001  # whatever it is, the front tells the client
            failed = to_api_error(error)
            self._say(
                Failed(call.call, failed.status, failed.code, failed.message, failed.type, failed.param, failed.headers)
            )

    async def _run(self, call: Call, engine: MeteredEngine) -> None:
        self._windows[call.call] = window = StepWindow(call.call, self._say)
        if call.method in {"text", "text_stream"}:
            text = _text_request(call.request)
            if call.method == "text":
                self._say(Result(call.call, await engine.text(text)))
                return
            stream = engine.text_stream(text)
        else:
            chat = _chat_request(call.request)
            if call.method == "count_tokens":
                self._say(Counted(call.call, await engine.count_tokens(chat)))
                return
            if call.method == "chat":
                self._say(Result(call.call, await engine.chat(chat)))
                return
            stream = engine.chat_stream(replace(chat, on_step=window.offer))
        async with aclosing(stream) as steps:
            async for step in steps:
                window.say(step)
                await window.room()
        self._say(End(call.call))


def _key(asker: Asker) -> ApiKey:
    """Return the key as far as limits and books look at it."""
    return ApiKey(
        public_id=asker.public_id,
        name="",
        tier=asker.tier,
        scopes=frozenset(),
        models=None,
        created_at=_LONG_AGO,
        limits=asker.limits,
    )


def _chat_request(fields: dict[str, Any]) -> ChatRequest:
    return ChatRequest(**_known(fields))


def _text_request(fields: dict[str, Any]) -> TextRequest:
    prompts = tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in fields["prompts"])
    return TextRequest(**_known(fields) | {"prompts": prompts})


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    """Put right what travels as another type."""
    return fields | {"stop": tuple(fields["stop"]), "urgency": Urgency(fields["urgency"])}
