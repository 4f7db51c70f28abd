"""A program: makes tiny models of the shipped embedder's and reranker's architectures, and prints how far off ours are.

What they make of texts, by our own engine on the CPU, is compared with transformers' own vectors and scores.
"""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from engine import Engine, load_config
from engine.stream import PoolingStream
from engine.types import EmbeddingRequest, RerankRequest

TEXTS = ("Paris is the capital of France.", "Bananas are yellow.", "A week has seven days, and so does this one.")
QUERY = "What is the capital of France?"
TEMPLATE = "<start>Judge: {query}? Of {document} say:<end>"
WIDTH = 64


def make_qwen3(folder: Path, single: str) -> None:
    """Qwen3-Reranker's: a chat model. `single` is what the tokenizer puts around a text."""
    tokenizer = _tokenizer(single)
    config = transformers.Qwen3Config(
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_embedder(folder: Path) -> None:
    """Qwen3-Embedding's: a Qwen3 whose last token, which is an end, makes the vector."""
    make_qwen3(folder, "$A <end>")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make_reranker(folder: Path) -> None:
    """bge-reranker-v2-m3's: an XLM-RoBERTa with one label."""
    tokenizer = _tokenizer("<start> $A <end>", "<start> $A <end> <end> $B <end>")
    config = transformers.XLMRobertaConfig(
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=514,
        type_vocab_size=1,
        pad_token_id=1,
        num_labels=1,
        initializer_range=0.2,
    )
    transformers.XLMRobertaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(single: str, pair: str | None = None) -> Any:
    """A token for each letter."""
    names = ["<start>", "<pad>", "<end>", "<unk>", *(chr(code) for code in range(32, 127)), "▁"]
    vocabulary = {name: at for at, name in enumerate(names)}
    whole = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))  # no password
    whole.pre_tokenizer = pre_tokenizers.Metaspace()
    marks = [(name, vocabulary[name]) for name in ("<start>", "<end>")]
    whole.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=marks)
    names_of = {"bos_token": "<start>", "eos_token": "<end>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=whole, model_max_length=512, **names_of)


def own_vectors(folder: Path) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.Qwen3Model.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        last = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in TEXTS]
    return torch.nn.functional.normalize(torch.stack(last))


def own_scores(folder: Path) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    kind = transformers.XLMRobertaForSequenceClassification
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.stack([model(**tokenizer(QUERY, text, return_tensors="pt")).logits[0, 0] for text in TEXTS])


def own_judgement(folder: Path, *, negative: bool) -> torch.Tensor:
    """The logit of y as what comes next, less that of n if it counts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [TEMPLATE.format(query=QUERY, document=text) for text in TEXTS]
    with torch.no_grad():
        logits = torch.stack([model(**tokenizer(each, return_tensors="pt")).logits[0, -1] for each in prompts])
    yes, no = (logits[:, tokenizer.convert_tokens_to_ids(letter)] for letter in "yn")
    return yes - no if negative else yes


async def main(folder: Path) -> None:
    """Make, load, ask, compare, end."""
    torch.manual_seed(3)
    make_embedder(folder / "embedder")
    make_reranker(folder / "reranker")
    make_qwen3(folder / "judge", "$A")
    judge = "task: rerank, tier: t, capabilities: [rerank], weights: judge"
    (folder / "models.yaml").write_text(
        "models:\n"
        "  vectors: {task: embedding, tier: t, capabilities: [embedding], weights: embedder}\n"
        "  ranks: {task: rerank, tier: t, capabilities: [rerank], weights: reranker}\n"
        f"  judges: {{{judge}, score_tokens: [n, y], template: '{TEMPLATE}'}}\n"
        f"  judges-by-one: {{{judge}, score_tokens: [y], template: '{TEMPLATE}'}}\n"
        f"  unlike-a-chat: {{{judge}}}\n"
        f"  without-that-token: {{{judge}, score_tokens: [no, y]}}\n"
        "tiers:\n  t: {models: [t]}\n"
    )
    engine = Engine(load_config(folder / "models.yaml"), weights_dir=folder)
    await engine.start()
    try:
        while any(one.status not in {"ready", "failed"} for one in engine.health()):
            await engine.wait_for_change()
        said: dict[str, Any] = {"errors": {one.id: one.error for one in engine.health() if one.error}}
        if said["errors"].keys() == {"unlike-a-chat", "without-that-token"}:
            asked = EmbeddingRequest(request_id="a", model="vectors", inputs=TEXTS)
            said["vectors"] = _apart(
                await _read(await engine.embed(asked, PoolingStream())), own_vectors(folder / "embedder")
            )
            ranked = RerankRequest(request_id="b", model="ranks", query=QUERY, documents=TEXTS)
            scores = await _read(await engine.rerank(ranked, PoolingStream()))
            said["scores"] = _apart(scores[:, 0], own_scores(folder / "reranker"))
            for name, negative in (("judges", True), ("judges-by-one", False)):
                scores = await _read(await engine.rerank(replace(ranked, request_id=name, model=name), PoolingStream()))
                said[name] = _apart(scores[:, 0], own_judgement(folder / "judge", negative=negative))
    finally:
        await engine.stop()
    sys.stdout.write(json.dumps(said) + "\n")


async def _read(stream: PoolingStream) -> torch.Tensor:
    found = {one.index: list(one.values) async for one in stream}
    return torch.tensor([found[index] for index in range(len(TEXTS))])


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
