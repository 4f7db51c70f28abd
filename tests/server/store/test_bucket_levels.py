"""What a bucket holds, and how long until it holds more, to the nanosecond; no database."""

import math

import pytest

from server.store.limits import Ask, Level

SECOND = 10**9


def test_a_cost_flows_back_in_its_part_of_the_window():
    assert Ask("k", 5, 20, 60.0).nanoseconds == 15 * SECOND
    assert Ask("k", 5, 20).window == 60 * SECOND
    assert Ask("k", 5, 20, 0.5).window == SECOND // 2
    assert Ask("k", 0, 0).nanoseconds == 0


def test_a_part_of_a_bucket_is_kept_but_never_so_much_that_a_cost_could_not_be_taken():
    assert Ask("k", 5, 20).open_window == 60 * SECOND
    assert Ask("k", 5, 20, kept=0.25).open_window == 45 * SECOND
    assert Ask("k", 19, 20, kept=0.25).open_window == 57 * SECOND


@pytest.mark.parametrize(
    ("tat", "used"),
    [(None, 0), (0, 0), (100, 0), (101, 1), (100 + 60 * SECOND, 60 * SECOND), (101 + 60 * SECOND, 60 * SECOND)],
)
def test_what_is_used_is_never_less_than_nothing_nor_more_than_all(tat: int | None, used: int):
    assert Ask("k", 1, 20).used(tat, 100) == used


def test_a_level_tells_what_is_left_and_when_it_is_full_again():
    assert Ask("k", 1, 20).level(None, 0) == Level("k", 20, 20, 0.0)
    assert Ask("k", 1, 20).level(15 * SECOND, 0) == Level("k", 20, 15, 15.0)
    assert Ask("k", 1, 20).level(1, 0) == Level("k", 20, 20, 1e-9)
    assert Ask("k", 1, 20).level(math.inf, 0) == Level("k", 20, 0, 60.0)


def test_units_that_were_cut_to_whole_nanoseconds_are_whole_units():
    ask = Ask("k", 1, 7)
    assert [ask.level(count * ask.nanoseconds, 0).remaining for count in range(8)] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert ask.level(ask.nanoseconds + 20_000, 0).remaining == 5
