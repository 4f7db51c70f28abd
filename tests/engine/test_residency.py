"""Turns on memory that cannot hold all models: never over budget, nobody starved, no swap after swap."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.pool.eviction import LONGEST_WAIT_SECONDS, SWAP_EVERY_SECONDS, Decision, Residency, Room

_CPU = None


def three(**rooms: Room) -> Residency:
    """Room for two of the three models a, b and c."""
    shipped = {name: Room({_CPU: 10}) for name in "abc"}
    return Residency({_CPU: 20}, shipped | rooms)


def filled(residency: Residency, now: float = 0.0) -> Residency:
    for name in residency.fill().load:
        residency.is_in(name, now)
    return residency


def carry_out(residency: Residency, decision: Decision, now: float) -> None:
    for name in decision.unload:
        residency.is_out(name)
    for name in decision.load:
        residency.is_in(name, now)


def test_at_the_start_as_many_are_loaded_as_there_is_room_for_pinned_ones_first() -> None:
    assert three().fill().load == ("a", "b")
    assert three(c=Room({_CPU: 10}, pinned=True)).fill().load == ("c", "a")


def test_the_one_that_was_used_longest_ago_makes_room() -> None:
    residency = filled(three())
    residency.began("a")
    residency.ended("a", 50.0)
    residency.asked("c", 60.0)
    assert residency.decide(60.0).unload == ("b",)
    assert residency.decide(60.0) == Decision()  # room is being made
    residency.is_out("b")
    assert residency.decide(61.0).load == ("c",)


def test_one_in_use_is_left_alone_until_another_has_waited_long() -> None:
    residency = filled(three(b=Room({_CPU: 10}, pinned=True)))
    residency.began("a")
    residency.asked("c", 60.0)
    assert residency.decide(60.0) == Decision(again_seconds=LONGEST_WAIT_SECONDS)
    assert residency.decide(60.0 + LONGEST_WAIT_SECONDS).unload == ("a",)
    assert residency.gives_way("a")
    residency.ended("a", 95.0)
    residency.is_out("a")
    assert residency.decide(95.0).load == ("c",)


def test_two_users_of_different_models_do_not_make_it_do_nothing_but_load() -> None:
    residency = filled(Residency({_CPU: 10}, {"a": Room({_CPU: 10}), "b": Room({_CPU: 10})}))
    now, wanted = 0.0, "b"
    while now < 300:
        if residency.presence(wanted) == "in":
            wanted = "a" if wanted == "b" else "b"
        residency.asked(wanted, now)
        carry_out(residency, residency.decide(now), now)
        now += 0.5
    assert 20 <= residency.swaps <= 300 / SWAP_EVERY_SECONDS


def test_what_waits_on_one_device_does_not_hold_up_another() -> None:
    residency = Residency({0: 10, 1: 10}, {"a": Room({0: 10}), "b": Room({0: 10}), "c": Room({1: 10})})
    residency.asked("a", 0.0)
    carry_out(residency, residency.decide(0.0), 0.0)
    residency.began("a")
    residency.asked("b", 1.0)
    residency.asked("c", 2.0)
    assert residency.decide(2.0).load == ("c",)


def test_one_that_nobody_uses_leaves_after_its_time() -> None:
    residency = filled(three(a=Room({_CPU: 10}, unload_after_seconds=60.0)))
    assert residency.decide(10.0) == Decision(again_seconds=50.0)
    residency.began("a")
    assert residency.decide(100.0) == Decision()
    residency.ended("a", 100.0)
    assert residency.decide(159.0).unload == ()
    assert residency.decide(160.0).unload == ("a",)


def test_one_that_is_too_large_by_itself_is_a_mistake_of_the_plan() -> None:
    with pytest.raises(ValueError, match="more than its device has"):
        Residency({_CPU: 10}, {"a": Room({_CPU: 11})})


class Turns(RuleBasedStateMachine):
    """Any order of requests, loads and ends, with all the time in the world between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.sizes = {"a": {0: 6}, "b": {0: 5, 1: 5}, "c": {1: 7}, "d": {0: 3, 1: 2}}
        rooms = {name: Room(sizes, pinned=name == "d") for name, sizes in self.sizes.items()}
        self.residency = Residency({0: 10, 1: 10}, rooms)
        self.users = dict.fromkeys(self.sizes, 0)
        self.loading: set[str] = set(self.residency.fill().load)
        self.leaving: set[str] = set()
        self.waiting: dict[str, float] = {}

    @rule(name=st.sampled_from("abcd"))
    def asks(self, name: str) -> None:
        if self.residency.presence(name) == "in":
            self.users[name] += 1
            self.residency.began(name)
        else:
            self.waiting.setdefault(name, self.now)
            self.residency.asked(name, self.now)

    @rule(name=st.sampled_from("abcd"))
    def ends(self, name: str) -> None:
        if self.users[name]:
            self.users[name] -= 1
            self.residency.ended(name, self.now)

    @rule(seconds=st.floats(0.1, 40))
    def passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def loaded(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.loading)))
        self.loading.remove(name)
        self.waiting.pop(name, None)
        self.residency.is_in(name, self.now)

    @precondition(lambda self: any(not self.users[name] for name in self.leaving))
    @rule(data=st.data())
    def left(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name in self.leaving if not self.users[name])))
        self.leaving.remove(name)
        self.residency.is_out(name)

    @rule()
    def decides(self) -> None:
        decision = self.residency.decide(self.now)
        assert "d" not in decision.unload
        self.loading |= set(decision.load)
        self.leaving |= set(decision.unload)

    @invariant()
    def nothing_is_over_budget(self) -> None:
        there = {name for name in self.sizes if self.residency.presence(name) != "out"}
        for device in (0, 1):
            taken = sum(self.sizes[name].get(device, 0) for name in there)
            assert taken == self.residency.used_bytes(device) <= 10

    def teardown(self) -> None:
        """Whatever has happened: when requests end, everybody who waits comes in."""
        for _ in range(100):
            for name in self.users:
                while self.users[name]:
                    self.ends(name)
            for name in sorted(self.loading):
                self.residency.is_in(name, self.now)
                self.waiting.pop(name, None)
            for name in sorted(self.leaving):
                self.residency.is_out(name)
            self.loading, self.leaving = set(), set()
            self.decides()
            self.now += SWAP_EVERY_SECONDS
        assert not self.waiting


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
