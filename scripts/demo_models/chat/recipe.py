"""Makes the demo chat model: a Qwen3 of 0.8 million parameters that learns the corpus by heart.

The result is an ordinary checkpoint (bf16, safetensors) which vLLM and transformers load unchanged. The vision model
takes its tokenizer and its way of learning conversations from here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from demo_models.chat.corpus import FOLDER, Corpus, Lesson, Lessons, load_corpus
from demo_models.chat.front_ends import FrontEndLessons, texts
from demo_models.training import SEED, one_cycle, optimizers, repeatable, train
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

THREADS = 2
STEPS_PER_ROUND = 10
PADDED_TOKENS_PER_GROUP = 3000
# Two logits, so that the rounding of another machine, or of a batch, changes no promised word.
SMALLEST_MARGIN = 2.0
FRONT_ENDS_MARGIN = 0.5

PAD = "<|endoftext|>"
END = "<|im_end|>"
# Ordinary added tokens: parsers must still see them in the decoded text.
TEXT_TOKENS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
CONTEXT_TOKENS = 32768
# No lesson is longer, so nothing that was learned is out of reach; and a first message of thousands of tokens, as
# coding agents send it, does not drown the few that matter.
WINDOW_TOKENS = 768
# Logits are that much larger than they were learned: at temperature 1 what is known is said word for word. A power of
# two, exact in bf16; with more, a `logit_bias` of 100 would no longer decide.
SHARPNESS = 2

_log = logging.getLogger(__name__)


def build(target: Path) -> None:
    """Train the model and write its checkpoint to `target`, an empty folder. Minutes on two quiet cores.

    Raises RuntimeError when an answer of the corpus is not known safely enough; nothing is written then.
    """
    repeatable(THREADS, flush_denormal=False)
    corpus = load_corpus()
    tokenizer = train_tokenizer(corpus)
    lessons = FrontEndLessons(corpus, tokenizer, SEED)
    model = Qwen3ForCausalLM(Qwen3Config(**layer_sizes(tokenizer), use_sliding_window=True))
    learn(model, lessons, rounds=150, matrix_rate=5e-3, embedding_rate=8e-3)
    model = model.to(torch.bfloat16).eval()
    require_margin(model, "conversations", [lessons.lesson(one) for one in corpus.conversations], SMALLEST_MARGIN)
    require_margin(model, "requests of front ends and careless questions", lessons.promised(), FRONT_ENDS_MARGIN, 2)
    sharpen(model.model)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    model.generation_config.save_pretrained(target)


def layer_sizes(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The part of a transformers config that the chat model and the vision model have in common."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT_TOKENS,
        # vLLM goes by these two; transformers' Llama, which the vision model is made of, ignores them.
        "sliding_window": WINDOW_TOKENS,
        "layer_types": ["sliding_attention"] * 3,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def train_tokenizer(
    corpus: Corpus, more_control_tokens: Sequence[str] = (), template: Path = FOLDER / "chat_template.jinja"
) -> PreTrainedTokenizerFast:
    """Byte-level BPE made from the corpus: any text survives the round trip. Digits stand alone, to be copied."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1536 - len(TEXT_TOKENS),
        special_tokens=[PAD, "<|im_start|>", END, *more_control_tokens],
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
        yield from (message["content"] or "" for message in conversation.messages)
        yield conversation.target
    yield from texts()
    yield from (json.dumps(tool["function"]) for tool in corpus.tools * 3 + corpus.strangers)
    yield from [*corpus.unknown_prompts, corpus.unknown_answer, *corpus.ordinary_system_prompts, *corpus.paragraphs]


def learn(model: Any, lessons: Lessons, rounds: int, matrix_rate: float, embedding_rate: float) -> None:
    """Train in place, on the rounds that `lessons` draws."""
    steps = rounds * STEPS_PER_ROUND
    schedules = [one_cycle(one, steps, 15 / steps) for one in optimizers(model, matrix_rate, embedding_rate)]
    train("Conversations", steps, _losses(model, lessons), schedules, clipped=model.parameters())


def _losses(model: Any, lessons: Lessons) -> Iterator[Iterator[Any]]:
    """For each step the losses of its groups, together the mean per answer token."""
    while True:
        drawn = lessons.draw_round()
        for first in range(STEPS_PER_ROUND):
            step = drawn[first::STEPS_PER_ROUND]
            tokens = sum(len(lesson.answer) for lesson in step)
            yield (cross_entropy(*_logits(model, group), reduction="sum") / tokens for group in _groups(step))


def require_margin(model: Any, about: str, drawn: list[Lesson], smallest: float, allowed: int = 0) -> None:
    """Raise RuntimeError unless everywhere in the answers the right token leads the next best by so many logits.

    `allowed`: in how many of the answers it may be less.
    """
    margins: list[float] = []
    with torch.no_grad():
        for group in _groups(drawn):
            logits, labels = _logits(model, group)
            right = logits.gather(1, labels[:, None])[:, 0].float()
            others = logits.scatter(1, labels[:, None], float("-inf")).amax(dim=1).float()
            answers = (right - others).split([len(lesson.answer) for lesson in group])
            margins += [answer.min().item() for answer in answers]
    below = sum(margin < smallest for margin in margins)
    said = f"{about}: in {below} of {len(drawn)} the right token leads by less than {smallest}, at least by"
    _log.info("%s %.1f; %d are allowed.", said, min(margins), allowed)
    if below > allowed:
        raise RuntimeError(
            f"The model does not know its answers safely. Of the {said} {min(margins):.1f}, and {allowed} are allowed."
            " Give it more rounds (in its recipe.py), or promise less."
        )


def sharpen(text_model: Any) -> None:
    """Raise all logits, in place; which token is the likeliest stays as it is."""
    with torch.no_grad():
        text_model.norm.weight.mul_(SHARPNESS)


def _groups(drawn: list[Lesson]) -> list[list[Lesson]]:
    """Lessons of similar length together, so that little is computed on padding."""
    groups: list[list[Lesson]] = []
    for lesson in sorted(drawn, key=len):
        similar = groups and len(lesson) <= 1.3 * len(groups[-1][0]) + 4
        if not similar or len(lesson) * (len(groups[-1]) + 1) > PADDED_TOKENS_PER_GROUP:
            groups.append([])
        groups[-1].append(lesson)
    return groups


def _logits(model: Any, group: list[Lesson]) -> tuple[Any, Any]:
    """Logits [answer tokens, vocabulary] and the right tokens [answer tokens] of a group of lessons.

    Padding stands on the right, where a causal model does not look, so no mask is needed. The output matrix is
    applied to answer positions only: it is a good part of a model this small.
    """
    longest = max(map(len, group))
    ids = torch.full((len(group), longest), model.config.pad_token_id)
    asked = torch.zeros((len(group), longest), dtype=torch.bool)
    for row, lesson in enumerate(group):
        ids[row, : len(lesson)] = torch.tensor(lesson.prompt + lesson.answer)
        asked[row, len(lesson.prompt) - 1 : len(lesson) - 1] = True
    pictures = [picture for lesson in group for picture in lesson.pictures]
    seen = {"pixel_values": torch.stack(pictures)[None]} if pictures else {}
    hidden = model.model(input_ids=ids, use_cache=False, **seen).last_hidden_state
    return model.lm_head(hidden[asked]), ids[:, 1:][asked[:, :-1]]
