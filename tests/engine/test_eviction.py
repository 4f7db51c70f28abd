"""What is loaded and evicted where memory cannot hold all models: never over budget, none starved, no swap after swap."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.pool.memory import LONGEST_WAIT_SECONDS, SWAP_EVERY_SECONDS, Decision, Model, decide, fill

NOW = 100.0
LATER = NOW - LONGEST_WAIT_SECONDS
BUDGETS = {0: 20, 1: 10}


def is_in(name: str, used_at: float = 0.0, **more: object) -> Model:
    return replace(Model(name, {0: 10}, "in", used_at=used_at), **more)


def asked(name: str = "c", since: float = NOW, **more: object) -> Model:
    return replace(Model(name, {0: 10}, asked_at=since), **more)


@dataclass(frozen=True)
class Situation:
    name: str
    models: tuple[Model, ...]
    decided: Decision
    swapped_at: dict[int | None, float] = field(default_factory=dict)


WAITING = LONGEST_WAIT_SECONDS
SITUATIONS = [
    Situation("nothing is asked for", (is_in("a"), Model("b", {0: 10})), Decision()),
    Situation("there is room", (is_in("a"), asked()), Decision(load=("c",))),
    Situation("room for one of two: who waits longest", (is_in("a"), asked("b", 9), asked("c", 8)), Decision(("c",))),
    Situation(
        "the one that was used longest ago", (is_in("a", 5), is_in("b", 4), asked()), Decision((), ("b",), ("c",))
    ),
    Situation(
        "an idle one before one in use, however long ago",
        (is_in("a", 1, leases=1), is_in("b", 9), asked(since=LATER)),
        Decision((), ("b",), ("c",)),
    ),
    Situation(
        "all are in use: not before a request has waited long",
        (is_in("a", leases=1), is_in("b", leases=2), asked()),
        Decision(again_seconds=LONGEST_WAIT_SECONDS),
    ),
    Situation(
        "all are in use, and a request has waited long",
        (is_in("a", 2, leases=1), is_in("b", 3, leases=2), asked(since=LATER)),
        Decision((), ("a",), ("c",)),
    ),
    Situation(
        "a pinned one never",
        (is_in("a", 9, leases=1), is_in("b", pinned=True), asked()),
        Decision(again_seconds=WAITING),
    ),
    Situation("only pinned ones", (is_in("a", pinned=True), is_in("b", pinned=True), asked()), Decision()),
    Situation(
        "one that was just loaded stays for a while",
        (is_in("a", loaded_at=NOW - 4), is_in("b", leases=1, loaded_at=NOW - 4), asked()),
        Decision(again_seconds=SWAP_EVERY_SECONDS - 4),
    ),
    Situation(
        "the device was just swapped",
        (is_in("a"), is_in("b"), asked()),
        Decision(again_seconds=SWAP_EVERY_SECONDS - 1),
        {0: NOW - 1},
    ),
    Situation(
        "another device was just swapped",
        (is_in("a"), is_in("b", 1), asked()),
        Decision((), ("a",), ("c",)),
        {1: NOW - 1},
    ),
    Situation("enough is leaving already", (is_in("a"), replace(is_in("b"), state="leaving"), asked()), Decision()),
    Situation("one that comes is not evicted", (Model("a", {0: 20}, "coming"), asked()), Decision()),
    Situation(
        "no more than needed: the last one alone is enough",
        (is_in("a", 1, bytes_on={0: 4}), is_in("b", 2, bytes_on={0: 16}), asked()),
        Decision((), ("b",), ("c",)),
    ),
    Situation(
        "two where one is not enough",
        (is_in("a", 1), is_in("b", 2), asked(bytes_on={0: 20})),
        Decision((), ("a", "b"), ("c",)),
    ),
    Situation(
        "only what is on the device that lacks",
        (is_in("a", 1, bytes_on={1: 10}), is_in("b", 2, bytes_on={0: 20}), asked()),
        Decision((), ("b",), ("c",)),
    ),
    Situation(
        "a wait on one device does not hold up another",
        (is_in("a", leases=1, bytes_on={0: 20}), asked("b", 98), asked("c", 99, bytes_on={1: 10})),
        Decision(("c",), again_seconds=LONGEST_WAIT_SECONDS - 2),
    ),
    Situation(
        "what is freed is for who waits longest, though another one would fit",
        (is_in("a", leases=1, bytes_on={0: 15}), asked("b", 98), asked("c", 99, bytes_on={0: 5})),
        Decision(again_seconds=LONGEST_WAIT_SECONDS - 2),
    ),
    Situation("idle for too long", (is_in("a", 40, unload_after_seconds=60.0),), Decision((), ("a",))),
    Situation("not idle for long enough", (is_in("a", 90, unload_after_seconds=60.0),), Decision(again_seconds=50.0)),
    Situation("in use, not idle", (is_in("a", 40, leases=1, unload_after_seconds=60.0),), Decision()),
    Situation("pinned, however idle", (is_in("a", 40, pinned=True, unload_after_seconds=60.0),), Decision()),
    Situation(
        "a reload gave the memory of one to others",
        (is_in("a", 5), is_in("b", 4), is_in("c", 6)),
        Decision((), ("b",)),
    ),
    Situation(
        "a reload took a single byte",
        (is_in("a", 5, bytes_on={0: 11}), is_in("b", 4)),
        Decision((), ("b",)),
    ),
    Situation(
        "two ask at the same moment: by name",
        (is_in("a", leases=1), Model("c", {0: 10}, asked_at=9), Model("b", {0: 5}, asked_at=9)),
        Decision(("b",)),
    ),
    Situation("a device without a budget has no room", (Model("a", {2: 1}, asked_at=9),), Decision()),
    Situation(
        "a single byte is lacking",
        (is_in("a", bytes_on={0: 11}), asked()),
        Decision((), ("a",), ("c",)),
    ),
    Situation(
        "the pause ends at this moment",
        (is_in("a"), is_in("b", 1), asked()),
        Decision((), ("a",), ("c",)),
        {0: NOW - SWAP_EVERY_SECONDS},
    ),
    Situation(
        "the pause ends within the second",
        (is_in("a"), is_in("b", 1), asked()),
        Decision(again_seconds=0.5),
        {0: NOW - SWAP_EVERY_SECONDS + 0.5},
    ),
    Situation(
        "one becomes ripe at this moment",
        (is_in("a", loaded_at=NOW - SWAP_EVERY_SECONDS), is_in("b", 1, loaded_at=NOW - 1), asked()),
        Decision((), ("a",), ("c",)),
    ),
    Situation(
        "one becomes ripe within the second",
        (is_in("a", loaded_at=NOW - SWAP_EVERY_SECONDS + 0.5), is_in("b", loaded_at=NOW), asked()),
        Decision(again_seconds=0.5),
    ),
    Situation(
        "a ripe one is not enough: when the next one is",
        (is_in("a", loaded_at=NOW - SWAP_EVERY_SECONDS), is_in("b", loaded_at=NOW - 4), asked(bytes_on={0: 20})),
        Decision(again_seconds=SWAP_EVERY_SECONDS - 4),
    ),
    Situation(
        "a device where it fits exactly may have just been swapped",
        (is_in("a"), is_in("b", 1), asked(bytes_on={0: 10, 1: 10})),
        Decision((), ("a",), ("c",)),
        {1: NOW - 1},
    ),
]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name.replace(" ", "-"))
def test_what_is_decided(situation: Situation) -> None:
    assert decide(situation.models, BUDGETS, situation.swapped_at, NOW) == situation.decided


def test_the_first_swap_on_a_device_needs_no_pause() -> None:
    models = (is_in("a", loaded_at=-SWAP_EVERY_SECONDS), asked("b", since=0.0, bytes_on={0: 20}))
    assert decide(models, BUDGETS, {}, now=0.0) == Decision((), ("a",), ("b",))


def test_at_the_start_as_many_are_loaded_as_there_is_room_for_pinned_ones_first() -> None:
    three = [Model(name, {0: 10}) for name in "abc"]
    assert fill(three, BUDGETS) == ("a", "b")
    assert fill([*three[:2], replace(three[2], pinned=True)], BUDGETS) == ("c", "a")


def test_two_that_are_asked_for_in_turns_are_swapped_at_most_so_often() -> None:
    models = {name: Model(name, {0: 10}, state) for name, state in (("a", "in"), ("b", "out"))}
    swapped_at: dict[int | None, float] = {}
    swaps = 0
    for second in range(300):
        now = NOW + second
        wanted = "ab"[second % 2]
        if models[wanted].state == "out" and models[wanted].asked_at is None:
            models[wanted] = replace(models[wanted], asked_at=now)
        decision = decide(models.values(), {0: 10}, swapped_at, now)
        swaps += len(decision.swaps)
        for name in decision.evict:
            models[name] = replace(models[name], state="out")
        swapped_at |= dict.fromkeys([0] if decision.swaps else [], now)
        for name in decision.load:
            models[name] = replace(models[name], state="in", asked_at=None, loaded_at=now, used_at=now)
    assert 20 <= swaps <= 300 / SWAP_EVERY_SECONDS


class Swaps(RuleBasedStateMachine):
    """Any order of requests, loads and ends, with all the time in the world between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        sizes = {"a": {0: 6}, "b": {0: 5, 1: 5}, "c": {1: 7}, "d": {0: 3, 1: 2}}
        self.budgets = {0: 10, 1: 10}
        self.swapped_at: dict[int | None, float] = {}
        self.models = {name: Model(name, size, pinned=name == "d") for name, size in sizes.items()}
        for name in fill(self.models.values(), self.budgets):
            self.change(name, state="coming")

    def change(self, name: str, **what: object) -> None:
        self.models[name] = replace(self.models[name], **what)

    def of(self, state: str) -> list[str]:
        return sorted(name for name, model in self.models.items() if model.state == state)

    def come(self, name: str) -> None:
        self.change(name, state="in", asked_at=None, loaded_at=self.now, used_at=self.now)

    @rule(name=st.sampled_from("abcd"))
    def asks(self, name: str) -> None:
        model = self.models[name]
        if model.state == "in":
            self.change(name, leases=model.leases + 1)
        elif model.asked_at is None:
            self.change(name, asked_at=self.now)

    @rule(name=st.sampled_from("abcd"))
    def ends(self, name: str) -> None:
        if self.models[name].leases:
            self.change(name, leases=self.models[name].leases - 1, used_at=self.now)

    @rule(seconds=st.floats(0.1, 40))
    def passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.of("coming"))
    @rule(data=st.data())
    def loaded(self, data: st.DataObject) -> None:
        self.come(data.draw(st.sampled_from(self.of("coming"))))

    @precondition(lambda self: any(not self.models[name].leases for name in self.of("leaving")))
    @rule(data=st.data())
    def left(self, data: st.DataObject) -> None:
        unused = [name for name in self.of("leaving") if not self.models[name].leases]
        self.change(data.draw(st.sampled_from(unused)), state="out")

    @rule()
    def decides(self) -> None:
        before = dict(self.models)
        decision = decide(self.models.values(), self.budgets, self.swapped_at, self.now)
        assert self.models == before
        assert "d" not in decision.evict
        assert {self.models[name].state for name in decision.evict} <= {"in"}
        for name in decision.load:
            self.change(name, state="coming")
        for name in decision.evict:
            self.change(name, state="leaving")
        for name in decision.swaps:
            self.swapped_at |= dict.fromkeys(self.models[name].bytes_on, self.now)

    @invariant()
    def nothing_is_over_budget(self) -> None:
        for device, budget in self.budgets.items():
            assert sum(model.on(device) for model in self.models.values() if model.state != "out") <= budget

    def teardown(self) -> None:
        """Whatever has happened: when requests end, all that is asked for is loaded."""
        for _ in range(100):
            for name in self.models:
                while self.models[name].leases:
                    self.ends(name)
            for name in self.of("coming"):
                self.come(name)
            for name in self.of("leaving"):
                self.change(name, state="out")
            self.decides()
            self.now += SWAP_EVERY_SECONDS
        assert not [name for name, model in self.models.items() if model.asked_at is not None]


TestSwaps = Swaps.TestCase
TestSwaps.settings = settings(max_examples=100, stateful_step_count=40)
