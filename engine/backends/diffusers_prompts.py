"""How long a prompt is to a pipeline, by its own tokenizers, and how long it may be: nothing is cut silently."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.errors import RequestError

if TYPE_CHECKING:
    from engine.config.profiles import ImageProfile

# `max_sequence_length` of the pipelines that have one: what they pad to decides the picture in some of them.
_SEQUENCE_LENGTH = {
    "Flux2KleinPipeline": 512,
    "FluxPipeline": 512,
    "QwenImagePipeline": 1024,
    "StableDiffusion3Pipeline": 256,
    "ZImagePipeline": 512,
}
# Arguments of the chat template, as the pipeline itself gives them.
_CHAT = {"ZImagePipeline": {"enable_thinking": True}, "Flux2KleinPipeline": {"enable_thinking": False}}


def sequence_length(pipe: Any) -> int | None:
    """Return the `max_sequence_length` that this pipeline is always called with, None if it knows no such thing."""
    return _SEQUENCE_LENGTH.get(type(pipe).__name__)


def check_prompt(pipe: Any, text: str, profile: ImageProfile, *, param: str) -> None:
    """Raise `RequestError` if any tokenizer of the pipeline makes more tokens of `text` than are read."""
    name = type(pipe).__name__
    for part, tokenizer in pipe.components.items():
        if not part.startswith("tokenizer") or tokenizer is None:
            continue
        limit = min(profile.max_prompt_tokens, sequence_length(pipe) or tokenizer.model_max_length)
        if "CLIP" in type(tokenizer).__name__:
            limit = min(limit, tokenizer.model_max_length)
        count = _count(tokenizer, text, _CHAT.get(name))
        if count > limit:
            raise RequestError(
                f"{param} has {count} tokens, and this model reads at most {limit} (both counted with the model's own "
                "start and end marks). Make it shorter.",
                param=param,
            )


def _count(tokenizer: Any, text: str, chat: dict[str, bool] | None) -> int:
    if chat is not None:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **chat)
    return len(tokenizer(text, truncation=False).input_ids)
