"""From our chat request to vLLM's, and to the tokens of a short conversation of plain text.

All other conversations are rendered by vLLM, which looks up template, settings and limits for each, and uses a thread.
Whether both ways give the same tokens is checked for every model when it is loaded.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from typing import Any

from transformers import TokenizersBackend
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.renderers.hf import HfRenderer

from engine.backends.vllm.errors import check_answer_alone
from engine.types import ChatRequest

_log = logging.getLogger("hearth.engine")
# vLLM takes a first line out of `system` that begins so: Claude Code's, which differs in every request.
_BILLING_LINE = "x-anthropic-billing-header"
_ROLES = frozenset({"system", "user", "assistant"})
_KEYS = {"role", "content"}
# Of text; some 2,000 tokens, half a millisecond's work. Longer ones are vLLM's, on a thread.
_SHORT_CHARACTERS = 8192
_FEW_MESSAGES = 32
# A template that takes longer than this is never again run on the event loop.
_SLOW_SECONDS = 0.05
# What `apply_chat_template` takes for itself. The rest are the template's own variables.
_NOT_VARIABLES = {"chat_template", "tokenize", "return_dict", "continue_final_message", "tools"}


class TextPrompts:
    """Of one model whose template takes texts and whose tokenizer is one of Hugging Face's fast ones."""

    def __init__(self, template: Any, variables: dict[str, Any], tokenizer: Any) -> None:
        self._template = template
        self._variables = {**template.globals, **variables}  # Jinja would merge them for each prompt
        self._encode = tokenizer.encode_batch_fast  # without the place of each token in the text
        self._slow = False

    @classmethod
    def of(cls, serving: Any, request: Any) -> TextPrompts | None:
        """Look up what vLLM would for `request`, a plain one of its own; None where it would do something else."""
        # Not at the top: without these optional names, vLLM renders all conversations.
        from transformers.utils.chat_template_utils import _compile_jinja_template
        from vllm.renderers.hf import (
            resolve_chat_template,
            resolve_chat_template_content_format,
            resolve_chat_template_kwargs,
        )

        renderer, model_config, tokenizer = serving.renderer, serving.model_config, serving.renderer.tokenizer
        if not (isinstance(renderer, HfRenderer) and isinstance(tokenizer, TokenizersBackend)):
            return None
        if model_config.is_multimodal_model or serving.online_renderer.use_harmony:
            return None
        defaults = dict(serving.online_renderer.default_chat_template_kwargs or {})
        parameters = request.build_chat_params(None, "auto").with_defaults({**defaults, "tools": None})
        named = parameters.get_apply_chat_template_kwargs()
        template = resolve_chat_template(tokenizer, chat_template=None, tools=None, model_config=model_config)
        taken = resolve_chat_template_content_format(
            chat_template=None, tools=None, given_format="auto", tokenizer=tokenizer, model_config=model_config
        )
        if template is None or taken != "string":
            return None
        variables = resolve_chat_template_kwargs(
            tokenizer=tokenizer,
            chat_template=template,
            chat_template_kwargs={name: value for name, value in named.items() if name not in _NOT_VARIABLES},
        )
        own = copy.deepcopy(tokenizer._tokenizer)  # noqa: SLF001  # vLLM's may be set to truncate by another thread
        own.no_truncation()
        own.no_padding()
        everything = {"documents": None, **tokenizer.special_tokens_map, **variables, "tools": None}
        return cls(_compile_jinja_template(template), everything, own)

    def token_ids(self, messages: Sequence[dict[str, Any]]) -> list[int] | None:
        """Return the prompt, or None for a conversation that vLLM has to look at: longer, not all text, or refused."""
        if self._slow or not _is_short_text(messages):
            return None
        began = time.thread_time()  # not the clock: on a busy machine even a fast template may be held up
        ids = self._rendered(messages)
        self._slow = time.thread_time() - began > _SLOW_SECONDS
        return ids

    def _rendered(self, messages: Sequence[dict[str, Any]]) -> list[int] | None:
        try:
            context = self._template.new_context({**self._variables, "messages": messages}, shared=True)
            text = "".join(self._template.root_render_func(context))
        except Exception:  # noqa: BLE001  # vLLM's renderer says what a template refuses
            return None
        ids: list[int] = self._encode([text], add_special_tokens=False)[0].ids
        return ids

    async def agrees_with(self, serving: Any, requests: Sequence[Any]) -> bool:
        """Check that vLLM renders the same tokens of `requests`, plain ones of its own."""
        for request in requests:
            ours = self._rendered([dict(message) for message in request.messages])
            if ours is None:
                continue
            try:
                _, (rendered,) = await serving.online_renderer.render_chat(request, skip_mm_cache=True)
            except Exception:  # noqa: BLE001  # a template may refuse an order of roles, and both must
                return False
            if rendered.get("type") != "token" or rendered["prompt_token_ids"] != ours:
                _log.info("vLLM renders all prompts of this model: our renderer gives other tokens.")
                return False
        return True


def _is_short_text(messages: Sequence[dict[str, Any]]) -> bool:
    if len(messages) > _FEW_MESSAGES:
        return False
    size = 0
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str) or message.keys() != _KEYS or message["role"] not in _ROLES:
            return False
        if content.startswith(_BILLING_LINE):
            return False
        size += len(content)
    return size <= _SHORT_CHARACTERS


# pydantic looks for each field's default anew in each object, and inspects the signature of whatever makes one: half a
# millisecond for nothing.
_FIELDS = ChatCompletionRequest.model_fields
_MADE: dict[str, Any] = {name: field.default_factory for name, field in _FIELDS.items() if field.default_factory}
_CONSTANTS: dict[str, Any] = {
    name: field.default
    for name, field in _FIELDS.items()
    if isinstance(field.default, (bool, int, float, str, type(None))) and name not in _MADE
}


def translate(
    request: ChatRequest, *, stream: bool, context_length: int, max_output_tokens: int | None
) -> ChatCompletionRequest:
    """Build vLLM's request without validating it again: the server has checked every field already.

    Raises `ContextLengthError` when `max_tokens` alone is more than the context.
    """
    max_tokens = request.max_tokens if request.max_tokens is not None else max_output_tokens
    if request.max_tokens is not None:
        check_answer_alone(request.max_tokens, context_length)
    fields: dict[str, Any] = {
        "model": request.model,
        # Copied: vLLM's renderer changes messages in place.
        "messages": [dict(message) for message in request.messages],
        "request_id": request.request_id,
        "stream": stream,
        "max_completion_tokens": max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "n": request.n,
        "stop": list(request.stop),
        "seed": request.seed,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": request.logit_bias,
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
        "reasoning_effort": request.reasoning_effort,
        "chat_template_kwargs": request.chat_template_kwargs,
        "cache_salt": request.cache_salt,
        "user": request.owner,
        "ignore_eos": request.ignore_eos,
        "parallel_tool_calls": request.parallel_tool_calls,
        "priority": int(request.urgency),  # the lower number goes first
    }
    if request.n > 1 and request.temperature == 0:
        # vLLM refuses several greedy answers. With only the likeliest token to choose from, chance has no say either.
        fields["temperature"], fields["top_k"] = 1.0, 1
    if request.continue_answer:
        fields["add_generation_prompt"], fields["continue_final_message"] = False, True
    if request.tools:
        fields["tools"] = [ChatCompletionToolsParam.model_validate(tool) for tool in request.tools]
        fields["tool_choice"] = _tool_choice(request.tool_choice)
    if request.response_format is not None:
        fields["response_format"] = _response_format(request.response_format)
    defaults = {**_CONSTANTS, **{name: make() for name, make in _MADE.items()}}
    return ChatCompletionRequest.model_construct(set(fields), **(defaults | fields))


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else ChatCompletionNamedToolChoiceParam.model_validate(choice)


def _response_format(form: dict[str, Any]) -> Any:
    """Let vLLM's own field make the object: its type is a union that has grown over the versions."""
    whole = ChatCompletionRequest.model_validate({"messages": [], "response_format": form})
    return whole.response_format
