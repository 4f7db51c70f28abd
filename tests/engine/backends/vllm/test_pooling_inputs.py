"""Token ids of texts for embeddings and reranking."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from engine.backends.vllm.pooling import Input, Inputs
from engine.errors import RequestError


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
