"""The tokenizer of the demo models that talk: byte-level BPE made from the corpus, any text survives the round trip."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.demo.chat.corpus import FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from engine.demo.chat.corpus import Corpus

PAD = "<|endoftext|>"
END = "<|im_end|>"
CONTROL_TOKENS = [PAD, "<|im_start|>", END]
# Ordinary added tokens: parsers must still see them in the decoded text.
TEXT_TOKENS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
VOCABULARY = 1536
CONTEXT_TOKENS = 4096


def train_tokenizer(
    corpus: Corpus,
    *,
    more_control_tokens: Sequence[str] = (),
    template: Path = FOLDER / "chat_template.jinja",
) -> PreTrainedTokenizerFast:
    """A tokenizer with this chat template. Digits stand alone, so that numbers can be copied."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TEXT_TOKENS),
        special_tokens=[*CONTROL_TOKENS, *more_control_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(corpus), trainer)
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in TEXT_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def _texts(corpus: Corpus) -> Iterator[str]:
    for conversation in corpus.conversations:
        for message in conversation.messages:
            yield message["content"] or ""
        yield conversation.target
    for tool in corpus.tools * 3 + corpus.strangers:
        yield json.dumps(tool["function"])
    yield from corpus.unknown_prompts
    yield corpus.unknown_answer
    yield from corpus.ordinary_system_prompts
    yield from corpus.paragraphs
