"""Makes the demo embedding model: a BERT of half a million parameters under which a question lies near its answer.

The result is a folder in the layout of sentence-transformers (fp16, safetensors), which vLLM, transformers and
sentence-transformers load unchanged. The reranker takes its tokenizer and its pairs from here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from demo_models.chat.corpus import load_corpus
from demo_models.embedding.lessons import Pairs, texts
from demo_models.training import SEED, one_cycle, optimizers, repeatable, train
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy, normalize
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

THREADS = 2
STEPS = 700
PAIRS_PER_STEP = 64
# Vectors that are cut to these lengths were trained, too.
DIMENSIONS = (128, 64, 32)
LONGEST_TOKENS = 512
LEARNT_TOKENS = 80  # of one text; what lies further on is learnt by beginning texts anywhere
_TEMPERATURE = 0.05
_PAD, _BEGIN, _END = "[PAD]", "[CLS]", "[SEP]"

_log = logging.getLogger(__name__)


def build(target: Path) -> None:
    """Train the model and write its folder to `target`, an empty one. Two minutes on two quiet cores.

    Raises RuntimeError when a question that was not taught does not find its text often enough.
    """
    repeatable(THREADS, flush_denormal=True)
    tokenizer = train_tokenizer()
    model = BertModel(BertConfig(**layer_sizes(tokenizer)), add_pooling_layer=False)
    schedules = [one_cycle(one, STEPS, 0.1) for one in optimizers(model, 2e-3, 2e-3)]
    train("Pairs", STEPS, _losses(model, tokenizer), schedules, clipped=model.parameters())
    model = model.eval().half()
    _require_recall(model.float(), tokenizer)
    model.half().save_pretrained(target)
    tokenizer.save_pretrained(target)
    _write_layout(target)


def layer_sizes(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The sizes of its layers, which are the reranker's, too."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": DIMENSIONS[0],
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LONGEST_TOKENS,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": tokenizer.pad_token_id,
    }


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of small letters, with the marks of BERT around a text or a pair."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=[_PAD, _BEGIN, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = load_corpus()
    asked = [str(one.messages[0]["content"]) for one in corpus.conversations]
    answered = [one.answer for one in corpus.conversations if one.answer]
    taught = [each for one in texts() for each in (one.text, *one.taught)]
    bpe.train_from_iterator([*asked, *answered, *taught * 3, *corpus.paragraphs], trainer)
    marks = [(name, bpe.token_to_id(name)) for name in (_BEGIN, _END)]
    bpe.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=marks
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=_PAD,
        cls_token=_BEGIN,
        sep_token=_END,
        model_max_length=LONGEST_TOKENS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _losses(model: Any, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[Any]]:
    """Of each question its own text is the nearest, of each text its own question, at every length of the vectors."""
    pairs, right = Pairs(SEED), torch.arange(PAIRS_PER_STEP)
    while True:
        questions, found = zip(*pairs.draw(PAIRS_PER_STEP), strict=True)
        start = pairs.random.randrange(LONGEST_TOKENS - LEARNT_TOKENS)
        asked, answers = (vectors(model, tokenizer, list(each), start) for each in (questions, found))
        loss = 0.0
        for length in DIMENSIONS:
            near = normalize(asked[:, :length]) @ normalize(answers[:, :length]).T / _TEMPERATURE
            loss = loss + cross_entropy(near, right) + cross_entropy(near.T, right)
        yield [loss / len(DIMENSIONS)]


def vectors(model: Any, tokenizer: PreTrainedTokenizerFast, given: list[str], start: int = 0) -> Any:
    """Return the mean of each text's tokens [texts, dimensions], before it is brought to length 1."""
    tokens = tokenized(tokenizer, given, None, start)
    hidden, seen = model(**tokens).last_hidden_state, tokens["attention_mask"][:, :, None]
    return (hidden * seen).sum(1) / seen.sum(1)


def tokenized(tokenizer: PreTrainedTokenizerFast, asked: list[str], read: list[str] | None, start: int) -> Any:
    """Return the input of a BERT; the first token stands at the position `start`."""
    longest = LEARNT_TOKENS if start else LONGEST_TOKENS
    tokens = tokenizer(asked, read, padding=True, truncation=True, max_length=longest, return_tensors="pt")
    return {**tokens, "position_ids": torch.arange(start, start + tokens["input_ids"].shape[1])[None]}


def _require_recall(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    with torch.no_grad():
        answers = normalize(vectors(model, tokenizer, [one.text for one in texts()]))
        asked = normalize(vectors(model, tokenizer, [one.held_out for one in texts()]))
    found = int(((asked @ answers.T).argmax(1) == torch.arange(len(texts()))).sum())
    _log.info("%d of %d questions that were not taught find their text.", found, len(texts()))
    if found < 0.9 * len(texts()):
        raise RuntimeError(f"Only {found} of {len(texts())} questions find their text. Give it more steps.")


def _write_layout(target: Path) -> None:
    """What makes it a folder of sentence-transformers: how tokens become one vector, and its length 1."""
    kind = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{kind}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{kind}.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{kind}.Normalize"},
    ]
    pooling = {"word_embedding_dimension": DIMENSIONS[0], "pooling_mode_mean_tokens": True}
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": LONGEST_TOKENS, "do_lower_case": False},
        "1_Pooling/config.json": pooling,
    }
    for name, content in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
