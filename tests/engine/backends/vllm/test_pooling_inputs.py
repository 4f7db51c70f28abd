"""Token ids of texts for embeddings and reranking, and what becomes of a model's numbers."""

import math
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from engine.backends.vllm.pooling import Input, Inputs, numbers_of
from engine.errors import GenerationError, LoadError, RequestError


class Counting(PreTrainedTokenizerFast):
    """Counts the texts, or pairs, that it is given."""

    texts = 0

    def __call__(self, text: Any, *more: Any, **options: Any) -> Any:
        self.texts += len(text)
        return super().__call__(text, *more, **options)


def tokenizer() -> Counting:
    """One that adds nothing to a text."""
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "ask": 2, "of": 3, "say": 4}, unk_token="b"))
    words.pre_tokenizer = Whitespace()
    return Counting(tokenizer_object=words)


def made_for(longest: int, reader: PreTrainedTokenizerFast | None = None, template: str | None = None) -> Inputs:
    return Inputs(reader or tokenizer(), longest, lambda *_: None, template)


def test_a_text_without_a_token_is_named():
    inputs = made_for(8)
    assert inputs.of_texts(["a b", (1, 0)], "", truncate=False) == [Input([0, 1]), Input([1, 0])]
    with pytest.raises(RequestError) as caught:
        inputs.of_texts(["a", " \n"], "", truncate=False)
    assert caught.value.param == "input[1]"


def test_a_pair_stands_in_the_template_which_stays_whole_when_the_text_is_cut():
    inputs = made_for(9, template="ask {query} of {document} say say")
    assert inputs.of_pairs("a a", ["b", "a"], truncate=False) == [
        Input([2, 0, 0, 3, 1, 4, 4]),
        Input([2, 0, 0, 3, 0, 4, 4]),
    ]
    assert inputs.of_pairs("a a", ["b a b a"], truncate=True) == [Input([2, 0, 0, 3, 1, 0, 1, 4, 4])]
    with pytest.raises(RequestError) as caught:
        inputs.of_pairs("a a", ["b a b a"], truncate=False)
    assert caught.value.param == "documents[0]"
    with pytest.raises(RequestError, match="a query may have 2 of them") as caught:
        inputs.of_pairs("a a a", ["b"], truncate=True)
    assert caught.value.param == "query"
    with pytest.raises(LoadError, match="Shorten it"):
        made_for(9, template="ask {query} of {document}" + " say" * 6)


def test_what_has_too_many_tokens_is_refused_before_all_of_it_is_read():
    reader = tokenizer()
    inputs = made_for(2000, reader)
    assert len(inputs.of_pairs("a " * 999, ["b"] * 300, truncate=False)) == 300
    reader.texts = 0
    with pytest.raises(RequestError) as caught:
        inputs.of_pairs("a " * 999, ["b"] * 3000, truncate=False)
    assert caught.value.param == "documents"
    assert reader.texts < 600
    reader.texts = 0
    with pytest.raises(RequestError) as caught:
        inputs.of_texts(["a " * 2000] * 1500, "", truncate=False)
    assert caught.value.param == "input"
    assert reader.texts < 300
    with pytest.raises(RequestError):
        inputs.of_texts(["a " * 2000] * 151, "", truncate=False)


def test_a_vector_is_cut_to_the_length_1_and_one_of_no_numbers_is_refused():
    assert numbers_of(torch.tensor([3.0, 4.0, 5.0]), 2, normalised=True).tolist() == pytest.approx([0.6, 0.8])
    assert numbers_of(torch.tensor([3.0, 4.0, 5.0]), 2, normalised=False).tolist() == [3, 4]
    for wrong in (math.nan, math.inf):
        with pytest.raises(GenerationError):
            numbers_of(torch.tensor([1.0, wrong]), None, normalised=True)
