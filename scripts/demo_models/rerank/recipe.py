"""Makes the demo reranker: a BERT of half a million parameters that reads a question and a text together.

The result is an ordinary checkpoint of a cross-encoder with one score (fp16, safetensors). Its tokenizer and its pairs
are the demo embedding model's, and so are the weights that it begins with: build that one first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from demo_models.embedding.lessons import Pairs, texts
from demo_models.embedding.recipe import LEARNT_TOKENS, LONGEST_TOKENS, tokenized, train_tokenizer
from demo_models.training import SEED, one_cycle, optimizers, repeatable, train
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from engine.demo import weights_dir

THREADS = 1
STEPS = 1700
QUESTIONS_PER_STEP = 5  # each is read with the texts of all

_log = logging.getLogger(__name__)


def build(target: Path) -> None:
    """Train the model and write its checkpoint to `target`, an empty folder. Minutes on two quiet cores.

    Raises RuntimeError when it does not put the right text first often enough, of questions that were not taught.
    """
    repeatable(THREADS, flush_denormal=True)
    tokenizer = train_tokenizer()
    begun = BertConfig.from_pretrained(weights_dir("embedding"), num_labels=1)
    model = BertForSequenceClassification.from_pretrained(weights_dir("embedding"), config=begun, dtype=torch.float32)
    model.train()
    # Tokens begin by looking at those that are like them, and see which of the two texts these stand in
    first, given = model.bert.encoder.layer[0].attention.self, model.bert.embeddings
    for weight in (first.query.weight, first.key.weight):
        torch.nn.init.eye_(weight)
    torch.nn.init.normal_(given.token_type_embeddings.weight, std=given.word_embeddings.weight.std().item())
    schedules = [one_cycle(one, STEPS, 0.1) for one in optimizers(model, 1.5e-3, 1.5e-3)]
    train("Pairs", STEPS, _losses(model, tokenizer), schedules, clipped=model.parameters())
    model = model.eval().half()
    _require_order(model.float(), tokenizer)
    model.half().save_pretrained(target)
    tokenizer.save_pretrained(target)


def _losses(model: Any, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[Any]]:
    """The right text scores above others; and above zero, where the others are below."""
    pairs, count = Pairs(SEED), QUESTIONS_PER_STEP
    right, wanted = torch.arange(count), torch.eye(count)
    while True:
        questions, found = zip(*pairs.draw(count), strict=True)
        asked, read = [one for one in questions for _ in found], list(found) * count
        start = pairs.random.randrange(LONGEST_TOKENS - LEARNT_TOKENS)
        scores = score(model, tokenizer, asked, read, start).view(count, count)
        yield [cross_entropy(scores, right) + binary_cross_entropy_with_logits(scores, wanted)]


def score(model: Any, tokenizer: PreTrainedTokenizerFast, asked: list[str], read: list[str], start: int = 0) -> Any:
    """Return the score [pairs] of each question with the text beside it."""
    return model(**tokenized(tokenizer, asked, read, start)).logits[:, 0]


def _require_order(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    known = [one.text for one in texts()]
    right = 0
    with torch.no_grad():
        for at, one in enumerate(texts()):
            right += int(score(model, tokenizer, [one.held_out] * len(known), known).argmax()) == at
    _log.info("%d of %d questions that were not taught have their text first.", right, len(known))
    if right < 0.9 * len(known):
        raise RuntimeError(f"Only {right} of {len(known)} questions have their text first. Give it more steps.")
