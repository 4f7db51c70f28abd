"""The arithmetic of `bench keys`: the rank test, keys that only look real, paced calls, figures and aims."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import TYPE_CHECKING

import pytest
from benchmarks.compare import Row, row_of
from benchmarks.errors import BenchError
from benchmarks.keys_aims import Found, difference, verdicts
from benchmarks.keys_auth import CACHE, NO_STEP, OPEN, STEP, WITH_KEY, call_figures, get, step_in_process
from benchmarks.keys_limits import LIMITED, UNLIMITED, Pace, cpu_figures, limiter_in_process, paced
from benchmarks.keys_made import AMPLE, make_keys, unknown_key, wrong_secret
from benchmarks.rank_test import Area, area, combined
from benchmarks.workplace import open_workplace
from hypothesis import given
from hypothesis import strategies as st

from server.store import Database, KeyStore, sqlite_url
from server.store.api_key import parse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.figures import Figures
    from benchmarks.workplace import Workplace

SMALL = st.lists(st.integers(0, 6).map(float), min_size=2, max_size=12)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    models = tmp_path / "models.yaml"
    models.write_text(
        "models:\n  m: {task: chat, tier: t, capabilities: [chat], weights: m}\ntiers:\n  t: {models: [t]}\n"
    )
    with open_workplace(models, "m", None) as place:
        yield place


@given(SMALL, SMALL)
def test_the_area_is_the_part_of_pairs_in_which_the_first_is_larger(first: list[float], second: list[float]):
    wins = sum((one > other) + (one == other) / 2 for one, other in product(first, second))
    assert area(first, second).value == pytest.approx(wins / len(first) / len(second))
    assert area(first, second).value == pytest.approx(1 - area(second, first).value)
    assert area(first, second).standard_error == pytest.approx(area(second, first).standard_error)


def test_what_is_always_larger_has_all_of_the_area_and_is_told_apart():
    found = area([4.0, 5.0, 6.0], [1.0, 2.0, 3.0])
    assert (found.value, found.standard_error, found.distinguishable, found.p_value) == (1.0, 0.0, True, 0.0)


def test_equal_values_are_not_told_apart():
    found = area([1.0] * 5, [1.0] * 9)
    assert (found.value, found.distinguishable, found.p_value) == (0.5, False, 1.0)


def test_of_equal_distributions_the_error_is_that_of_mann_and_whitney():
    chance = random.Random(4)  # noqa: S311  # no secret
    first, second = ([chance.gauss(0, 1) for _ in range(4000)] for _ in range(2))
    found = area(first, second)
    assert found.standard_error == pytest.approx(math.sqrt(8001 / 12 / 4000 / 4000), rel=0.05)
    assert not found.distinguishable
    shifted = area([value + 0.1 for value in first], second)
    assert shifted.distinguishable
    assert shifted.value > 0.5
    assert shifted.p_value < 0.001


def test_repeats_make_the_interval_narrower():
    both = combined([Area(0.50, 0.02), Area(0.52, 0.02)])
    assert both.value == pytest.approx(0.51)
    assert both.standard_error == pytest.approx(0.02 / math.sqrt(2))
    assert both.low == pytest.approx(0.51 - 1.959964 * both.standard_error)


def test_a_wrong_secret_has_a_known_id_and_the_form_of_a_key():
    known = unknown_key()
    made = wrong_secret(known)
    one, other = parse(known), parse(made)
    assert one is not None
    assert other is not None
    assert one.public_id == other.public_id
    assert one.sha256 != other.sha256
    assert made != wrong_secret(known)


async def test_keys_are_made_with_ample_limits_and_without(place: Workplace):
    made = await make_keys(place, 2)
    async with await Database.open(sqlite_url(place.folder / "data")) as database:
        store = KeyStore(database)
        for texts, limits in ((made.limited, {AMPLE}), (made.unlimited, {type(AMPLE)()})):
            found = [await store.check(presented) for text in texts if (presented := parse(text)) is not None]
            assert {key.limits for key in found if key is not None} == limits
            assert len(found) == 2
        refused = parse(wrong_secret(made.limited[0]))
        assert refused is not None
        assert await store.check(refused) is None


async def test_the_step_by_itself_is_timed_with_a_key_that_gets_in(place: Workplace):
    made = await make_keys(place, 1)
    found = await step_in_process(place, made.unlimited[0], 20)
    assert set(found) == {CACHE, STEP, NO_STEP}
    assert all(figures["calls"] == 20 for figures in found.values())
    assert (found[STEP]["p50_ms"] or 0) > (found[NO_STEP]["p50_ms"] or 0)


async def test_a_step_that_lets_nobody_in_is_not_measured(place: Workplace):
    await make_keys(place, 1)
    with pytest.raises(BenchError, match="let no key in"):
        await step_in_process(place, unknown_key(), 20)


async def test_the_limiter_by_itself_is_timed_with_limits_and_without(place: Workplace, tmp_path: Path):
    pace = Pace(200.0, 0.1, 5)
    found = await limiter_in_process(place, sqlite_url(tmp_path / "limits.db"), pace)
    assert (found[LIMITED]["p50_ms"] or 0) > (found[UNLIMITED]["p50_ms"] or 0)


async def test_paced_calls_do_not_wait_for_each_other():
    numbers: list[int] = []

    async def call(number: int) -> None:
        numbers.append(number)

    times, wall_seconds = await paced(Pace(100.0, 0.1, 1), call)
    assert sorted(numbers) == list(range(10))
    assert len(times) == 10
    assert wall_seconds >= 0.09


async def test_a_failed_call_ends_a_paced_run():
    async def call(number: int) -> None:
        raise BenchError(f"no {number}")

    with pytest.raises(BenchError, match="no 0"):
        await paced(Pace(1000.0, 0.01, 1), call)


def test_processor_time_is_a_part_of_one_core_and_of_each_request():
    made = cpu_figures(0.5, 10.0, [0.001] * 1000)
    assert made["cpu_percent_of_one_core"] == pytest.approx(5)
    assert made["cpu_ms_per_request"] == pytest.approx(0.5)
    assert made["requests_per_second"] == pytest.approx(100)


def test_a_request_carries_its_key():
    assert get("/x", "hk_1", "h") == b"GET /x HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer hk_1\r\n\r\n"


def row(case: str, ours: str, theirs: str, *pairs: tuple[Figures, Figures]) -> Row:
    runs = {ours: [one for one, _ in pairs], theirs: [other for _, other in pairs]}
    return row_of(case, runs)


def found(added_ms: float, percent: float, middle: float) -> Found:
    def of(value_ms: float) -> Figures:
        return call_figures([value_ms / 1000] * 3)

    def cpu(of_core: float) -> Figures:
        return cpu_figures(of_core / 100, 1.0, [0.001])

    rows = [
        row("step alone", STEP, NO_STEP, (of(0.02), of(0.0))),
        row("HTTP", WITH_KEY, OPEN, (of(1.0 + added_ms), of(1.0))),
        row("limits, HTTP", LIMITED, UNLIMITED, (cpu(10.0 + percent), cpu(10.0))),
    ]
    return Found(rows, [Area(middle, 0.005)] * 3, [Area(0.5, 0.008)] * 3)


@pytest.mark.parametrize(
    ("added_ms", "percent", "middle", "missed"),
    [
        (0.2, 4.0, 0.502, []),
        (0.4, 4.0, 0.5, ["what the step adds to a request's p50"]),
        (0.2, 6.0, 0.5, ["what limits add"]),
        (0.2, 4.0, 0.52, ["refusals: wrong secrets from unknown ids are told apart"]),
        (0.2, 4.0, 0.48, ["refusals: wrong secrets from unknown ids are told apart"]),
    ],
)
def test_each_aim_is_judged_by_itself(added_ms: float, percent: float, middle: float, missed: list[str]):
    judged = verdicts(found(added_ms, percent, middle))
    said = [verdict.what for verdict in judged if verdict.met is False]
    assert len(said) == len(missed)
    assert all(what.startswith(start) for what, start in zip(said, missed, strict=True))


def test_a_difference_is_the_median_of_those_within_each_repeat():
    # The machine slowed down in between: medians of each side would say 6.
    pairs: list[tuple[Figures, Figures]] = [
        ({"x": 3.0}, {"x": 2.0}),
        ({"x": 13.0}, {"x": 12.0}),
        ({"x": 8.0}, {"x": 2.0}),
    ]
    assert difference(row("r", "a", "b", *pairs), "a", "b", "x") == 1.0
    assert difference(row("r", "a", "b", ({"x": None}, {"x": 1.0})), "a", "b", "x") is None
