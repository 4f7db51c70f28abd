"""Whose turn it is, to the token: counters, lifts, draws, patience, and who is refused."""

from typing import Any

import pytest

from engine.admission import ANSWER_TOKEN_COST, PATIENCE_SECONDS, Claim, FairQueue, InFlight
from engine.types import Urgency

INTERACTIVE, BATCH, BACKGROUND = Urgency.INTERACTIVE, Urgency.BATCH, Urgency.BACKGROUND


def claim(owner: str, at: float = 0.0, **more: Any) -> Claim:
    values = {"weight": 1.0, "urgency": INTERACTIVE, "sequences": 1, "prompt_tokens": 10, "expected_answer_tokens": 0.0}
    return Claim(owner, **(values | {"longest_answer_tokens": 0, "arrived_at": at} | more))


def waiting(queue: FairQueue, *claims: Claim) -> None:
    for one in claims:
        queue.arrive(one)
        queue.push(one)


def served(queue: FairQueue, one: Claim, answer: float = 0.0) -> None:
    queue.arrive(one)
    queue.charge(one, answer)


def order(queue: FairQueue, now: float = 0.0) -> list[str]:
    return [one.owner for one in queue.in_turn(now)]


def test_a_guess_is_charged_at_the_beginning_and_put_right_at_the_end():
    queue, first = FairQueue(), claim("a", prompt_tokens=10, weight=2.0)
    served(queue, first, answer=100)
    assert (queue._counters["a"], first.cost) == (105.0, 105.0)
    queue.charge(first, 20)
    assert (queue._counters["a"], first.cost) == ((10 + ANSWER_TOKEN_COST * 20) / 2, 25.0)


def test_who_has_had_the_least_goes_first():
    queue = FairQueue()
    waiting(queue, claim("a"), claim("b"), claim("c"))
    for owner, answer in (("a", 30), ("b", 10), ("c", 20)):
        queue.charge(claim(owner), answer)
    assert order(queue) == ["b", "c", "a"]


def test_who_comes_back_begins_at_the_smallest_counter_of_those_who_wait():
    queue = FairQueue()
    waiting(queue, claim("a"), claim("b"))
    queue.charge(claim("a"), 100)
    queue.charge(claim("b"), 50)
    waiting(queue, claim("c"))
    assert queue._counters == {"a": 210.0, "b": 110.0, "c": 110.0}
    queue.charge(claim("b"), -50)
    waiting(queue, claim("b"), claim("a"))
    assert queue._counters == {"a": 210.0, "b": 20.0, "c": 110.0}, "no lift where something of theirs waits"


def test_where_nobody_waits_the_counter_served_last_is_the_floor():
    queue = FairQueue()
    queue.arrive(claim("a"))
    assert queue._counters["a"] == 0.0
    queue.charge(claim("a"), 100)
    queue.arrive(claim("b"))
    assert queue._counters["b"] == 210.0


def test_on_a_draw_the_one_who_was_just_served_goes_last_and_then_the_older_one_first():
    queue = FairQueue()
    queue.charge(claim("b"), 0)
    queue.charge(claim("c"), 0)
    queue.charge(claim("a"), 0)
    waiting(queue, claim("a", at=1), claim("b", at=3), claim("c", at=2))
    assert order(queue) == ["c", "b", "a"]


def test_first_come_first_served_goes_by_arrival_within_an_urgency():
    queue = FairQueue(fair=False)
    queue.charge(claim("a"), 1000)
    waiting(queue, claim("c", at=0, urgency=BATCH), claim("b", at=2), claim("a", at=1))
    assert order(queue, now=3) == ["a", "b", "c"]


def test_only_the_first_claim_of_an_owner_is_looked_at_and_what_goes_leaves_its_place():
    queue, first, second = FairQueue(), claim("a", at=1), claim("a", at=2)
    waiting(queue, first, second, claim("a", urgency=BATCH))
    assert [one.arrived_at for one in queue.in_turn(0)] == [1, 0]
    queue.remove(first)
    assert next(queue.in_turn(0)) is second
    queue.remove(second)
    assert (len(queue), queue.count(INTERACTIVE), queue.count(BATCH)) == (1, 0, 1)


@pytest.mark.parametrize(
    ("urgency", "late"), [(INTERACTIVE, INTERACTIVE), (BATCH, INTERACTIVE), (BACKGROUND, BATCH)], ids=str
)
def test_patience_ends_after_so_many_seconds(urgency: Urgency, late: Urgency):
    one = claim("a", at=5, urgency=urgency)
    assert one.urgency_at(5 + PATIENCE_SECONDS - 0.001) == urgency
    assert one.urgency_at(5 + PATIENCE_SECONDS) == late


def test_a_batch_goes_before_a_background_request_and_both_after_interactive_ones():
    queue = FairQueue()
    waiting(queue, claim("c", urgency=BACKGROUND), claim("b", urgency=BATCH), claim("a"))
    assert order(queue) == ["a", "b", "c"]
    queue.charge(claim("a"), 50)
    assert order(queue, now=PATIENCE_SECONDS) == ["b", "a", "c"]


def test_the_newest_of_the_owner_with_the_most_is_refused_if_another_would_have_fewer():
    queue = FairQueue()
    newest = claim("a", at=3)
    waiting(queue, claim("a"), claim("a", at=1), newest, claim("b"), claim("c", urgency=BATCH))
    assert queue.to_refuse(INTERACTIVE, "new") is newest
    assert queue.to_refuse(INTERACTIVE, "b") is newest
    assert queue.to_refuse(INTERACTIVE, "a") is None
    waiting(queue, claim("b"))
    assert queue.to_refuse(INTERACTIVE, "b") is None, "both would have three"
    assert queue.to_refuse(BACKGROUND, "new") is None
    assert queue.to_refuse(BATCH, "new") is None
    first_come = FairQueue(fair=False)
    waiting(first_come, claim("a"), claim("a"), claim("a"))
    assert first_come.to_refuse(INTERACTIVE, "new") is None


def test_of_a_thousand_owners_only_those_above_the_floor_are_remembered():
    queue = FairQueue()
    waiting(queue, claim("waits"))
    queue.charge(claim("waits"), 20)  # the floor: 50
    queue.charge(claim("above"), 21)
    queue.charge(claim("at"), 20)
    for number in range(1021):
        queue.charge(claim(f"below {number}"), 1)
    assert len(queue._counters) == 1024, "not looked at before there are more"
    queue.charge(claim("last"), 1)
    assert queue._counters == {"waits": 50.0, "above": 52.0, "last": 12.0}


def test_a_share_is_what_all_would_have_equally():
    flying = InFlight()
    for owner in ("a", "a", "b", "c"):
        flying.add(owner)
    assert not flying.has_share("a", 5), "one more is free"
    assert flying.has_share("a", 4)
    assert not flying.has_share("b", 4)
    assert not flying.has_share("new", 4)
    flying.add("b")
    flying.add("c")
    assert all(flying.has_share(owner, 6) for owner in "abc")
    flying.remove("a")
    assert flying["a"] == 1
    flying.remove("a")
    assert set(flying) == {"b", "c"}
