"""What a transcript of a Whisper-shaped model begins with, which languages it takes, and what its tokens become."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from engine.backends.vllm.transcription import Scribe, Words
from engine.config import TranscriptionModelSpec
from engine.errors import RequestError
from engine.sound import RATE_HZ, Piece
from engine.types import TranscriptionRequest
from engine.weights.layouts import WhisperFolder

MARKS = ["<|startoftranscript|>", "<|en|>", "<|jw|>", "<|transcribe|>", "<|0.00|>", "<|0.50|>", "<|no|>"]


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
    for code, token in (("jv", 3), ("no", 7), ("nb", 7)):
        known.check_language(asked(code))
        assert known.prompt(code, "", translate=False) == [1, token, 4]
    with pytest.raises(RequestError, match="knows: en, jv, nb, no"):
        known.check_language(asked("de"))


def test_a_model_of_english_alone_is_told_no_language():
    known = words(multilingual=False)
    known.check_language(asked("en"))
    assert known.prompt("en", "", translate=False) == [1]
    with pytest.raises(RequestError, match="knows: en"):
        known.check_language(asked("jv"))


@pytest.mark.parametrize(("language", "text"), [("en", " a a"), ("ja", "aa")])
def test_segments_are_words_of_their_own_where_words_are(language: str, text: str):
    scribe = Scribe(words(multilingual=True), Piece(3.0, b"\0" * 2 * RATE_HZ), language)
    scribe.take([5, 0, 6, 6, 0], [-0.1] * 5)
    scribe.end()
    assert "".join(segment.text for segment in scribe.done) == text
    assert [(segment.start, segment.end) for segment in scribe.done] == [(3.0, 3.5), (3.5, 4.0)]
