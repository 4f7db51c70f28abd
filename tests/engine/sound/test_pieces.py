"""Sound is cut where it is quiet, and nothing that is loud is lost."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.sound import RATE_HZ, Piece
from engine.sound.service import Cutter


def tone(seconds: float, level: float = 0.1) -> NDArray[np.int16]:
    at = np.arange(int(seconds * RATE_HZ))
    return (level * np.sin(2 * np.pi * 300 * at / RATE_HZ) * 2**15).astype(np.int16)


def silence(seconds: float) -> NDArray[np.int16]:
    return np.zeros(int(seconds * RATE_HZ), np.int16)


def cut(sound: NDArray[np.int16], most_seconds: float = 30, step: int = 16_000) -> list[Piece]:
    cutter = Cutter(most_seconds)
    pieces = [piece for at in range(0, len(sound), step) for piece in cutter.add(sound[at : at + step])]
    pieces += cutter.end()
    assert cutter.seconds * RATE_HZ == len(sound) or len(sound) % 320
    return pieces


def test_silence_and_a_quiet_hiss_have_no_pieces():
    hiss = (np.random.default_rng(1).normal(0, 0.0004, 20 * RATE_HZ) * 2**15).astype(np.int16)
    for sound in (silence(0), silence(0.01), silence(100), hiss):
        assert cut(sound) == []


def test_a_click_is_no_speech_and_a_short_word_is():
    assert cut(np.concatenate([silence(2), tone(0.04), silence(3)])) == []
    (piece,) = cut(np.concatenate([silence(2), tone(0.25), silence(3)]))
    assert 1.7 <= piece.start <= 2
    assert 0.25 <= piece.seconds <= 0.8


def test_a_short_pause_stays_and_a_long_one_parts():
    one = cut(np.concatenate([tone(1), silence(1), tone(1)]))
    two = cut(np.concatenate([tone(1), silence(4), tone(1)]))
    assert [round(piece.start, 1) for piece in one] == [0.0]
    assert one[0].seconds >= 2.9
    assert [round(piece.start, 1) for piece in two] == [0.0, 4.8]


def test_what_is_too_long_is_cut_where_it_is_quietest():
    sound = np.concatenate([tone(20), tone(0.4, 0.004), tone(20)])
    first, second = cut(sound)
    assert 20.0 <= second.start <= 20.4
    assert 20.0 <= first.seconds <= second.start


def test_speech_over_a_loud_hum_is_not_dropped():
    hum = tone(30, 0.02)
    hum[5 * RATE_HZ : 8 * RATE_HZ] += tone(3, 0.2)
    heard = cut(hum)
    assert heard[0].start <= 5
    assert sum(piece.seconds for piece in heard) >= 3


_PARTS = st.lists(st.tuples(st.floats(0.02, 7), st.sampled_from([0.0, 0.001, 0.05, 0.3])), max_size=12)


@settings(max_examples=25)
@given(_PARTS, st.floats(1, 30), st.integers(4_000, 40_000))
def test_pieces_are_in_order_short_enough_and_have_all_that_is_loud(
    parts: list[tuple[float, float]], most_seconds: float, step: int
):
    sound = np.concatenate([silence(0), *(tone(*part) for part in parts)])
    pieces = cut(sound, most_seconds, step)
    heard, end = np.zeros(len(sound) + 320, np.bool_), 0
    for piece in pieces:
        begin, length = round(piece.start * RATE_HZ), len(piece.samples) // 2
        assert begin >= end
        assert 0 < piece.seconds <= most_seconds + 0.02
        assert np.array_equal(np.frombuffer(piece.samples, np.int16), sound[begin : begin + length])
        end = begin + length
        heard[begin:end] = True
    assert end <= len(sound)
    at = 0
    for seconds, level in parts:
        length = int(seconds * RATE_HZ)
        if level >= 0.05 and seconds > 0.2:
            assert heard[at : at + length].all()
        at += length
