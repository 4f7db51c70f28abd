"""The demo transcription model is an ordinary, small Whisper; that it reads back is tested with a server."""

import random

from demo_models.transcription.sentences import PROMISED, WORDS, fixed_sentences, lesson
from manifest_parts import problems

from engine.demo import weights_dir
from engine.weights.layouts import WhisperFolder


def test_the_weights_fit_the_recipe_that_is_in_the_repository():
    assert problems("transcription") == []


def test_it_is_small_and_holds_no_code():
    files = [path for path in weights_dir("transcription").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 2 * 2**20
    assert {path.suffix for path in files} == {".json", ".safetensors"}


def test_it_is_a_whisper_with_pieces_of_ten_seconds():
    folder = WhisperFolder.read(weights_dir("transcription"))
    assert (folder.piece_seconds, folder.multilingual, folder.saved_in) == (10, True, "float16")


def test_what_it_promises_is_not_taught():
    promised = fixed_sentences()
    assert len(set(promised)) == PROMISED
    assert {word for text in promised for word in text.split()} <= set(WORDS)
    chance = random.Random(3)  # noqa: S311
    assert not {lesson(chance) for _ in range(3000)} & set(promised)
