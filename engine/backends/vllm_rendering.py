"""Renders and tokenises short conversations on the event loop: vLLM sends each to a thread, at three times its price.

Long ones, and those of a template that turns out slow, go to the thread as ever; so nothing here takes long.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.renderers.hf import safe_apply_chat_template

from engine.backends.swiftness import Swiftness

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

# Of text; some 2,000 tokens, half a millisecond's work.
_SHORT_CHARACTERS = 8192
_FEW_MESSAGES = 32


def render_short_ones_here(renderer: Any) -> None:
    """Change the `renderer` of a started `AsyncLLM` so, if it is one for Hugging Face's templates and tokenizers."""
    if not hasattr(renderer, "_apply_chat_template_async") or not hasattr(renderer, "_render_with_timeout"):
        return
    limited = renderer._render_with_timeout  # noqa: SLF001
    beside = renderer._apply_chat_template_async  # noqa: SLF001

    async def with_timeout(*arguments: Any, **named: Any) -> Any:
        return await limited(beside(*arguments, **named))

    renderer._apply_chat_template_async = _Here(safe_apply_chat_template, with_timeout, _few_words)  # noqa: SLF001
    renderer._tokenize_prompt_async = _Here(  # noqa: SLF001
        renderer._tokenize_prompt,  # noqa: SLF001
        renderer._tokenize_prompt_async,  # noqa: SLF001
        _short_prompt,
    )
    renderer.__class__ = _one_by_one(type(renderer))


class _Here:
    """A function that runs at once where that is quick, and elsewhere where it may not be."""

    def __init__(
        self, run: Callable[..., Any], elsewhere: Callable[..., Awaitable[Any]], quick: Callable[..., bool]
    ) -> None:
        self._run = run
        self._elsewhere = elsewhere
        self._quick = quick
        self._swiftness = Swiftness()

    async def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not (self._quick(*arguments, **named) and self._swiftness.likely()):
            return await self._elsewhere(*arguments, **named)
        with self._swiftness:
            return self._run(*arguments, **named)


def _one_by_one(renderer_class: Any) -> Any:
    """Return that class of vLLM's without the tasks that it makes for several conversations: chats have one."""

    class OneByOne(renderer_class):  # type: ignore[misc]
        async def render_chat_async(
            self,
            conversations: Sequence[Any],
            chat_params: Any,
            tok_params: Any = None,
            *,
            prompt_extras: dict[str, Any] | None = None,
            skip_mm_cache: bool = False,
        ) -> Any:
            """Do what vLLM's does, in the same order."""
            arrival = time.time()
            (messages,) = conversations
            tok_params = self.default_chat_tok_params if tok_params is None else tok_params
            conversation, prompt = await self.render_messages_async(messages, chat_params)
            tokens = await self.tokenize_prompt_async(prompt, tok_params)
            extras = {**(prompt_extras or {}), "media_io_kwargs": chat_params.media_io_kwargs or {}}
            self._apply_prompt_extras([tokens], extras)
            engine_input = await self.process_for_engine_async(
                tokens, arrival, skip_mm_cache=skip_mm_cache, tok_params=tok_params
            )
            return [conversation], [engine_input]

        async def _render_with_timeout(self, rendering: Awaitable[Any]) -> Any:
            """What takes long has its time limit already."""
            return await rendering

    return OneByOne


def is_short(conversation: Sequence[dict[str, Any]]) -> bool:
    """Whether it is text alone, and takes well below a millisecond."""
    contents = [message.get("content") or "" for message in conversation]
    return (
        len(contents) <= _FEW_MESSAGES
        and all(isinstance(content, str) for content in contents)
        and sum(map(len, contents)) <= _SHORT_CHARACTERS
    )


def _few_words(_: Any, __: Any, conversation: list[dict[str, Any]], *, tools: Any = None, **___: Any) -> bool:
    return not tools and is_short(conversation)


def _short_prompt(prompt: Any, _: Any) -> bool:
    return len(prompt["prompt"]) <= 2 * _SHORT_CHARACTERS
