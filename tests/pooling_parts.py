"""What tests of embeddings and reranking share: models to serve, and transformers' own vectors and scores. No tests."""

from collections.abc import Sequence
from typing import Any

from engine.demo import weights_dir

EMBEDDING, RERANK = "service-embedding", "service-rerank"
EMBEDDING_ENTRY = """\
  service-embedding:
    task: embedding
    tier: standard
    capabilities: [embedding]
    weights: service-embedding
    demo: embedding
    least_dimensions: 32
    query_prefix: "find: "
"""


def own_vectors(given: Sequence[str]) -> Any:
    """Return what transformers makes of the demo, pooled as its folder says [texts, dimensions]."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights_dir("embedding"))
    model = AutoModel.from_pretrained(weights_dir("embedding"), dtype=torch.float32, add_pooling_layer=False).eval()
    tokens = tokenizer(list(given), padding=True, truncation=True, max_length=512, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    seen = tokens["attention_mask"][:, :, None]
    return torch.nn.functional.normalize((hidden * seen).sum(1) / seen.sum(1))


def own_scores(query: str, documents: Sequence[str]) -> Any:
    """Return the scores that transformers gives the documents, before a sigmoid."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = weights_dir("rerank")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = tokenizer([query] * len(documents), list(documents), padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        return model(**tokens).logits[:, 0]
