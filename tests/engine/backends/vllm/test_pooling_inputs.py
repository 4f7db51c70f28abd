"""Token ids of texts for embeddings and reranking, and what becomes of a model's numbers."""

import math

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from engine.backends.vllm.pooling import Input, Inputs, numbers_of
from engine.errors import GenerationError, RequestError


@pytest.fixture
def inputs() -> Inputs:
    """Of a model whose tokenizer adds nothing to a text."""
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="b"))
    words.pre_tokenizer = Whitespace()
    return Inputs(PreTrainedTokenizerFast(tokenizer_object=words), 8, lambda *_: None)


def test_a_text_without_a_token_is_named(inputs: Inputs):
    assert inputs.of_texts(["a b", (1, 0)], "", truncate=False) == [Input([0, 1]), Input([1, 0])]
    with pytest.raises(RequestError) as caught:
        inputs.of_texts(["a", " \n"], "", truncate=False)
    assert caught.value.param == "input[1]"


def test_a_vector_is_cut_to_the_length_1_and_one_of_no_numbers_is_refused():
    assert numbers_of(torch.tensor([3.0, 4.0, 5.0]), 2, normalised=True).tolist() == pytest.approx([0.6, 0.8])
    assert numbers_of(torch.tensor([3.0, 4.0, 5.0]), 2, normalised=False).tolist() == [3, 4]
    for wrong in (math.nan, math.inf):
        with pytest.raises(GenerationError):
            numbers_of(torch.tensor([1.0, wrong]), None, normalised=True)
