"""Gives the vision model the demo chat model's knowledge to start from, so that it mostly has to learn to see.

Both have layers of the same sizes. The chat model (Qwen3) normalises queries and keys and this one (Llama) does not:
their mean norms on the corpus are put into the weights instead, which keeps all but a handful of answers right.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from engine.demo import weights_dir
from engine.demo.chat.lessons import Lessons

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from engine.demo.chat.corpus import Corpus

_EVERY = 3  # conversations that the norms are measured on: one in so many


def know_the_corpus(text_model: Any, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, seed: int) -> None:
    """Fill the text part of an Idefics3 model, whose `tokenizer` has most tokens in common with the chat model's."""
    folder = weights_dir("chat")
    chat_tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    norms = _mean_norms(chat, Lessons(corpus, chat_tokenizer, seed))
    known = dict(chat.model.named_parameters())
    with torch.no_grad():
        for name, weight in text_model.named_parameters():
            if name == "embed_tokens.weight":
                _copy_embeddings(weight, known[name], tokenizer.get_vocab(), chat_tokenizer.get_vocab())
            elif name in norms:
                scale = known[name.replace("_proj", "_norm")] / norms[name][:, None]
                weight.copy_((known[name].unflatten(0, scale.shape) * scale[:, :, None]).flatten(0, 1))
            else:
                weight.copy_(known[name])


def _copy_embeddings(mine: Any, theirs: Any, vocabulary: dict[str, int], known: dict[str, int]) -> None:
    for token, place in vocabulary.items():
        if token in known:
            mine[place] = theirs[known[token]]


def _mean_norms(chat: Any, lessons: Lessons) -> dict[str, Any]:
    """Root mean squares per head of what is normalised, by the name of the matrix that makes it."""
    seen: defaultdict[str, list[Any]] = defaultdict(list)

    def watch(name: str) -> Any:
        def note(_module: Any, _given: Any, made: Any) -> None:
            heads = made.unflatten(-1, (-1, chat.config.head_dim))
            seen[name].append(heads.pow(2).mean(-1).sqrt().flatten(0, -2).mean(0))

        return note

    hooks = [
        getattr(layer.self_attn, matrix).register_forward_hook(watch(f"layers.{place}.self_attn.{matrix}.weight"))
        for place, layer in enumerate(chat.model.layers)
        for matrix in ("q_proj", "k_proj")
    ]
    with torch.no_grad():
        for conversation in lessons.corpus.conversations[::_EVERY]:
            lesson = lessons.lesson(conversation)
            chat(input_ids=torch.tensor([lesson.prompt + lesson.answer]))
    for hook in hooks:
        hook.remove()
    return {name: torch.stack(norms).mean(0) for name, norms in seen.items()}
