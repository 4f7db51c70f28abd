"""One engine for the app of a replica: it answers the models of its role, and passes the others on to theirs.

`answer` is the other end, in the replica that has the model. Steps are collected there for some milliseconds: a message
costs more than a token. Ray itself is only known here by its handles and its errors.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections import ChainMap
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

from engine import Config, Engine, EngineError, ModelHealth, ModelInfo, ModelLoad, RequestError, Voice
from engine.errors import GenerationError, ModelLoadingError, OverloadedError, StartError, UnavailableError, engine_died
from engine.stream import ImageStream, PoolingStream, SpeechStream, Stream, TokenStream
from engine.types import ANSWERS, ChatRequest
from server.errors import to_api_error
from server.store.database import SideTasks

_T = TypeVar("_T")
Kind: TypeAlias = Literal["chat", "text", "images", "embed", "rerank", "speech"]
_STREAMS: dict[Kind, type[Stream[Any]]] = {
    "chat": TokenStream,
    "text": TokenStream,
    "images": ImageStream,
    "embed": PoolingStream,
    "rerank": PoolingStream,
    "speech": SpeechStream,
}
_MESSAGE_SECONDS = 0.02
_SIGN_SECONDS = 5.0  # a message, if only an empty one: a machine that has lost its power says nothing
_SILENT_SECONDS = 20.0
_LOOK_SECONDS = 1.0
_STALE_SECONDS = 10.0


class Handle(Protocol):
    """What is used of Ray Serve's DeploymentHandle."""

    def options(self, *, method_name: str = ..., stream: bool = ..., session_id: str = ...) -> "Handle": ...
    def remote(self, *arguments: Any) -> Any: ...
    def broadcast(self, method_name: str, *arguments: Any) -> Any: ...


@dataclass(slots=True)
class Message:
    """What has become of an answer since the message before."""

    items: list[Any] = field(default_factory=list)
    turn: tuple[int, ...] | None = None
    """What `before_turn` was called with."""
    dispatched: bool = False
    clamped: bool = False
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class RoleState:
    """How the models of one replica stand."""

    models: tuple[ModelInfo, ...]
    health: tuple[ModelHealth, ...]
    loads: tuple[ModelLoad, ...]
    voices: Mapping[str, tuple[Voice, ...]]
    voice_warnings: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, engine: Engine) -> "RoleState":
        names = list(engine.config.models)
        return cls(
            engine.models(),
            engine.health(),
            tuple(replace(load, pids=()) for load in engine.loads()),  # of another machine
            {name: engine.voices(name) for name in names},
            {name: engine.voice_warnings(name) for name in names},
        )


async def answer(engine: Engine, kind: Kind, request: Any, *, takes_turn: bool) -> AsyncGenerator[Message, None]:
    """Answer a request that came from another replica. What goes wrong is the last message's error.

    The asking replica takes the key's limits by `turn`, and closes this where they do not allow it.
    """
    message, changed = Message(), asyncio.Event()
    stream = _STREAMS[kind]()

    async def before_turn(*counted: int) -> None:
        message.turn = counted
        message.clamped = isinstance(stream, TokenStream) and stream.clamped
        changed.set()

    async def work() -> None:
        try:
            asked = replace(request, before_turn=before_turn) if takes_turn else request
            async with await getattr(engine, kind)(asked, stream):
                async for item in stream:
                    message.items.append(item)
                    changed.set()
        except EngineError as error:
            message.error = error
        except Exception as error:  # noqa: BLE001  # its text may hold what a client wrote: it stays in this log
            message.error = GenerationError(to_api_error(error).message)
        finally:
            changed.set()

    working = asyncio.create_task(work())
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SIGN_SECONDS):
                    await changed.wait()
            changed.clear()
            done, sent = working.done(), message
            message = Message()
            sent.dispatched = stream.dispatched_at is not None
            yield sent
            if done:
                return
            if sent.items:
                await asyncio.wait((working,), timeout=_MESSAGE_SECONDS)
    finally:
        working.cancel()
        await asyncio.wait((working,))


class Remote:
    """The models of another role: what their replicas say of themselves, looked at each second, and their answers."""

    def __init__(self, role: str, handle: Handle) -> None:
        self.role = role
        self.entries: Mapping[str, Any] = {}
        self._handle = handle
        self._tasks = SideTasks()
        self._states: list[RoleState] = []
        self._seen_at = -_STALE_SECONDS

    def start(self) -> None:
        self._tasks.every(_LOOK_SECONDS, self.look)

    async def stop(self) -> None:
        await self._tasks.cancel()

    async def look(self) -> None:
        """Ask all replicas how they stand. One that does not answer is left out; if none does, the last word holds."""
        with contextlib.suppress(Exception):
            found = await self._handle.broadcast("state").results_async(timeout_s=5, return_exceptions=True)
            if states := [state for state in found if isinstance(state, RoleState)]:
                self._states, self._seen_at = states, time.monotonic()

    def states(self) -> Sequence[RoleState]:
        """Return what replicas have said lately."""
        return self._states if time.monotonic() - self._seen_at < _STALE_SECONDS else ()

    def health(self) -> dict[str, ModelHealth]:
        """Return the state of each model where it is best."""
        found = {
            name: ModelHealth(name, "loading", "waiting for a replica", 0.0, 0.0, 0, None) for name in self.entries
        }
        for health in chain.from_iterable(state.health for state in self.states()):
            before = found.get(health.id)  # None: of a models.yaml that is being deployed, or was before
            if before is not None and (health.status in ANSWERS or before.status not in ANSWERS):
                found[health.id] = replace(health, waiting=health.waiting + before.waiting)
        return found

    def models(self) -> dict[str, ModelInfo]:
        """Return each model that was seen, with what runs and waits in all replicas."""
        found: dict[str, ModelInfo] = {}
        for info in chain.from_iterable(state.models for state in self.states() or self._states):
            before = found.get(info.id, replace(info, running=0, waiting=0))
            better = before if before.status in ANSWERS else info
            running, waiting = before.running + info.running, before.waiting + info.waiting
            found[info.id] = replace(better, running=running, waiting=waiting)
        return {name: replace(found[name], status=one.status) for name, one in self.health().items() if name in found}

    def voices(self, model: str) -> tuple[Voice, ...]:
        return self._states[0].voices.get(model, ()) if self._states else ()

    def voice_warnings(self, model: str) -> tuple[str, ...]:
        return self._states[0].voice_warnings.get(model, ()) if self._states else ()

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of a replica's engine that gives one answer."""
        self._check()
        with _translated():
            result = await self._handle.options(method_name="call").remote(method, arguments, named)
        if isinstance(result, EngineError):
            raise result
        return result

    async def everywhere(self, method: str, *arguments: Any) -> None:
        """Call it in all replicas, and raise what one of them raises."""
        with _translated():
            results = await self._handle.broadcast("call", method, arguments, {}).results_async()
        for error in results:
            if isinstance(error, EngineError):
                raise error

    async def begin(self, kind: Kind, request: Any, stream: Stream[Any]) -> None:
        """Answer into `stream` like the engine's method `kind`; returns with the first of the answer, or raises."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._check()
            stream.abort = partial(_cancelled, asyncio.create_task(self._pump(kind, request, stream, begun)))
            await begun
        except BaseException as error:
            abort, stream.abort = stream.abort, None
            if abort is not None:
                abort()
            stream.refuse(error)
            raise

    async def _pump(self, kind: Kind, request: Any, stream: Stream[Any], begun: asyncio.Future[None]) -> None:
        before_turn = getattr(request, "before_turn", None)
        asked = request if before_turn is None else replace(request, before_turn=None)
        # Of the handle that `look` has used: each that is made before would come with a router of its own.
        answers = self._handle.options(method_name="answer", stream=True, session_id=_session(request))
        response = answers.remote(kind, asked, before_turn is not None)
        try:
            with _translated():
                async for message in _lively(response):
                    await _take(message, stream, before_turn)
                    if (message.items or message.dispatched) and not begun.done():
                        begun.set_result(None)
            stream.finish()
            if not begun.done():
                begun.set_result(None)
        except BaseException as error:
            response.cancel()
            if begun.done():
                stream.finish(error)
            else:
                begun.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def _check(self) -> None:
        if not self.states():
            message = "No replica that has this model answers. Try again in a few seconds."
            raise ModelLoadingError(message, retry_after_seconds=5)


async def _lively(messages: AsyncIterator[Message]) -> AsyncIterator[Message]:
    """Pass messages on. Raises where none comes for so long that its replica must have died."""
    iterator = aiter(messages)
    with contextlib.suppress(StopAsyncIteration):
        while True:
            try:
                async with asyncio.timeout(_SILENT_SECONDS):
                    message = await anext(iterator)
                yield message
            except TimeoutError:
                raise engine_died() from None


def _session(request: Any) -> str:
    """What keeps a conversation with the replica that has cached its beginning: its owner, and its first question."""
    if not isinstance(request, ChatRequest):
        return ""
    beginning = [message for message in request.messages[:3] if message.get("role") != "assistant"][:2]
    said = json.dumps([request.owner, *map(_text, beginning)])  # megabytes of pictures tell no more
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
        raise message.error


def _cancelled(task: asyncio.Task[None]) -> asyncio.Task[None]:
    task.cancel()
    return task


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise Ray's own errors as ours."""
    from ray import exceptions
    from ray.serve import exceptions as serve

    try:
        yield
    except serve.BackPressureError as error:
        raise OverloadedError("Too many requests wait for this model.", retry_after_seconds=5) from error
    except (exceptions.ActorUnavailableError, serve.DeploymentUnavailableError) as error:
        sentence = "The replica of this model cannot be reached. Try again in a few seconds."
        raise UnavailableError(sentence, retry_after_seconds=5) from error
    except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
        raise engine_died() from error


def _of_its_role(kind: Kind) -> Any:
    """Make the method `kind` of the engine, for models of this role and of others."""
    own = getattr(Engine, kind)

    async def method(self: "ClusterEngine", request: Any, stream: Stream[Any]) -> Stream[Any]:
        remote = self.elsewhere.get(request.model)
        if remote is None:
            return cast("Stream[Any]", await own(self, request, stream))
        await remote.begin(kind, request, stream)
        return stream

    return method


def _one_answer(name: str) -> Any:
    """Make the method `name` of the engine, whose first argument is a model or has one, likewise."""
    own = getattr(Engine, name)

    async def method(self: "ClusterEngine", asked: Any, *more: Any, **named: Any) -> Any:
        remote = self.elsewhere.get(asked if isinstance(asked, str) else asked.model)
        if remote is None:
            return await own(self, asked, *more, **named)
        return await remote.call(name, asked, *more, **named)

    return method


class ClusterEngine(Engine):
    """The engine of one replica, with the models of its role; those of `remotes` are elsewhere."""

    def __init__(self, config: Config, *, role: str, remotes: Sequence[Remote] = (), **how: Any) -> None:
        super().__init__(config.of_role(role), **how)
        self._role = role
        self._remotes = remotes
        self.elsewhere: dict[str, Remote] = {}
        self._know(config)

    async def start(self) -> None:
        await super().start()
        for remote in self._remotes:
            remote.start()

    async def stop(self) -> None:
        for remote in self._remotes:
            await remote.stop()
        await super().stop()

    def own_health(self) -> tuple[ModelHealth, ...]:
        """What the models of this replica are doing."""
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

    count_tokens = _one_answer("count_tokens")
    tokenize = _one_answer("tokenize")
    detokenize = _one_answer("detokenize")

    async def load(self, model: str) -> None:
        if remote := self.elsewhere.get(model):
            await remote.everywhere("load", model)
        else:
            await super().load(model)

    def unload(self, model: str) -> None:
        if model in self.elsewhere:
            raise RequestError(f"{model} is served by another role, whose replicas load and unload it.", param="model")
        super().unload(model)

    async def take_over(self, config: Config) -> None:
        """Serve tiers and models of other roles as `config` says; of this role's own models nothing is new."""
        await super().reload(config.of_role(self._role))
        self._know(config)

    def _know(self, config: Config) -> None:
        for remote in self._remotes:
            remote.entries = config.of_role(remote.role).entries
        self.elsewhere = {name: remote for remote in self._remotes for name in remote.entries}
        if self._remotes:
            self.config = config

    async def reload(self, config: Config) -> set[str]:  # noqa: ARG002
        raise RequestError("In a cluster `hearth cluster deploy` takes over a new models.yaml, replica by replica.")

    def voices(self, model: str) -> tuple[Voice, ...]:
        remote = self.elsewhere.get(model)
        return super().voices(model) if remote is None else remote.voices(model)

    def voice_warnings(self, model: str) -> tuple[str, ...]:
        remote = self.elsewhere.get(model)
        return super().voice_warnings(model) if remote is None else remote.voice_warnings(model)

    def models(self) -> tuple[ModelInfo, ...]:
        own = {health.id: self._info(health) for health in self.own_health()}
        return self._in_order(own, *(remote.models() for remote in self._remotes))

    def health(self) -> tuple[ModelHealth, ...]:
        own = {health.id: health for health in self.own_health()}
        return self._in_order(own, *(remote.health() for remote in self._remotes))

    def loads(self) -> tuple[ModelLoad, ...]:
        found = {load.id: load for load in super().loads()}
        for load in chain.from_iterable(state.loads for remote in self._remotes for state in remote.states()):
            before = found.get(load.id, ModelLoad(load.id, 0, 0))
            running, waiting = load.running + before.running, load.waiting + before.waiting
            found[load.id] = replace(load, running=running, waiting=waiting)
        return self._in_order(found)

    def _in_order(self, *found: Mapping[str, _T]) -> tuple[_T, ...]:
        """In the order of models.yaml, adapters behind their base."""
        config, every = self.config, ChainMap(*map(dict, found))
        names = (one for name in config.models for one in (name, *(each.id for each in config.adapters_of(name))))
        return tuple(every[name] for name in names if name in every)
