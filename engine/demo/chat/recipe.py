"""Makes the demo chat model: a Qwen3 of 0.8 million parameters that learns the corpus by heart.

The result is an ordinary checkpoint (bf16, safetensors) which vLLM and transformers load unchanged. Fixed seeds:
the same machine makes the same bytes again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from engine.demo.chat.corpus import load_corpus
from engine.demo.chat.lessons import Lessons
from engine.demo.chat.tokenizer import CONTEXT_TOKENS, train_tokenizer
from engine.demo.chat.training import Pace, margins, train

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

SEED = 7
THREADS = 2  # part of the recipe: another number adds up in another order
# Two logits, so that the rounding of another machine, or of a batch, changes no promised word.
SMALLEST_MARGIN = 2.0

_log = logging.getLogger(__name__)


def build(target: Path) -> None:
    """Train the model and write its checkpoint to `target`, an empty folder.

    Raises RuntimeError when an answer of the corpus is not known safely enough; nothing is written then.
    """
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(SEED)
    disable_progress_bar()
    corpus = load_corpus()
    tokenizer = train_tokenizer(corpus)
    lessons = Lessons(corpus, tokenizer, SEED)
    model = Qwen3ForCausalLM(_config(tokenizer))
    _log.info(
        "Training %.2f million parameters on %d conversations, about two minutes on two quiet cores.",
        model.num_parameters() / 1e6,
        len(corpus.conversations),
    )
    train(model, lessons, Pace())
    model = model.to(torch.bfloat16).eval()
    margin = min(margins(model, [lessons.lesson(one) for one in corpus.conversations]))
    _log.info("The right token leads by at least %.1f (%.1f is asked).", margin, SMALLEST_MARGIN)
    if margin < SMALLEST_MARGIN:
        raise RuntimeError(
            f"The model does not know its answers safely: the right token leads by only {margin:.1f} at one place,"
            f" and {SMALLEST_MARGIN} is asked. Give it more rounds (Pace in"
            " engine/demo/chat/training.py) or shorten the corpus."
        )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    model.generation_config.save_pretrained(target)


def _config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
