"""One request's results on their way from the model to its reader. A stream ends once, and then calls its owners.

The maker (a backend) puts items and finishes; the reader iterates, or sets a `sink` that takes items at the moment they
are made. What owns something for the length of a request registers `on_end`; a stream is never wrapped in a generator.
`fold` reads a stream to its end and returns the whole answer.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any, Generic, Self, TypeVar

from engine.errors import GenerationError
from engine.types import (
    ChatChoice,
    ChatDelta,
    ChatResult,
    ChatStep,
    FinishedImage,
    ImageEvent,
    ImageProgress,
    Pooled,
    Segment,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from engine.voices.types import SpeechChunk

_log = logging.getLogger("hearth.engine")

T = TypeVar("T")
OnEnd = Callable[[BaseException | None], object]
_MOST_CHOICES = 16
_MOST_UNREAD = 2**16  # probabilities, or half as many steps that cannot be joined: 16 MiB of one answer


class StreamClosedError(Exception):
    """The reader closed the stream before its maker finished: what owners get from `on_end` then."""


class Stream(Generic[T]):
    """Items of one request, from one maker to one reader, in one event loop.

    `sink` may take an item at once while the reader waits for it; if it returns False, the item is queued.
    The maker sets `abort`, which is called once if the reader closes first or the stream fails; it may return a future
    that is done when the work has stopped. `dispatched_at` is when the request was dispatched, by `time.monotonic`;
    None while it waits. The stream is `finished` when its maker is done, or its reader left.
    """

    def __init__(self) -> None:
        self.sink: Callable[[T], bool] | None = None
        self.abort: Callable[[], asyncio.Future[Any] | None] | None = None
        self._aborting: asyncio.Future[Any] | None = None
        self.dispatched_at: float | None = None
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.finished = False
        self._error: BaseException | None = None
        self._on_end: list[OnEnd] = []

    def on_end(self, callback: OnEnd) -> None:
        """Call `callback` once when the stream ends, the last registered first.

        It gets None for a complete stream, else the error; `StreamClosedError` if the reader left. If the stream has
        ended already, it is called now.
        """
        if self.finished:
            self._call(callback)
        else:
            self._on_end.append(callback)

    def keep(self, lease: ExitStack) -> None:
        """Close `lease` when the stream ends."""
        self.on_end(lambda _: lease.close())

    def dispatched(self) -> None:
        """Maker: the request is dispatched. The first call counts."""
        if self.dispatched_at is None:
            self.dispatched_at = time.monotonic()

    def put(self, item: T) -> None:
        """Maker: add an item. What comes after the end is dropped."""
        if self.finished:
            return
        if self.sink is not None and self._waiter is not None and not (self._waiter.done() or self._items):
            try:
                if self.sink(item):
                    return
            except Exception as error:  # noqa: BLE001  # ends this request, and not those behind it in the maker's loop
                self.fail(error)
            if self.finished:  # the sink has ended it
                return
        self._queue(item)
        self._wake()

    def finish(self, error: BaseException | None = None) -> None:
        """Maker: nothing more comes. The reader gets what is queued first, then the end or `error`."""
        if self.finished:
            return
        self.finished = True
        self._error = error
        self._wake()
        callbacks, self._on_end = self._on_end, []
        while callbacks:
            self._call(callbacks.pop())

    def refuse(self, error: BaseException) -> None:
        """Maker: end the stream before it is read. The caller raises `error`, so it is not kept for the reader."""
        self.finish(error)
        self._error = None

    def fail(self, error: BaseException) -> None:
        """Maker: end the stream with `error`, and abort the work for it."""
        if not self.finished:
            abort, self.abort = self.abort, None
            self.finish(error)
            if abort is not None:
                self._aborting = abort()

    def close(self) -> None:
        """Reader: end the stream. Aborts the work if it is not finished."""
        self._items.clear()
        self.fail(StreamClosedError())

    async def aclose(self) -> None:
        """Reader: close, and return when the work has stopped."""
        self.close()
        if self._aborting is not None:
            await asyncio.wait((self._aborting,))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        """Iterate over the items. For one reader."""
        return self

    async def __anext__(self) -> T:
        """Return the next item. Raises the maker's error after the last."""
        while not self._items:
            if self.finished:
                error, self._error = self._error or StopAsyncIteration(), None
                try:
                    raise error
                finally:
                    del error  # else this frame and the error refer to each other
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()

    def _queue(self, item: T) -> None:
        self._items.append(item)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _call(self, callback: OnEnd) -> None:
        try:
            callback(self._error)
        except Exception:  # noqa: BLE001  # the others have to be called anyway
            _log.exception("an owner of a request failed at its end")


class TokenStream(Stream[ChatStep]):
    """The steps of one chat answer. `usage` counts all that was made, read or not; `last` is the newest step.

    `clamped` says that an answer may have fewer tokens than the request allows. It is set before dispatch. `so_far` is
    what an answer that comes whole has used, without its steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last: ChatStep | None = None
        self.clamped = False
        self.so_far: Callable[[], Usage] | None = None

    @property
    def usage(self) -> Usage | None:
        if self.so_far is not None and (self._error is not None or not self.finished):
            return self.so_far()
        return None if self.last is None else self.last.usage

    @property
    def completion_tokens(self) -> int:
        used = self.usage
        return 0 if used is None else used.completion_tokens

    def put(self, item: ChatStep) -> None:
        self.last = item
        super().put(item)

    def _queue(self, item: ChatStep) -> None:
        """Join the step to an unread one if possible, so that a slow reader costs little memory per token."""
        for place in range(-1, -1 - min(len(self._items), _MOST_CHOICES), -1):  # several choices take turns
            joined = _joined(self._items[place], item)
            if joined is not None:
                del self._items[place]
                self._items.append(joined)
                return
            if {delta.index for delta in self._items[place].deltas} & {delta.index for delta in item.deltas}:
                break  # steps of a choice stay in order
        self._items.append(item)
        if len(self._items) * _values(item) > _MOST_UNREAD:
            self.fail(_unread())


class PoolingStream(Stream[Pooled]):
    """The results of the inputs of one request, in the order in which they were computed.

    `prompt_tokens` counts those of inputs that were computed, read or not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prompt_tokens = 0

    def put(self, item: Pooled) -> None:
        self.prompt_tokens += 0 if self.finished else item.tokens
        super().put(item)


class TranscriptionStream(Stream[Segment]):
    """The segments of one sound file, in their order. `seconds` counts what was heard of it, silence too."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0


class BoundedStream(Stream[T]):
    """The results of a worker for one request. Past `limit_bytes` of unread items, `put` raises `GenerationError`.

    So a reader that does not read delays no other request, and costs a known amount of memory.
    """

    def __init__(self, limit_bytes: int, size_of: Callable[[T], int]) -> None:
        super().__init__()
        self._limit_bytes, self._size_of = limit_bytes, size_of

    def put(self, item: T) -> None:
        """Maker: add an item. Raises `GenerationError` when too much is unread."""
        super().put(item)
        if sum(map(self._size_of, self._items)) > self._limit_bytes:
            raise _unread()


class ImageStream(BoundedStream[ImageEvent]):
    """The events of one image request. `images` counts those that were finished, read or not."""

    def __init__(self) -> None:
        # Four images of 1024 pixels with their previews, and to spare.
        super().__init__(128 * 2**20, lambda event: 0 if isinstance(event, ImageProgress) else len(event.data))
        self.images = 0

    def put(self, item: ImageEvent) -> None:
        self.images += isinstance(item, FinishedImage) and not self.finished
        super().put(item)


class SpeechStream(BoundedStream[SpeechChunk]):
    """The pieces of one audio file. `seconds` counts what was spoken, read or not."""

    def __init__(self) -> None:
        super().__init__(64 * 2**20, lambda chunk: len(chunk.data))  # some twenty minutes of the largest format
        self.seconds = 0.0

    def put(self, item: SpeechChunk) -> None:
        self.seconds += 0 if self.finished else item.seconds
        super().put(item)


def _unread() -> GenerationError:
    return GenerationError("The answer was not read for too long and was given up. Read it while it arrives.")


def _values(step: ChatStep) -> int:
    """Return the size of a step, counted in probabilities of a quarter of a KiB; one without any counts as 2."""
    return max(2, sum(1 + len(entry.top) for delta in step.deltas for entry in delta.logprobs or ()))


def _joined(first: ChatStep, second: ChatStep) -> ChatStep | None:
    """Return two steps of one choice as one; None if they have more than text, or reasoning after content."""
    if len(first.deltas) != 1 or len(second.deltas) != 1:
        return None
    (old,), (new,) = first.deltas, second.deltas
    other = old.tool_calls or new.tool_calls or old.logprobs is not None or new.logprobs is not None or old.prompt
    if other or old.index != new.index or (old.content and new.reasoning):
        return None
    delta = ChatDelta(old.index, old.content + new.content, old.reasoning + new.reasoning)
    delta.finish_reason, delta.stop_text = new.finish_reason, new.stop_text
    return ChatStep((delta,), second.usage)


async def fold(steps: AsyncIterator[ChatStep]) -> ChatResult:
    """Read `steps` to their end. Raises what they raise, and `GenerationError` if a choice never finished."""
    deltas: defaultdict[int, list[ChatDelta]] = defaultdict(list)
    usage: Usage | None = None
    async for step in steps:
        usage = step.usage
        for delta in step.deltas:
            deltas[delta.index].append(delta)
    if usage is None:
        raise GenerationError("The model gave no answer. Send the request again.")
    return ChatResult(tuple(_choice(index, deltas[index]) for index in sorted(deltas)), usage)


def _choice(index: int, deltas: list[ChatDelta]) -> ChatChoice:
    finish_reasons = [delta.finish_reason for delta in deltas if delta.finish_reason]
    if not finish_reasons:
        raise GenerationError("The model stopped in the middle of its answer. Send the request again.")
    calls: defaultdict[int, list[ToolCallDelta]] = defaultdict(list)
    for delta in deltas:
        for piece in delta.tool_calls:
            calls[piece.index].append(piece)
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return ChatChoice(
        index=index,
        content="".join([delta.content for delta in deltas]),
        reasoning="".join([delta.reasoning for delta in deltas]),
        tool_calls=tuple(_tool_call(pieces) for _, pieces in sorted(calls.items())),
        logprobs=tuple(chain.from_iterable(logprobs)) if logprobs else None,
        finish_reason=finish_reasons[-1],
        stop_text=next((delta.stop_text for delta in reversed(deltas) if delta.stop_text), None),
        prompt=deltas[0].prompt,
    )


def _tool_call(pieces: list[ToolCallDelta]) -> ToolCall:
    return ToolCall(pieces[0].id or "", pieces[0].name or "", "".join([piece.arguments for piece in pieces]))
