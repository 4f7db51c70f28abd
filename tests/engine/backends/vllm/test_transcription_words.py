"""What a transcript of a Whisper-shaped model begins with, and which languages it takes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from engine.backends.vllm.transcription import Words
from engine.config import TranscriptionModelSpec
from engine.errors import RequestError
from engine.types import TranscriptionRequest
from engine.weights.layouts import WhisperFolder

MARKS = ["<|startoftranscript|>", "<|en|>", "<|jw|>", "<|transcribe|>"]


def words(*, multilingual: bool) -> Words:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    tokenizer.add_tokens(MARKS, special_tokens=True)
    engine = SimpleNamespace(
        renderer=SimpleNamespace(tokenizer=tokenizer), model_config=SimpleNamespace(max_model_len=448)
    )
    spec = TranscriptionModelSpec(
        id="ears", tier="basic", weights="ears", task="transcription", capabilities=("transcription",)
    )
    return Words(engine, WhisperFolder(30.0, None, multilingual, ()), spec)


def asked(language: str) -> TranscriptionRequest:
    return TranscriptionRequest(request_id="1", model="ears", path=Path("sound"), language=language)


def test_a_model_of_many_languages_is_told_one_by_its_code_in_the_standard():
    known = words(multilingual=True)
    known.check_language(asked("jv"))
    assert known.prompt("jv", "", translate=False) == [1, 3, 4]
    with pytest.raises(RequestError, match="knows: en, jv"):
        known.check_language(asked("de"))


def test_a_model_of_english_alone_is_told_no_language():
    known = words(multilingual=False)
    known.check_language(asked("en"))
    assert known.prompt("en", "", translate=False) == [1]
    with pytest.raises(RequestError, match="knows: en"):
        known.check_language(asked("jv"))
