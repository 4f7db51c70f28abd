"""From our request to vLLM's, and to the tokens of its prompt.

Short conversations of plain text are rendered here (`TextPrompts`), all others by vLLM, which looks up template,
settings and limits for each, and uses a thread. When a model is loaded, both ways are checked to give the same tokens.
"""

import copy
import logging
import time
from collections.abc import Sequence
from typing import Any, Literal, Self

from transformers import TokenizersBackend
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.renderers.inputs.preprocess import parse_model_prompt

from engine.backends.vllm import compat
from engine.errors import ContextLengthError, OverloadedError, RequestError, UnsupportedCapabilityError
from engine.types import ChatRequest, TextRequest

_log = logging.getLogger("hearth.engine")

# The field in which the client wrote the prompt.
PromptField = Literal["messages", "prompt"]

# Fields with the same name in vLLM.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "n", "seed", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "ignore_eos"),
)
_CHAT = (
    *("model", "request_id", "logprobs", "top_logprobs", "reasoning_effort", "chat_template_kwargs"),
    *("cache_salt", "parallel_tool_calls"),
)

# Copied: to make a new one, pydantic checks each of its seventy fields.
_EMPTY = ChatCompletionRequest.model_construct(messages=[])
_FACTORIES: dict[str, Any] = {
    name: field.default_factory for name, field in ChatCompletionRequest.model_fields.items() if field.default_factory
}


def translate(request: ChatRequest, *, stream: bool) -> ChatCompletionRequest:
    """Build vLLM's request without validating it again: the server has checked every field already.

    `check_context`, not vLLM, checks the length of an answer: its error names both numbers.
    """
    fields = {name: getattr(request, name) for name in _CHAT} | _sampling(request)
    fields |= {
        "messages": [_message(message) for message in request.messages],
        "stream": stream,
        "user": request.owner,
    }
    if request.continue_answer:
        fields["add_generation_prompt"], fields["continue_final_message"] = False, True
    elif not request.generation_prompt:
        fields["add_generation_prompt"] = False
    if request.tools:
        fields["tools"] = [ChatCompletionToolsParam.model_validate(tool) for tool in request.tools]
        choice = request.tool_choice
        named = isinstance(choice, dict)
        fields["tool_choice"] = ChatCompletionNamedToolChoiceParam.model_validate(choice) if named else choice or "auto"
    if request.response_format is not None:
        # vLLM's own field makes the object: its type is a union that has grown over the versions.
        whole = ChatCompletionRequest.model_validate({"messages": [], "response_format": request.response_format})
        fields["response_format"] = whole.response_format
    made = {name: make() for name, make in _FACTORIES.items()}
    return _EMPTY.model_copy(update=made | fields)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Copy a message, since vLLM's renderer changes it in place, and reads reasoning from `reasoning`."""
    copied = dict(message)
    if thought := copied.pop("reasoning_content", None):
        copied["reasoning"] = thought
    return copied


def translate_text(request: TextRequest) -> CompletionRequest:
    return CompletionRequest.model_construct(
        **_sampling(request),
        stream=True,  # outputs have what is new, not everything so far
        logprobs=request.top_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        max_tokens=None,  # likewise not vLLM's to check
    )


def _sampling(request: ChatRequest | TextRequest) -> dict[str, Any]:
    fields = {name: getattr(request, name) for name in _SAMPLING}
    fields["stop"] = list(request.stop)
    if request.n > 1 and request.temperature == 0:
        # vLLM refuses several greedy answers. `top_k` 1 also always chooses the likeliest token.
        fields["temperature"], fields["top_k"] = 1.0, 1
    return fields


def seed_of_answer(seed: int, index: int) -> int:
    """Return the seed of one of several answers. More than 64 bits end a GPU engine, and -1 means no seed."""
    return (seed + index) % 2**63 if index else seed


async def render(renderer: Any, vllm_request: ChatCompletionRequest) -> Any:
    """Have vLLM's `OnlineRenderer` render and tokenise; return its inputs to the core. Raises `RequestError`s."""
    try:
        rendered = await renderer.render_chat(vllm_request)
    except TimeoutError as error:  # vLLM's, of one template
        sentence = "The model's chat template took too long for this conversation. Try again in a few seconds."
        raise OverloadedError(sentence, retry_after_seconds=5) from error
    except (VLLMValidationError, ValueError, TypeError, KeyError) as error:  # depends on model and version
        if isinstance(error, VLLMValidationError) and error.__cause__ is None:
            raise  # vLLM's own, and not of the template
        late = [message for message in vllm_request.messages[1:] if message["role"] == "system"]
        if late:  # Qwen3.5's template takes one at the start only; vLLM moves messages of the role `developer` there
            for message in late:
                message["role"] = "developer"
            return await render(renderer, vllm_request)
        raise RequestError(
            "The model's chat template refused this conversation. Check the order of the roles, that each message "
            "has the content that its role needs, `reasoning_effort` and `chat_template_kwargs`, and that no text "
            "contains the model's own marks for pictures.",
            param="messages",
        ) from error
    if isinstance(rendered, ErrorResponse):  # returned, not raised: there are tools, and the model has no tool parser
        raise UnsupportedCapabilityError(
            "This model cannot call tools. Pick a model with the capability `function_calling`.", param="tools"
        )
    return rendered[1][0]


# Of prompts, in one request: they come all at once, and putting them together blocks the event loop.
_MOST_PROBABILITIES = 2**17


def check_probabilities(prompt_tokens: int, request: TextRequest) -> None:
    """Refuse requests for probabilities of too many tokens of prompts."""
    each = 0 if request.prompt_logprobs is None else request.prompt_logprobs + 1
    if prompt_tokens * each > _MOST_PROBABILITIES:
        raise RequestError(
            f"These prompts have {prompt_tokens} tokens, and {each} probabilities each are asked for; at most "
            f"{_MOST_PROBABILITIES} come in one request. Send fewer prompts at once, or ask for fewer alternatives.",
            param="prompt",
        )


async def render_texts(chat: Any, request: TextRequest) -> list[Any]:
    """Tokenise the prompts; vLLM does it on threads of its own. Raises `RequestError`s."""
    renderer, model_config = chat.renderer, chat.model_config
    prompts = [prompt if isinstance(prompt, str) else list(prompt) for prompt in request.prompts]
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_tokens(chat, prompt, "prompt")
    return await renderer.render_cmpl_async(
        [parse_model_prompt(model_config, prompt) for prompt in prompts],
        translate_text(request).build_tok_params(model_config),
        prompt_extras={"cache_salt": request.cache_salt} if request.cache_salt is not None else None,
    )


def check_tokens(chat: Any, ids: Sequence[int], field: str) -> None:
    """Refuse ids that the model has no token for."""
    try:
        chat.renderer.validate_token_ids(list(ids))
    except VLLMValidationError as error:
        raise RequestError(f"`{field}` has a token id that this model does not have.", param=field) from error


def check_context(
    prompt_tokens: int, max_tokens: int | None, context_length: int, prompt_field: PromptField = "messages"
) -> None:
    """Refuse what cannot fit. An answer needs room for at least one token."""
    asked = prompt_tokens + (1 if max_tokens is None else max_tokens)
    if asked <= context_length:
        return
    if max_tokens is None or prompt_tokens >= context_length:
        tokens = f"{prompt_tokens} tokens, which leaves no room for an answer"
        raise prompt_too_long(tokens, context_length, prompt_field)
    raise ContextLengthError(
        f"This model's maximum context length is {context_length} tokens. However, you requested {asked} tokens "
        f"({prompt_tokens} in the {prompt_field}, {max_tokens} in the completion). Send `max_tokens` of at most "
        f"{context_length - prompt_tokens}, or shorten the {prompt_field}.",
        param="max_tokens",
    )


def prompt_too_long(tokens: str, context_length: int, prompt_field: PromptField) -> ContextLengthError:
    """Return the error for a prompt that comes to so many `tokens`."""
    comes = "come" if prompt_field == "messages" else "comes"
    return ContextLengthError(
        f"This model's maximum context length is {context_length} tokens. However, your {prompt_field} {comes} to "
        f"{tokens}. Please shorten the {prompt_field}.",
        param=prompt_field,
    )


# vLLM removes a first line of `system` that begins so: Claude Code's, which differs in every request.
_BILLING_LINE = "x-anthropic-billing-header"
_ROLES = frozenset({"system", "user", "assistant"})
_KEYS = {"role", "content"}
# Of text; some 2,000 tokens, which take half a millisecond. vLLM renders longer ones, on a thread.
_SHORT_CHARACTERS = 8192
_FEW_MESSAGES = 32
# A template that takes longer than this is never again run on the event loop.
_SLOW_SECONDS = 0.05
# Arguments of `apply_chat_template` itself. The rest are the template's variables.
_NOT_VARIABLES = {"chat_template", "tokenize", "return_dict", "continue_final_message", "tools"}
# Rendered in both ways when a model is loaded.
_TRIALS = (
    {"role": "user", "content": "Hello, how are you?"},
    {"role": "system", "content": " Answer briefly.\n\nOnly in German. "},
    {"role": "user", "content": "Gr\u00fc\u00dfe \u2014 \u4f60\u597d \U0001f30d\t<|im_end|> <s> </s> {{ messages }}"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": ""},
)


class TextPrompts:
    """Renders for one model, whose template takes texts and whose tokenizer is one of Hugging Face's fast ones."""

    def __init__(self, template: Any, variables: dict[str, Any], tokenizer: Any) -> None:
        self._template = template
        self._variables = {**template.globals, **variables}  # Jinja would merge them for each prompt
        self._encode = tokenizer.encode_batch_fast  # without the place of each token in the text
        self._slow = False

    @classmethod
    async def of(cls, chat: Any) -> Self | None:
        """Make it for a model; None if vLLM's serving would do something else or make other tokens."""
        parser = chat.parser_cls
        if parser is not None and (parser.always_adjust_request or parser.reasoning_parser_cls is not None):
            return None  # it also changes requests without tools
        if not compat.fits("text prompts"):
            return None
        trials = [_trial(_TRIALS[:1]), _trial(_TRIALS[1:3]), _trial(_TRIALS[2:]), _trial(_TRIALS)]
        made = cls._looked_up(chat, trials[0])
        return made if made and await made.agrees_with(chat.online_renderer, trials) else None

    @classmethod
    def _looked_up(cls, chat: Any, request: Any) -> Self | None:
        """Look up what vLLM would look up for `request`, a plain one of vLLM's."""
        # Not at the top: without these optional names, vLLM renders all conversations.
        from transformers.utils.chat_template_utils import _compile_jinja_template
        from vllm.renderers import hf

        renderer, model_config, tokenizer = chat.renderer, chat.model_config, chat.renderer.tokenizer
        if not (isinstance(renderer, hf.HfRenderer) and isinstance(tokenizer, TokenizersBackend)):
            return None
        if model_config.is_multimodal_model or chat.online_renderer.use_harmony:
            return None
        defaults = dict(chat.online_renderer.default_chat_template_kwargs or {})
        parameters = request.build_chat_params(None, "auto").with_defaults({**defaults, "tools": None})
        named = parameters.get_apply_chat_template_kwargs()
        template = hf.resolve_chat_template(tokenizer, chat_template=None, tools=None, model_config=model_config)
        taken = hf.resolve_chat_template_content_format(
            chat_template=None, tools=None, given_format="auto", tokenizer=tokenizer, model_config=model_config
        )
        if template is None or taken != "string":
            return None
        variables = hf.resolve_chat_template_kwargs(
            tokenizer=tokenizer,
            chat_template=template,
            chat_template_kwargs={name: value for name, value in named.items() if name not in _NOT_VARIABLES},
        )
        own = copy.deepcopy(tokenizer._tokenizer)  # noqa: SLF001  # another thread may set vLLM's to truncate
        own.no_truncation()
        own.no_padding()
        everything = {"documents": None, **tokenizer.special_tokens_map, **variables, "tools": None}
        return cls(_compile_jinja_template(template), everything, own)

    def token_ids(self, messages: Sequence[dict[str, Any]]) -> list[int] | None:
        """Return the prompt, or None for a conversation that vLLM has to render: long, not all text, or refused."""
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
        except Exception:  # noqa: BLE001  # vLLM's renderer will say what the template refuses
            return None
        return self._encode([text], add_special_tokens=False)[0].ids

    async def agrees_with(self, renderer: Any, requests: Sequence[ChatCompletionRequest]) -> bool:
        """Check that vLLM renders the same tokens; a template may refuse an order of roles, and both must."""
        for request in requests:
            ours = self._rendered([dict(message) for message in request.messages])
            if ours is None:
                continue
            try:
                inputs = await render(renderer, request)
            except Exception:  # noqa: BLE001  # a template's own
                return False
            if inputs.get("type") != "token" or inputs["prompt_token_ids"] != ours:
                _log.info("vLLM renders all prompts of this model: our renderer gives other tokens.")
                return False
        return True


def _trial(messages: Sequence[dict[str, Any]]) -> ChatCompletionRequest:
    return translate(ChatRequest(request_id="trial", model="", messages=list(messages)), stream=False)


def _is_short_text(messages: Sequence[dict[str, Any]]) -> bool:
    if len(messages) > _FEW_MESSAGES:
        return False
    if not all(message.keys() == _KEYS and message["role"] in _ROLES for message in messages):
        return False
    texts = [message["content"] for message in messages]
    plain = all(isinstance(text, str) and not text.startswith(_BILLING_LINE) for text in texts)
    return plain and sum(map(len, texts)) <= _SHORT_CHARACTERS
