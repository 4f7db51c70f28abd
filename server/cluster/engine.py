"""One engine for the app of a replica: it answers the models of its role, and passes the others on to theirs.

`answer` is the other end, in the replica that has the model. Steps are collected there for some milliseconds: a message
costs more than a token.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections import ChainMap
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

from ray import exceptions
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from engine import Config, Engine, EngineError, ModelHealth, ModelInfo, RequestError, UnknownModelError, Voice
from engine.errors import GenerationError, ModelLoadingError, OverloadedError, StartError, UnavailableError, engine_died
from engine.stream import Stream, TokenStream
from engine.types import ANSWERS, ChatRequest
from server.errors import to_api_error
from server.store.database import SideTasks

_T = TypeVar("_T")
_PICKLED = {"request_serialization": "pickle", "response_serialization": "pickle"}  # cloudpickle takes 4 x as long
_MESSAGE_SECONDS = 0.02
_SHORT_SECONDS = 0.01
_SIGN_SECONDS = 5.0  # at least an empty message: a machine without power sends none
_SILENT_SECONDS = 20.0
_LOOK_SECONDS = 1.0
_STALE_SECONDS = 10.0
_ALL_SECONDS = 4.0


@dataclass(slots=True)
class Message:
    """What an answer has got since the last message."""

    items: list[Any] = field(default_factory=list)
    turn: tuple[int, ...] | None = None
    """What `before_turn` was called with."""
    dispatched: bool = False
    clamped: bool = False
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class RoleState:
    models: tuple[ModelInfo, ...]
    health: tuple[ModelHealth, ...]
    voices: Mapping[str, tuple[Voice, ...]]


async def answer(
    engine: Engine, method: str, request: Any, stream: Stream[Any], *, takes_turn: bool
) -> AsyncGenerator[Message, None]:
    """Answer another replica's request to a method of the engine. A failure is the `error` of the last message.

    The asking replica charges the key's limits when it gets `turn`, and closes this if they are exceeded.
    """
    message, changed = Message(), asyncio.Event()

    async def before_turn(*counted: int) -> None:
        message.turn, message.clamped = counted, getattr(stream, "clamped", False)
        changed.set()

    async def work() -> None:
        try:
            asked = replace(request, before_turn=before_turn) if takes_turn else request
            async with await getattr(engine, method)(asked, stream):
                async for item in stream:
                    message.items.append(item)
                    changed.set()
        except EngineError as error:
            message.error = error
        except Exception as error:  # noqa: BLE001  # its text may hold what a client wrote: it stays in this log
            message.error = GenerationError(to_api_error(error).message)
        finally:
            changed.set()

    working, done = asyncio.create_task(work()), False
    try:
        while not done:
            await _wait(changed, _SIGN_SECONDS)
            if message.turn is not None and not message.items:  # the first may be close behind
                await _wait(changed, _MESSAGE_SECONDS)
            if not isinstance(stream, TokenStream):  # and the last
                await asyncio.wait((working,), timeout=_SHORT_SECONDS)
            done, sent = working.done(), message
            message = Message()
            sent.dispatched = stream.dispatched_at is not None
            yield sent
            if sent.items:
                await asyncio.wait((working,), timeout=_MESSAGE_SECONDS)
    finally:
        working.cancel()
        await asyncio.wait((working,))


async def _wait(changed: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await changed.wait()
    changed.clear()


async def ask_all(handle: DeploymentHandle, method: str, kind: type[_T]) -> list[_T]:
    """Return what the replicas of a role answer. One that does not is left out."""
    with contextlib.suppress(Exception):
        found = await handle.broadcast(method).results_async(timeout_s=_ALL_SECONDS, return_exceptions=True)
        return [one for one in found if isinstance(one, kind)]
    return []


class Remote:
    """The models of another role: the states that their replicas report, read each second, and their answers."""

    def __init__(self, role: str, handle: DeploymentHandle) -> None:
        self.role = role
        self.entries: Mapping[str, Any] = {}
        self._handle = handle
        self._states: list[RoleState] = []
        self._seen_at = -_STALE_SECONDS

    async def look(self) -> None:
        """Ask all replicas for their states. If none answers, the last states stay."""
        if states := await ask_all(self._handle, "state", RoleState):
            self._states, self._seen_at = states, time.monotonic()

    def _answers(self) -> bool:
        return time.monotonic() - self._seen_at < _STALE_SECONDS

    def health(self) -> dict[str, ModelHealth]:
        """Return the best state that each model has in any replica."""
        found = {
            name: ModelHealth(name, "loading", "waiting for a replica", 0.0, 0.0, 0, None) for name in self.entries
        }
        for health in chain.from_iterable(state.health for state in self._states if self._answers()):
            before = found.get(health.id)  # None: of a models.yaml that is being deployed, or was before
            if before is not None and (health.status in ANSWERS or before.status not in ANSWERS):
                found[health.id] = replace(health, waiting=health.waiting + before.waiting)
        return found

    def models(self) -> dict[str, ModelInfo]:
        """Return each model that was seen, with what runs and waits in all replicas."""
        found: dict[str, ModelInfo] = {}
        health = self.health()
        for info in chain.from_iterable(state.models for state in self._states):
            if info.id in health:
                before = found.get(info.id, replace(info, running=0, waiting=0))
                running, waiting = before.running + info.running, before.waiting + info.waiting
                found[info.id] = replace(info, running=running, waiting=waiting, status=health[info.id].status)
        return found

    def voices(self, model: str) -> tuple[Voice, ...]:
        return self._states[0].voices.get(model, ()) if self._states else ()

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of a replica's engine that gives one answer."""
        with self._errors():
            result = await self._handle.options(method_name="call").remote(method, arguments, named)
        if isinstance(result, EngineError):
            raise _known_here(result)
        return result

    async def begin(self, method: str, request: Any, stream: Stream[Any]) -> Stream[Any]:
        """Answer into `stream` like this method of the engine; returns it with the first of the answer, or raises."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = asyncio.create_task(self._pump(method, request, stream, begun))

        def abort() -> asyncio.Task[None]:
            work.cancel()
            return work

        stream.abort = abort
        try:
            await begun
        except BaseException as error:
            stream.abort = None
            work.cancel()
            stream.refuse(error)
            raise
        return stream

    async def _pump(self, method: str, request: Any, stream: Stream[Any], begun: asyncio.Future[None]) -> None:
        before_turn = getattr(request, "before_turn", None)
        asked = request if before_turn is None else replace(request, before_turn=None)
        # From the handle that `look` has used: one made from an unused handle would have a router of its own.
        answers = self._handle.options(method_name="answer", stream=True, session_id=_session(request), **_PICKLED)
        response, now = None, asyncio.get_running_loop().time
        try:
            with self._errors():
                response = answers.remote(method, asked, type(stream), before_turn is not None)
                async with asyncio.timeout(_SILENT_SECONDS) as patience:
                    async for message in response:
                        patience.reschedule(None)
                        await _take(message, stream, before_turn)
                        if (message.items or message.dispatched) and not begun.done():
                            begun.set_result(None)
                        patience.reschedule(now() + _SILENT_SECONDS)
            stream.finish()
            if not begun.done():
                begun.set_result(None)
        except BaseException as error:
            if response is not None:
                response.cancel()
            if begun.done():
                stream.finish(error)
            else:
                begun.set_exception(error)
            if not isinstance(error, Exception):
                raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise what Ray raises as ours, and at once where no replica has answered for long."""
        if not self._answers():
            message = "No replica that has this model answers. Try again in a few seconds."
            raise ModelLoadingError(message, retry_after_seconds=5)
        try:
            yield
        except BackPressureError as error:
            raise OverloadedError("Too many requests wait for this model.", retry_after_seconds=5) from error
        except (exceptions.ActorUnavailableError, DeploymentUnavailableError) as error:
            sentence = "The replica of this model cannot be reached. Try again in a few seconds."
            raise UnavailableError(sentence, retry_after_seconds=5) from error
        except (exceptions.RayActorError, exceptions.ObjectLostError, TimeoutError) as error:
            raise engine_died() from error


def _session(request: Any) -> str:
    """A hash of the owner and the first question, which keeps a conversation with the replica that has cached them."""
    if not isinstance(request, ChatRequest):
        return ""
    beginning = [message for message in request.messages[:3] if message.get("role") != "assistant"][:2]
    said = json.dumps([request.owner, *map(_text, beginning)])  # without pictures: megabytes that add nothing
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


async def _take(message: Message, stream: Stream[Any], before_turn: Callable[..., Awaitable[None]] | None) -> None:
    """Put into the stream what a message brings. Raises the error that it brings, or what `before_turn` does."""
    if isinstance(stream, TokenStream):
        stream.clamped |= message.clamped
    if message.turn is not None and before_turn is not None:
        await before_turn(*message.turn)
    if message.dispatched:
        stream.dispatched()
    for item in message.items:
        stream.put(item)
    if message.error is not None:
        raise _known_here(message.error)


def _known_here(error: EngineError) -> EngineError:
    """Return an error to retry while a deploy moves a model: the other replica may have another models.yaml."""
    if isinstance(error, UnknownModelError):
        return ModelLoadingError("This model is being moved. Try again in a few seconds.", retry_after_seconds=5)
    return error


def _of_its_role(name: str) -> Any:
    """Return this method of the engine, which takes or names a model first, for models of other roles too."""
    own = getattr(Engine, name)

    async def method(self: "ClusterEngine", asked: Any, *more: Any, **named: Any) -> Any:
        remote = self.elsewhere.get(asked if isinstance(asked, str) else asked.model)
        if remote is None:
            return await own(self, asked, *more, **named)
        streams = bool(more) and isinstance(more[0], Stream)
        return await (remote.begin if streams else remote.call)(name, asked, *more, **named)

    return method


class ClusterEngine(Engine):
    """The engine of one replica, with the models of its role; those of `remotes` are elsewhere."""

    def __init__(self, config: Config, *, role: str, remotes: Sequence[Remote] = (), **how: Any) -> None:
        super().__init__(config.of_role(role), **how)
        self._role, self._remotes, self._looking = role, remotes, SideTasks()
        self.elsewhere: dict[str, Remote] = {}
        self._know(config)

    async def start(self) -> None:
        await super().start()
        for remote in self._remotes:
            self._looking.every(_LOOK_SECONDS, remote.look)

    async def stop(self) -> None:
        await self._looking.cancel()
        await super().stop()

    def own_health(self) -> tuple[ModelHealth, ...]:
        return super().health()

    def check(self) -> None:
        """Raise `StartError` where a model of this replica does not answer."""
        found = [
            f"{health.id}: {health.error or health.reason or health.phase}"
            for health in self.own_health()
            if health.status not in ANSWERS
        ]
        if found:
            raise StartError("; ".join(found))

    chat = _of_its_role("chat")
    text = _of_its_role("text")
    images = _of_its_role("images")
    embed = _of_its_role("embed")
    rerank = _of_its_role("rerank")
    speech = _of_its_role("speech")
    count_tokens = _of_its_role("count_tokens")
    tokenize = _of_its_role("tokenize")
    detokenize = _of_its_role("detokenize")

    async def load(self, model: str) -> None:
        self._check_own(model)
        await super().load(model)

    def unload(self, model: str) -> None:
        self._check_own(model)
        super().unload(model)

    def _check_own(self, model: str) -> None:
        if model in self.elsewhere:
            raise RequestError(f"{model} is served by another role, whose replicas load and unload it.", param="model")

    async def reload(self, config: Config) -> set[str]:  # noqa: ARG002
        raise RequestError("In a cluster `hearth cluster deploy` takes over a new models.yaml, replica by replica.")

    async def take_over(self, config: Config) -> None:
        """Serve tiers and models of other roles as `config` says; this role's own models do not change."""
        await super().reload(config.of_role(self._role))
        self._know(config)

    def _know(self, config: Config) -> None:
        for remote in self._remotes:
            remote.entries = config.of_role(remote.role).entries
        self.elsewhere = {name: remote for remote in self._remotes for name in remote.entries}
        if self._remotes:
            self.config = config

    def voices(self, model: str) -> tuple[Voice, ...]:
        remote = self.elsewhere.get(model)
        return super().voices(model) if remote is None else remote.voices(model)

    def models(self) -> tuple[ModelInfo, ...]:
        own = {health.id: self._info(health) for health in self.own_health()}
        return self._in_order(own, *(remote.models() for remote in self._remotes))

    def health(self) -> tuple[ModelHealth, ...]:
        own = {health.id: health for health in self.own_health()}
        return self._in_order(own, *(remote.health() for remote in self._remotes))

    def _in_order(self, *found: Mapping[str, _T]) -> tuple[_T, ...]:
        """In the order of models.yaml, adapters behind their base."""
        config, every = self.config, ChainMap(*map(dict, found))
        names = (one for name in config.models for one in (name, *(each.id for each in config.adapters_of(name))))
        return tuple(every[name] for name in names if name in every)
