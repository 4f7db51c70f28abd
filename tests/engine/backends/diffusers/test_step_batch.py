"""Which images take a step together, and which steps are shown: pure questions, answered without a model."""

from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.diffusers import service
from engine.backends.diffusers.service import preview_steps

ROOM = {"small": 8, "medium": 4, "large": 1}


class Candidate(NamedTuple):
    """One image with steps to go, in a room for `batch` like it."""

    job: int
    kind: object
    batch: int

    @property
    def share(self) -> Fraction:
        return Fraction(1, self.batch)


def next_together(waiting: list[Candidate]) -> list[Candidate]:
    return service.next_together(waiting, lambda one: one.kind, lambda one: one.batch)


def jobs(*kinds: str, mixed: bool = False) -> list[Candidate]:
    return [Candidate(job, "any" if mixed else kind, ROOM[kind]) for job, kind in enumerate(kinds)]


def numbers(together: list[Candidate]) -> list[int]:
    return [candidate.job for candidate in together]


@pytest.mark.parametrize(
    ("waiting", "together"),
    [
        ([], []),
        (jobs("large"), [0]),
        (jobs("large", "large"), [0]),
        (jobs("medium", "medium", "medium", "medium", "medium"), [0, 1, 2, 3]),
        (jobs("small", "large", "small"), [0, 2]),
        (jobs("large", "small", "small"), [0]),
        (jobs("small", "medium", "medium", mixed=True), [0, 1, 2]),
        (jobs("small", "large", "small", mixed=True), [0, 2]),
        (jobs("medium", "medium", "small", "medium", "small", "small", mixed=True), [0, 1, 2, 3, 4]),
    ],
)
def test_the_first_is_joined_by_whoever_agrees_and_fits(waiting: list[Candidate], together: list[int]):
    assert numbers(next_together(waiting)) == together


candidates = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 8)), max_size=20).map(
    lambda kinds: [Candidate(job, kind, batch) for job, (kind, batch) in enumerate(kinds)]
)


@given(candidates)
def test_those_together_agree_fit_and_stand_in_order(waiting: list[Candidate]):
    together = next_together(waiting)
    assert len({candidate.kind for candidate in together}) <= 1
    assert sum((candidate.share for candidate in together), Fraction(0)) <= 1
    assert numbers(together) == sorted(numbers(together))


@given(candidates)
def test_the_first_always_takes_a_step(waiting: list[Candidate]):
    assert next_together(waiting)[:1] == waiting[:1]


@given(candidates)
def test_nobody_who_agrees_and_fits_is_left_out(waiting: list[Candidate]):
    together = next_together(waiting)
    left = Fraction(1) - sum((candidate.share for candidate in together), Fraction(0))
    for candidate in waiting:
        if candidate not in together and candidate.kind == together[0].kind:
            before = sum((one.share for one in together if one.job < candidate.job), Fraction(0))
            assert candidate.share > 1 - before or candidate.share > left


@given(candidates)
def test_nobody_waits_for_more_than_one_step_of_each_of_the_others(waiting: list[Candidate]):
    """However odd its size is, and however many steps they have left: who has stepped goes to the end."""
    line = list(waiting)
    stepped: set[int] = set()
    for _ in waiting:
        together = next_together(line)
        stepped |= {candidate.job for candidate in together}
        line = [candidate for candidate in line if candidate not in together] + together
    assert stepped == {candidate.job for candidate in waiting}


@pytest.mark.parametrize(
    ("steps", "previews", "shown"),
    [(8, 0, ()), (8, 1, (4,)), (8, 3, (2, 4, 6)), (9, 2, (3, 6)), (4, 3, (1, 2, 3)), (2, 3, (1,)), (1, 3, ())],
)
def test_previews_are_spread_evenly_over_the_steps(steps: int, previews: int, shown: tuple[int, ...]):
    assert preview_steps(steps, previews) == shown
